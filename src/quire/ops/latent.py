"""Products of latent attention with each head's own weights (DeepSeek-V2, section 2.1.2).

Shape legend: T tokens, N heads, P dimensions of a head's query without rotation, E rotated
dimensions, R size of a compressed vector, L = R + E, V size of a head's value.

A head's weights make keys and values of compressed vectors. Absorbed attention multiplies the query
with the key weights, and what the head reads with the value weights. So keys and values of cached
tokens are never made. Weights are stacked in one tensor, or one `pack_weight` result per head. With
packed weights a token's results have the same bits in any batch.
"""

from collections.abc import Sequence

import torch

from quire.ops.host.native import address, needed_core
from quire.ops.host.threads import num_threads
from quire.ops.linear import linear
from quire.ops.registry import op
from quire.ops.weights.device_weights import Weight
from quire.ops.weights.packed import ELEMENTS, PackedWeight

HeadWeights = torch.Tensor | Sequence[Weight]


@op("latent_queries")
def latent_queries(
    q_TNP: torch.Tensor, rotated_TNE: torch.Tensor, weights: HeadWeights
) -> torch.Tensor:
    """Return the queries of absorbed attention, [T, N, L]: each head's query times its key weights,
    and its rotated part. weights: [N, R, P]."""
    return torch.cat((_by_head(q_TNP, weights), rotated_TNE), dim=-1)


@op("join_heads")
def join_heads(q_TNP: torch.Tensor, rotated_TNE: torch.Tensor) -> torch.Tensor:
    """Return the queries of the expanded form, [T, N, P + E]."""
    return torch.cat((q_TNP, rotated_TNE), dim=-1)


@op("latent_values")
def latent_values(read_TNR: torch.Tensor, weights: HeadWeights) -> torch.Tensor:
    """Return each head's values of the vectors that it read, [T, N, V]. weights: [N, V, R]."""
    return _by_head(read_TNR, weights)


@op("expand_latents")
def expand_latents(
    latent_CL: torch.Tensor, keys: HeadWeights, values: HeadWeights
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each head's keys [C, N, P + E] and values [C, N, V] of C latent vectors. keys:
    [N, R, P]. values: [N, V, R]."""
    keys_NRP, values_NVR = _stacked(keys), _stacked(values)
    rank = values_NVR.shape[-1]
    compressed_CR, rotated_C1E = latent_CL[:, :rank], latent_CL[:, None, rank:]
    k_CNP = torch.einsum("cr,nrp->cnp", compressed_CR, keys_NRP)
    v_CNV = torch.einsum("cr,nvr->cnv", compressed_CR, values_NVR)
    return torch.cat((k_CNP, rotated_C1E.expand(-1, k_CNP.shape[1], -1)), dim=-1), v_CNV


def _by_head(x_TNI: torch.Tensor, weights: HeadWeights) -> torch.Tensor:
    """Multiply each head with its weight [O, I]; return [T, N, O], contiguous."""
    if isinstance(weights, torch.Tensor):
        out_NTO = torch.bmm(x_TNI.transpose(0, 1), weights.transpose(1, 2))
        return out_NTO.transpose(0, 1).contiguous()
    packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
    if len(packed) == len(weights):
        return _by_packed_head(x_TNI, packed)
    outs = [linear(x_TNI[:, head], weight) for head, weight in enumerate(weights)]
    return torch.stack(outs, dim=1)


def _by_packed_head(x_TNI: torch.Tensor, weights: Sequence[PackedWeight]) -> torch.Tensor:
    """Multiply all heads in one call of the core (csrc/head_products.h)."""
    outputs, inputs = weights[0].shape
    assert x_TNI.shape[1:] == (len(weights), inputs), f"other heads: {x_TNI.shape}"
    assert x_TNI.stride(2) == 1, f"a head's numbers must be contiguous: {x_TNI.stride()}"
    out_TNO = torch.empty(len(x_TNI), len(weights), outputs, dtype=x_TNI.dtype)
    needed_core().head_products(
        address(out_TNO, x_TNI.dtype),
        x_TNI.data_ptr(),
        ELEMENTS[x_TNI.dtype],
        len(x_TNI),
        (x_TNI.stride(0), x_TNI.stride(1)),
        [weight.core for weight in weights],
        num_threads(),
    )
    return out_TNO


def _stacked(weights: HeadWeights) -> torch.Tensor:
    if isinstance(weights, torch.Tensor):
        return weights
    plain = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    assert len(plain) == len(weights), "packed weights have only the absorbed form"
    return torch.stack(plain)
