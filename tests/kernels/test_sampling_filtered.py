"""The cutoff of filtered rows keeps exactly the tokens that the torch reference keeps.

Covers `ops/kernels/sampling/sampling_scan.py`.
"""

import pytest
import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import next_power_of_2
from quire.ops.kernels.sampling.sampling_filtered import cutoff_of_row
from quire.ops.sampling.choice import Filters, keep_candidates
from quire.ops.sampling.top_k import top_k_reference
from tests.support.cases import in_turn
from tests.support.kernels.sampling_oracle import FILTERS, random_logits

GROUP = 128
UNUSED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
SETTINGS = [
    *FILTERS,
    {"top_k": 300, "top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 0.9999},
    {"min_p": 1e-30},
    {"min_p": 1e-3, "temperature": 3.0},
    {"top_k": 400, "min_p": 0.3},
    {"top_k": 400, "min_p": 0.3, "top_p": 0.5},
    {"top_p": 0.3, "temperature": 0.05},
]


@triton.jit
def _cutoffs(
    key_ptr, ties_ptr, logits_ptr, held_ptr, maxima_ptr, masses_ptr, vocab_size, num_groups,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr, MAX_HELD: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    group = tl.arange(0, NUM_GROUPS)
    of_row = maxima_ptr + row * num_groups
    peak = tl.max(tl.load(of_row + group, mask=group < num_groups, other=-float("inf")), axis=0)
    key, num_ties, _, _, _ = cutoff_of_row(
        logits_ptr + row * vocab_size, held_ptr + row * MAX_HELD, of_row,
        masses_ptr + row * num_groups, vocab_size, num_groups, peak,
        tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row),
        tl.load(min_p_ptr + row), NUM_GROUPS, GROUP, MAX_HELD, UNUSED_BITS,
    )  # fmt: skip
    tl.store(key_ptr + row, key)
    tl.store(ties_ptr + row, num_ties)


def kept_by_kernel(
    logits: torch.Tensor, temperatures: torch.Tensor, filters: Filters, max_groups: int
) -> torch.Tensor:
    """Return bool [R, V], from the cutoff's key and number of ties."""
    num_rows, vocab_size = logits.shape
    num_groups = -(-vocab_size // GROUP)
    padded = torch.nn.functional.pad(
        logits.float(), (0, num_groups * GROUP - vocab_size), value=-torch.inf
    )
    groups = padded.view(num_rows, num_groups, GROUP)
    maxima = groups.amax(dim=-1)
    finite = maxima.clamp_min(-1e30)[..., None]
    masses = ((groups - finite) / temperatures[:, None, None]).exp().sum(dim=-1)
    keys = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    ties = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    held = torch.empty(num_rows, max_groups, dtype=torch.int32, device=logits.device)
    _cutoffs[(num_rows,)](
        keys, ties, logits, held, maxima, masses, vocab_size, num_groups,
        temperatures, filters.top_k, filters.top_p, filters.min_p,
        NUM_GROUPS=next_power_of_2(num_groups), GROUP=GROUP, MAX_HELD=max_groups,
        UNUSED_BITS=UNUSED_BITS[logits.dtype], num_warps=16,
    )  # fmt: skip
    bits = (logits.float() + 0.0).view(torch.int32)
    token_keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> UNUSED_BITS[logits.dtype]
    is_tie = token_keys == keys[:, None]
    place = is_tie.cumsum(dim=-1) - 1
    return (token_keys > keys[:, None]) | (is_tie & (place < ties[:, None]))


def kept_by_reference(
    logits: torch.Tensor, temperatures: torch.Tensor, filters: Filters
) -> torch.Tensor:
    values, ids = top_k_reference(logits.float(), logits.shape[-1])
    scaled = values.double() / temperatures[:, None].double()
    kept, _ = keep_candidates(scaled, None, filters, logits.shape[-1])
    # top-k may keep masked tokens; they have no weight.
    return torch.zeros_like(kept).scatter(-1, ids, kept & values.isfinite())


# Spread of the logits, their dtype, and the size of the vocabulary.
SPREADS = [
    (0.02, torch.float32, 1000),
    (1.0, torch.float32, 900),
    (3.0, torch.float16, 999),
    (8.0, torch.bfloat16, 1000),
    (0.5, torch.bfloat16, 1000),
    (0.0, torch.float32, 700),
]


@pytest.mark.parametrize(
    ("logits_of", "seed", "max_groups"), in_turn(SPREADS, [0, 1], [8, 2]), ids=str
)
def test_cutoff_keeps_the_tokens_of_the_reference(
    logits_of: tuple[float, torch.dtype, int], seed: int, max_groups: int, device: torch.device
) -> None:
    """Spreads are wide and narrow, with many equal logits (bfloat16), all equal, or masked."""
    spread, dtype, vocab_size = logits_of
    logits = random_logits(len(SETTINGS), vocab_size, spread, seed + 20).to(dtype)
    if seed == 1:
        logits[:, 1::3] = -torch.inf
        logits[:, 2::3] -= 5
    logits = logits.to(device)

    def column(name: str, default: float) -> torch.Tensor:
        return torch.tensor([item.get(name, default) for item in SETTINGS], device=device)

    temperatures = column("temperature", 1.0)
    filters = Filters(column("top_k", 0), column("top_p", 1.0), column("min_p", 0.0))
    found = kept_by_kernel(logits, temperatures, filters, max_groups)
    expected = kept_by_reference(logits, temperatures, filters)
    wrong = (found != expected).sum(dim=-1).nonzero()[:, 0].tolist()
    assert not wrong, [
        (SETTINGS[row], int(found[row].sum()), int(expected[row].sum())) for row in wrong
    ]
