"""Find the largest logits of each row: `arg_max` and `top_k`. Ties go to the lowest token id.

A row's result never depends on the other rows, and the first entries never depend on k.
Shape legend: R rows, V vocabulary, K the largest of a row.
"""

import torch

from quire.ops.host import native
from quire.ops.host.threads import num_threads

_LOW_31 = 0x7FFFFFFF
_ID_BITS = 32


def arg_max_reference(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `arg_max` with torch, [R] each."""
    values_R, ids_R = logits_RV.max(dim=-1)
    return ids_R, values_R


def arg_max(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids (int64 [R]) and values (float32 [R]) of the largest logits.

    The value is NaN for a row that holds one; the id is then meaningless.
    """
    core = native.core_for(logits_RV)
    if core is None:
        return arg_max_reference(logits_RV)
    num_rows, vocab_size = logits_RV.shape
    ids_R = torch.empty(num_rows, dtype=torch.int64)
    values_R = torch.empty(num_rows, dtype=torch.float32)
    core.arg_max(
        native.address(ids_R, torch.int64),
        native.address(values_R, torch.float32),
        native.address(logits_RV, torch.float32),
        num_rows,
        vocab_size,
        num_threads(),
    )
    return ids_R, values_R


def top_k_reference(logits_RV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `top_k` with torch, [R, K] each. A token becomes one integer: larger logits, then
    lower ids first.

    torch's own choice among equal logits differs between devices; all these integers are distinct.
    """
    vocab_size = logits_RV.shape[-1]
    bits_RV = (logits_RV + 0.0).view(torch.int32)  # + 0.0 turns -0 into 0
    ordered_RV = bits_RV ^ ((bits_RV >> 31) & _LOW_31)
    reversed_ids_V = torch.arange(vocab_size - 1, -1, -1, device=logits_RV.device)
    keys_RV = (ordered_RV.long() << _ID_BITS) | reversed_ids_V
    if k == vocab_size:
        keys_RK = keys_RV.sort(dim=-1, descending=True).values
    else:
        keys_RK = keys_RV.topk(k, dim=-1).values
    ids_RK = vocab_size - 1 - (keys_RK & ((1 << _ID_BITS) - 1))
    return logits_RV.gather(-1, ids_RK), ids_RK


def top_k(logits_RV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values (float32 [R, K]) and token ids (int64 [R, K]) of the k largest logits, in
    descending order.

    Needs 1 <= k <= V and rows without NaN.
    """
    core = native.core_for(logits_RV)
    if core is None:
        return top_k_reference(logits_RV, k)
    num_rows, vocab_size = logits_RV.shape
    values_RK = torch.empty(num_rows, k, dtype=torch.float32)
    ids_RK = torch.empty(num_rows, k, dtype=torch.int64)
    core.top_k(
        native.address(values_RK, torch.float32),
        native.address(ids_RK, torch.int64),
        native.address(logits_RV, torch.float32),
        num_rows,
        vocab_size,
        k,
        num_threads(),
    )
    return values_RK, ids_RK
