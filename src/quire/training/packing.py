"""Sequences packed into one step: the runner's inputs for whole prompts in consecutive blocks.

Shape legend: T tokens of all sequences, S sequences, P tokens per block, L longest block table; of
routes: N tokens of a sequence, L mixtures of experts, C experts of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.base.errors import RequestError
from quire.base.plan import Int16
from quire.ops.attention_inputs import AttentionStep
from quire.spec.model_spec import ModelSpec

BLOCK_SIZE = 16
FREE = -1  # in the place of experts: the token chooses its own


@dataclass(frozen=True, eq=False)
class PackedStep:
    """One step that computes whole sequences from their first token.

    ids_T, positions_T: int64. lengths: tokens of each sequence. num_blocks: KV blocks in use.
    """

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    lengths: tuple[int, ...]
    num_blocks: int

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> "PackedStep":
        """Pack sequences of at least one token each, in order."""
        lengths = tuple(map(len, sequences))
        ids_T = torch.tensor([token for sequence in sequences for token in sequence])
        positions_T = torch.cat([torch.arange(length) for length in lengths])
        return cls(ids_T, positions_T, lengths, sum(map(blocks_for, lengths)))

    def attention(self, num_groups: int) -> AttentionStep:
        """Return the attention backend's view. Each cache group has the same blocks."""
        lens_S = np.array(self.lengths, np.int32)
        blocks_S = -(-lens_S // BLOCK_SIZE)
        first_S = np.cumsum(blocks_S, dtype=np.int32) - blocks_S
        places_L = np.arange(blocks_S.max(), dtype=np.int32)
        table_SL = np.where(places_L < blocks_S[:, None], first_S[:, None] + places_L, -1)
        starts_S1 = np.concatenate(([0], np.cumsum(lens_S))).astype(np.int32)
        first_slot_S = torch.from_numpy(first_S.astype(np.int64) * BLOCK_SIZE)
        slots_T = first_slot_S.repeat_interleave(torch.from_numpy(lens_S)) + self.positions_T
        return AttentionStep(
            positions_T=self.positions_T,
            query_starts_S1=torch.from_numpy(starts_S1),
            context_lens_S=torch.from_numpy(lens_S),
            slots_T=(slots_T,) * num_groups,
            block_tables_SL=(torch.from_numpy(table_SL.astype(np.int32)),) * num_groups,
            query_lens_host=lens_S,
            context_lens_host=lens_S,
        )


def pack_routes(routes: Sequence[Int16], lengths: Sequence[int], spec: ModelSpec) -> torch.Tensor:
    """Pack the experts of each sequence, [N, L, C], into int64 [T, L, C]. Tokens after the given
    ones are free. Raises RequestError for experts that the model does not have, or that it cannot
    be made to use."""
    experts = spec.experts
    if experts is None or not experts.normalises:
        raise RequestError(
            "routes need a mixture whose weights add up to 1 for each token (norm_topk_prob);"
            " remove routes, so that the model chooses its experts.",
            "routes",
        )
    num_mixtures = sum(map(experts.is_sparse, range(spec.num_layers)))
    shape = num_mixtures, experts.num_chosen
    if len(routes) != len(lengths):
        raise RequestError(
            f"each sample needs its routes; got {len(routes)} for {len(lengths)} samples.", "routes"
        )
    found = torch.full((sum(lengths), *shape), FREE)
    for piece_NLC, own in zip(found.split(list(lengths)), routes, strict=True):
        if own.shape[1:] != shape or len(own) > len(piece_NLC):
            raise RequestError(
                f"the routes of a sample have the shape {own.shape}, but need"
                f" {(len(piece_NLC), *shape)}: its tokens without the last, mixtures, experts.",
                "routes",
            )
        piece_NLC[: len(own)] = torch.from_numpy(own.astype(np.int64))
    ordered = found.sort(dim=-1).values
    is_free = (found == FREE).all(dim=-1)
    is_known = (ordered[..., 0] >= 0) & (ordered[..., -1] < experts.num_experts)
    is_known &= (ordered.diff(dim=-1) > 0).all(dim=-1)
    if not (is_free | is_known).all():
        raise RequestError(
            f"the experts of a token must differ and be from 0 to {experts.num_experts - 1}, or all"
            f" {FREE} for a token that chooses its own.",
            "routes",
        )
    return found


def blocks_for(length: int) -> int:
    """Return the number of blocks that a sequence of so many tokens needs."""
    return -(-length // BLOCK_SIZE)
