"""Merging of adjacent operations into one, as our own models call them.

A sum and its norm are merged. So are the norms of queries and keys, their rotation, and the storing
of keys and values.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from quire.models.hf.modules import NamedRMSNorm
from quire.models.hf.steps import (
    ADD_NORM,
    ATTEND,
    ROTARY,
    ROTARY_ATTEND,
    HeadNorms,
    Read,
    Step,
)


def merged(steps: Sequence[Step]) -> list[Step]:
    """Return equivalent steps with merged operations."""
    return _with_added_norms(_with_stored_rotations(steps))


def _with_added_norms(steps: Sequence[Step]) -> list[Step]:
    """Merge each sum into the norm that reads it, if no other step reads the sum before."""
    made: list[Step] = []
    sums: dict[int, Step] = {}  # unread so far, by buffer
    for step in steps:
        added = sums.get(step.reads[0].buffer) if step.reads else None
        if added is not None and isinstance(step.layer, NamedRMSNorm) and not step.reads[0].heads:
            made.remove(added)
            writes = (*step.writes, *added.writes)
            sums.pop(added.writes[0])
            step = Step(ADD_NORM, added.reads, writes, step.layer)
        for each in step.reads:
            sums.pop(each.buffer, None)
        made.append(step)
        if step.name == "add":
            sums[step.writes[0]] = step
    return made


def _with_stored_rotations(steps: Sequence[Step]) -> list[Step]:
    """Merge the norms and rotations of queries and keys into attention, if queries, keys and values
    are adjacent columns."""
    makers = {step.writes[0]: step for step in steps}
    times_read = Counter(read.buffer for step in steps for read in step.reads)
    replaced: dict[int, Step | None] = {}  # by id of the step; None removes it
    for step in steps:
        if step.name != ATTEND:
            continue
        query, key, value = step.reads
        rotations = [makers[each.buffer] for each in (query, key)]
        if any(each.name != ROTARY or times_read[each.writes[0]] != 1 for each in rotations):
            continue
        if rotations[0].options != rotations[1].options:  # same tensor, equal factors
            continue
        norms = [makers[each.reads[0].buffer] for each in rotations]
        sources = [each.reads[0] for each in rotations]
        merges = [*rotations]
        head_norms = None
        size = query.width // query.heads
        if all(_is_norm(each, size) and times_read[each.writes[0]] == 1 for each in norms):
            merges += norms
            sources = [each.reads[0] for each in norms]
            head_norms = HeadNorms(norms[0].layer, norms[1].layer, query.heads, key.heads)
        if _are_side_by_side([*sources, value]):
            width, heads = (
                sum(each.width for each in (*sources, value)),
                query.heads + 2 * key.heads,
            )
            read = Read(value.buffer, sources[0].first, width, heads)
            options = (*step.options, *rotations[0].options, head_norms, key.heads)
            replaced |= dict.fromkeys(map(id, merges))
            replaced[id(step)] = Step(ROTARY_ATTEND, (read,), step.writes, step.layer, options)
    found = [replaced.get(id(step), step) for step in steps]
    return [step for step in found if step is not None]


def _is_norm(step: Step, size: int) -> bool:
    """Return whether this is a norm over each head of `size` dimensions."""
    layer: Any = step.layer
    return isinstance(layer, NamedRMSNorm) and layer.weight.shape == (size,)


def _are_side_by_side(reads: Sequence[Read]) -> bool:
    pairs = zip(reads, reads[1:], strict=False)
    return all(a.buffer == b.buffer and a.first + a.width == b.first for a, b in pairs)
