"""Run quire's model over paged memory, in each way that an engine may compute a sequence.

Shape legend: L tokens of the sequence.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from quire.ops.trace.program import Untraceable
from quire.runner.native_program import trace as trace_operations
from quire.spec.model_spec import TRANSFORMERS, ModelSpec
from quire.tools.verify.paged import Chunks, Paging, run_paged
from quire.tools.verify.precision import WholePrecision
from quire.tools.verify.watch import Trace, Watcher

AT_ONCE, TOKEN_BY_TOKEN, CHUNKS = "at once", "token by token", "in odd chunks"
WITH_OTHER_ROWS = "in chunks with other rows"
WAYS = (AT_ONCE, TOKEN_BY_TOKEN, CHUNKS, WITH_OTHER_ROWS)
ODD = (7, 1, 5, 13, 1, 3)
OTHERS = (5, 61, 1)  # lengths of the other rows' sequences
OTHERS_CHUNKS = ((2, 0, 3), (0, 17, 1, 1, 30, 12), (0, 0, 0, 1))


@dataclass(frozen=True)
class Chunking:
    """Sequences with their chunks per step. `watched` is the index of the compared sequence."""

    sequences: Sequence[Sequence[int]]
    chunks: Chunks
    watched: int = 0


def way(name: str, tokens: Sequence[int], vocab_size: int) -> Chunking:
    """Return a sequence cut in one of WAYS."""
    if name == AT_ONCE:
        return Chunking([tokens], [[len(tokens)]])
    if name == TOKEN_BY_TOKEN:
        return Chunking([tokens], [[1] * len(tokens)])
    chunks = list(_cut(len(tokens)))
    if name == CHUNKS:
        return Chunking([tokens], [chunks])
    numbers = random.Random(0)
    others = [[numbers.randrange(vocab_size) for _ in range(length)] for length in OTHERS]
    return Chunking(
        [others[0], tokens, *others[1:]], [OTHERS_CHUNKS[0], chunks, *OTHERS_CHUNKS[1:]], 1
    )


def _cut(length: int) -> Iterator[int]:
    number = 0
    while length:
        size = min(length, ODD[number % len(ODD)])
        yield size
        length, number = length - size, number + 1


def trace(model: Any, spec: ModelSpec, chunking: Chunking, paging: Paging) -> Trace:
    """Return the outputs of the model's parts for the watched sequence.

    For a model that runs in one call, only the head's input and the logits are available. Raises
    ConfigError for an unsuitable backend, and Untraceable for a model that cannot run in one call.
    """
    watched = chunking.watched
    layers = 0 if paging.native else spec.num_layers
    watcher = Watcher(model, layers, model.head)

    def on_step(lens: Sequence[int]) -> None:
        first = sum(lens[:watched])
        watcher.rows = slice(first, first + lens[watched])

    # transformers' code computes parts in float32; do the same if its class runs here.
    is_theirs = spec.implementation == TRANSFORMERS and paging.dtype.itemsize == 8
    with watcher.watching(), WholePrecision() if is_theirs else nullcontext():
        logits = run_paged(model, spec, chunking.sequences, chunking.chunks, paging, on_step)
    return watcher.trace(logits[watched].cpu())


def runs_in_one_call(model: Any) -> bool:
    """Return whether the C++ core can run the whole model in one call."""
    try:
        trace_operations(model)
    except Untraceable:
        return False
    return True
