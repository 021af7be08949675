"""Sequences packed into one step: the runner's inputs for whole prompts in consecutive blocks.

Shape legend: T tokens of all sequences, S sequences, P tokens per block, L longest block table.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.ops.attention_inputs import AttentionStep

BLOCK_SIZE = 16


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


def blocks_for(length: int) -> int:
    """Return the number of blocks that a sequence of so many tokens needs."""
    return -(-length // BLOCK_SIZE)
