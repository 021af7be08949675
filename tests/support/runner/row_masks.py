"""Masks for some requests' rows: a function of the request, the sequence and the position."""

import zlib
from collections.abc import Set

import numpy as np

from quire.base.masks import MaskPromise, TokenMasks
from quire.base.plan import Plan
from quire.ops.sampling.logit_edits import num_words
from quire.scheduler.scheduler import Scheduler

SHARE = 0.2  # of the tokens is allowed


def allowed(name: str, index: int, position: int, vocab_size: int) -> np.ndarray:
    """Which tokens may stand there, bool [V]."""
    seed = zlib.crc32(f"{name} {index} {position}".encode())
    found = np.random.default_rng(seed).random(vocab_size) < SHARE
    found[seed % vocab_size] = True
    return found


def with_masks(
    scheduler: Scheduler, plan: Plan, names: Set[str], vocab_size: int
) -> tuple[Plan, MaskPromise | None]:
    """The plan, in which rows of these requests are masked, and a promise that is kept."""
    table = scheduler.rows.table
    sequences = [table.sequences[row] for row in plan.sample_rows.tolist()]
    is_masked = [sequence.request.request_id in names for sequence in sequences]
    if not any(is_masked):
        return plan, None
    rows = plan.sample_rows[is_masked][::-1]
    bits = np.zeros((len(rows), 32 * num_words(vocab_size)), bool)
    for bit, row in zip(bits, rows.tolist(), strict=True):
        sequence = table.sequences[row]
        position = int(table.total[row]) - 1
        bit[:vocab_size] = allowed(
            sequence.request.request_id, sequence.index, position, vocab_size
        )
    promise = MaskPromise()
    words = np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)
    promise.put(TokenMasks(rows, words[:, None]))
    return plan.replace(masked_rows=rows), promise
