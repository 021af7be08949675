"""Programs of the C++ core: how recorded operations are traced, and how buffers are placed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.ops.collective import ALONE, all_reduce
from quire.ops.elementwise import add, relu
from quire.ops.embedding import embedding
from quire.ops.linear import linear
from quire.ops.moe import moe_experts, moe_route
from quire.ops.registry import op, record_ops
from quire.ops.trace.program import (
    SHARED,
    Instruction,
    Kind,
    ProgramDraft,
    Untraceable,
    View,
)
from quire.ops.trace.tracer import Tracer

TOKENS = 3


def draft_of(forward: object) -> ProgramDraft:
    """Return the program of a function of ids and positions."""
    ids_T, positions_T = torch.zeros(TOKENS, dtype=torch.int64), torch.arange(TOKENS)
    with record_ops(keeps_values=True) as record:
        result = forward(ids_T, positions_T)  # type: ignore[operator]
    return Tracer(record, ids_T, positions_T).trace(result)


def test_views_are_columns_of_buffers() -> None:
    table = torch.randn(5, 12)

    def forward(ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        heads = embedding(ids, table).view(-1, 3, 4)
        first, last = heads.split([2, 1], dim=1)
        return add(relu(last), first[:, 1:])

    draft = draft_of(forward)
    assert [item.kind for item in draft.instructions] == [Kind.EMBEDDING, Kind.RELU, Kind.ADD]
    looked_up, rectified, added = (item.views for item in draft.instructions)
    assert rectified[1] == View(looked_up[0].buffer, 8)
    assert added == (View(0), View(rectified[0].buffer), View(looked_up[0].buffer, 4))
    assert draft.widths[looked_up[0].buffer] == 12
    assert draft.widths[0] == 4


@op("novel")
def novel(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@op("same")
def same(x: torch.Tensor) -> torch.Tensor:
    return x


def mixture(x_TD: torch.Tensor, factor: float) -> torch.Tensor:
    """Run experts with routing weights multiplied by a factor."""
    ids_TC, weights_TC = moe_route(x_TD, 2, True)
    experts = torch.ones(4, 6, 4), torch.ones(4, 4, 3)
    return moe_experts(x_TD, ids_TC, weights_TC * factor, *experts)


UNTRACEABLE = {
    "unknown operation": (lambda i, p: novel(embedding(i, torch.ones(2, 4))), "novel"),
    "plain weight": (
        lambda i, p: linear(embedding(i, torch.ones(2, 4)), torch.ones(4, 4)),
        "not packed",
    ),
    "an operand from elsewhere": (lambda i, p: relu(torch.ones(TOKENS, 4)), "neither"),
    "transposed": (
        lambda i, p: relu(embedding(i, torch.ones(2, 6)).view(-1, 2, 3).transpose(1, 2)),
        "columns",
    ),
    "rows": (lambda i, p: relu(embedding(i, torch.ones(2, 4))[1:]), "columns"),
    "a route of its own": (lambda i, p: mixture(embedding(i, torch.ones(2, 4)), 2.0), "moe_route"),
    "ranks of other kinds": (
        lambda i, p: all_reduce(embedding(i, torch.ones(2, 4)), ALONE),
        "share memory",
    ),
    "computed ids": (lambda i, p: embedding(i + p, torch.ones(9, 4)), "not an input"),
}


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_untraceable_operations_are_rejected(name: str) -> None:
    forward, reason = UNTRACEABLE[name]
    with pytest.raises(Untraceable, match=reason):
        draft_of(forward)


KINDS = st.sampled_from([Kind.RELU, Kind.ADD, Kind.MULTIPLY, Kind.ATTEND, Kind.DELTA_RULE])


@st.composite
def drafts(draw: st.DrawFn) -> ProgramDraft:
    """Instructions that read any earlier buffers and write a new one; the last writes buffer 0."""
    kinds = draw(st.lists(KINDS, min_size=1, max_size=25))
    draft = ProgramDraft(widths=[draw(st.integers(1, 60))])
    for i, kind in enumerate(kinds):
        known = range(1, len(draft.widths))
        views = [View(draw(st.sampled_from(known))) for _ in range(2)] if known else []
        out = 0 if i == len(kinds) - 1 else len(draft.widths)
        if out:
            draft.widths.append(draw(st.integers(1, 60)))
        draft.instructions.append(Instruction(kind, (View(out), *views)))
    return draft


@given(drafts())
def test_buffers_that_live_together_do_not_overlap(draft: ProgramDraft) -> None:
    places, width = draft.offsets()
    phases = draft.phases
    lives: dict[int, list[int]] = {}
    for phase, instruction in zip(phases, draft.instructions, strict=True):
        for view in instruction.views:
            if view.buffer:
                lives.setdefault(view.buffer, []).append(phase)
    for a, phases_a in lives.items():
        assert places[a] % 16 == 0
        assert places[a] + draft.widths[a] <= width
        for b, phases_b in lives.items():
            overlap = max(phases_a) >= min(phases_b) and max(phases_b) >= min(phases_a)
            if a < b and overlap:
                apart = places[a] + draft.widths[a] <= places[b]
                assert apart or places[b] + draft.widths[b] <= places[a]


def test_buffers_that_all_threads_read_overlap_no_others() -> None:
    draft = ProgramDraft(widths=[16] * 8)
    for kind, views in (
        (Kind.RELU, (1, 7)),
        (Kind.PREPARE, (2, 1)),  # all threads read all of buffers 2 and 5
        (Kind.MULTIPLY, (3, 2)),
        (Kind.RELU, (4, 3)),
        (Kind.PREPARE, (5, 4)),
        (Kind.MULTIPLY, (6, 5)),
        (Kind.RELU, (0, 6)),
    ):
        draft.instructions.append(Instruction(kind, tuple(map(View, views))))
    places, width = draft.offsets()
    assert places[2] == places[5] == width - 16
    assert places[1] == places[3] != places[4]
    assert places[6] == places[3]


@given(drafts())
def test_phases_separate_shared_work_from_rows(draft: ProgramDraft) -> None:
    members: dict[int, list[Kind]] = {}
    for phase, instruction in zip(draft.phases, draft.instructions, strict=True):
        members.setdefault(phase, []).append(instruction.kind)
    assert sorted(members) == list(range(len(members)))
    for kinds in members.values():
        assert len(kinds) == 1 or not set(kinds) & set(SHARED)
