"""Runs a model over paged KV memory, with any cut of the sequences into chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.base.model_spec import ModelSpec
from quire.ops.attention.base import AttentionBackend, AttentionStep, KVLayout
from quire.ops.attention.cpu import CpuBackend
from quire.ops.attention.select import make_backend
from quire.runner.native_model import NativeModel

CPU = torch.device("cpu")


@dataclass(frozen=True)
class RowPart:
    """What a step holds of one row: tokens from `start` to before `end`, and its block tables."""

    start: int
    end: int
    tables: tuple[Sequence[int], ...]  # one per cache group


def make_step(parts: Sequence[RowPart], block_size: int) -> AttentionStep:
    """The step that holds these parts one after the other."""
    query_lens = np.array([part.end - part.start for part in parts], np.int32)
    context_lens = np.array([part.end for part in parts], np.int32)
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    positions = [torch.arange(part.start, part.end) for part in parts]
    slots, tables = [], []
    for group in range(len(parts[0].tables)):
        width = max(len(part.tables[group]) for part in parts)
        table = torch.full((len(parts), width), -1, dtype=torch.int32)
        for row, part in enumerate(parts):
            table[row, : len(part.tables[group])] = torch.tensor(part.tables[group])
        tables.append(table)
        slots.append(
            torch.cat(
                [
                    table[row, p // block_size].long() * block_size + p % block_size
                    for row, p in enumerate(positions)
                ]
            )
        )
    return AttentionStep(
        positions_T=torch.cat(positions),
        query_starts_S1=torch.from_numpy(starts),
        context_lens_S=torch.from_numpy(context_lens),
        slots_T=tuple(slots),
        block_tables_SL=tuple(tables),
        query_lens_host=query_lens,
        context_lens_host=context_lens,
    )


def make_layout(
    spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32
) -> KVLayout:
    """As many blocks for each of the model's cache groups."""
    groups = spec.cache_groups
    return KVLayout(groups, (num_blocks,) * len(groups), block_size, dtype, CPU)


def run_paged(
    model: Any,
    spec: ModelSpec,
    sequences: Sequence[Sequence[int]],
    chunks: Sequence[Sequence[int]],
    *,
    block_size: int = 4,
    backend: str = "torch",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    native: bool = False,
) -> list[torch.Tensor]:
    """Logits [tokens, V] of each sequence. native: by the core's program of the model.

    chunks[s] are the numbers of tokens of sequence s in step 0, 1, ...; 0 leaves it out of a step,
    and the numbers must add up to its length. Blocks are scattered over the pool.
    """
    blocks_per_row = [-(-len(tokens) // block_size) for tokens in sequences]
    num_blocks = sum(blocks_per_row) + 3
    attention = make_backend(backend, make_layout(spec, num_blocks, block_size, dtype))
    if native:
        assert isinstance(attention, CpuBackend)
        model = NativeModel(model, attention)
    order = np.random.default_rng(seed).permutation(num_blocks).tolist()
    tables = [[order.pop() for _ in range(count)] for count in blocks_per_row]
    done = [0] * len(sequences)
    pieces: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step_idx in range(max(len(lens) for lens in chunks)):
        lens = [row[step_idx] if step_idx < len(row) else 0 for row in chunks]
        rows = [row for row, length in enumerate(lens) if length]
        parts = [
            RowPart(done[r], done[r] + lens[r], (tables[r],) * len(spec.cache_groups)) for r in rows
        ]
        ids = [token for r in rows for token in sequences[r][done[r] : done[r] + lens[r]]]
        logits_TV = run_step(model, attention, ids, make_step(parts, block_size))
        for row, piece in zip(rows, logits_TV.split([lens[r] for r in rows]), strict=True):
            pieces[row].append(piece)
            done[row] += lens[row]
    return [torch.cat(row) for row in pieces]


@torch.inference_mode()
def run_step(
    model: Any, attention: AttentionBackend, ids: Sequence[int], step: AttentionStep
) -> torch.Tensor:
    """Logits [T, V] of one step's tokens."""
    attention.prepare(step)
    return model.logits(model(torch.tensor(ids), step.positions_T, attention))
