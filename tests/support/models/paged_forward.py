"""Runs a model over paged KV memory, with any cut of the sequences into chunks."""

from collections.abc import Sequence
from typing import Any

import torch

from quire.ops.attention.base import KVLayout
from quire.spec.model_spec import ModelSpec
from quire.tools.verify import paged
from quire.tools.verify.paged import CPU, Paging, RowPart, make_step, run_step

__all__ = ["CPU", "RowPart", "make_layout", "make_step", "run_paged", "run_step"]


def make_layout(
    spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32
) -> KVLayout:
    """As many blocks for each of the model's cache groups."""
    return paged.make_layout(spec, num_blocks, Paging(block_size, dtype=dtype))


def run_paged(
    model: Any,
    spec: ModelSpec,
    sequences: Sequence[Sequence[int]],
    chunks: Sequence[Sequence[int]],
    **paging: Any,
) -> list[torch.Tensor]:
    """Logits [tokens, V] of each sequence. paging: fields of `Paging`.

    chunks[s] are the numbers of tokens of sequence s in step 0, 1, ...; 0 leaves it out of a step,
    and the numbers must add up to its length. Blocks are scattered over the pool.
    """
    return paged.run_paged(model, spec, sequences, chunks, Paging(**paging))
