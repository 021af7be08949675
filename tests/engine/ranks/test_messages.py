"""Plans, results, masks and drafting orders are equal after their transfer."""

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.base.errors import EngineError
from quire.base.masks import TokenMasks
from quire.base.plan import (
    BlockWrites,
    Candidates,
    DraftAnswer,
    DraftOrder,
    FrozenRecord,
    HostTokens,
    Move,
    MoveKind,
    Plan,
    RowDraft,
    RowFork,
    RowStart,
    StepResult,
)
from quire.base.requests.media_items import EncoderInput, EncoderRead, MediaItem
from quire.base.requests.sampling_params import SamplingParams
from quire.engine.ranks.messages import (
    Done,
    Drafted,
    Masks,
    Order,
    Step,
    core_codec,
    rank_codec,
)


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def assert_same(one: Any, other: Any) -> None:
    """Compare arrays, and values that contain them, by value, shape and type."""
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes() and other.flags.writeable
    elif isinstance(one, EncoderInput | EncoderRead | FrozenRecord):
        assert type(one) is type(other)
        assert_same(msgspec.structs.asdict(one), msgspec.structs.asdict(other))
    elif dataclasses.is_dataclass(one):
        assert type(one) is type(other)
        for item in dataclasses.fields(one):
            assert_same(getattr(one, item.name), getattr(other, item.name))
    elif isinstance(one, tuple | list):
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    else:
        assert one == other and type(one) is type(other)


def transferred(message: Any, codec: Any) -> Any:
    data = codec.encode(message)
    (body,) = codec.frames().feed(data)
    return codec.decode(body)


def test_plan_with_all_fields_survives_transfer() -> None:
    params = SamplingParams(n=2, logit_bias={3: 1.5}, stop_token_ids=[4], seed=1 << 62)
    plan = Plan(
        7,
        *(ints(1, 2, 3) + i for i in range(3)),
        ints(2, 3),
        ints(-1, 5),
        ints(2, 2),
        ints(3),
        (RowStart(1, ints(5, 6), 1, 2, params, (1 << 64) - 1, 3, (4,), ((1, 2), (3,))),),
        (RowFork(2, 3, 1),),
        ((1, 4),),
        ints(9),
        (HostTokens(1, 2, ints(8), is_prompt=True),),
        BlockWrites(ints(0), ints(1), ints(2), ints(3)),
        (Move(MoveKind.LOAD, 0, ints(1, 2), ints(3, 4)),),
        (RowDraft(1, ints(5, 6)),),
    )
    step = transferred(Step(3, plan, is_first=True, has_masks=True), rank_codec())
    assert_same(plan, step.plan)
    assert (step.number, step.is_first, step.has_masks) == (3, True, True)
    assert_same(Plan(1), transferred(Step(0, Plan(1), False, False), rank_codec()).plan)


def test_plan_with_media_survives_transfer() -> None:
    item = MediaItem(
        start=2, num_tokens=3, digest=bytes(range(32)), kind="video", grid=(1, 2, 6),
        shape=(1, 2, 2), pixels=bytes([0, 128, 255, 7]), table=np.arange(768, dtype="f4").tobytes(),
        seconds_per_grid=0.1, is_whole=True,
    )  # fmt: skip
    start = RowStart(1, ints(5, 6), 0, 6, SamplingParams(), 0, media=(item.without_pixels,) * 2)
    inputs, reads = EncoderInput(item, ints(9, 8, 7)), EncoderRead(1, 2, ints(9, 8))
    plan = Plan(7, started=(start,), encoder_inputs=(inputs,), encoder_reads=(reads, reads))
    found = transferred(Step(0, plan, False, False), rank_codec()).plan
    assert_same(plan, found)


@pytest.mark.parametrize("num", [0, 1, 3])
@pytest.mark.parametrize("width", [1, 4])
def test_results_keep_their_shape(num: int, width: int) -> None:
    found = Candidates(ints(4, 5), np.array([-0.5, -1.25], np.float32), 2)
    result = StepResult(
        5, np.arange(num * width, dtype=np.int32).reshape(num, width), ints(*[1] * num),
        {1: found}, {2: [found]}, {3: "bad"}, 0.5, "no", (3,), True, {1: [found, found]},
    )  # fmt: skip
    found_there = transferred(Done.of(2, result, answers=True), core_codec()).result
    if num == 0:  # the width of an empty result is not sent
        result = result.replace(token_ids=result.token_ids[:, :1])
    assert_same(result, found_there)


def test_masks_and_drafts_survive_transfer() -> None:
    masks = TokenMasks(ints(4, 2), np.arange(12, dtype=np.int32).reshape(2, 2, 3), {2: "stuck"})
    assert_same(masks, transferred(Masks.of(1, masks), rank_codec()).masks)
    order = DraftOrder(*(ints(1, 2) + i for i in range(7)))
    assert_same(order, transferred(Order(order), rank_codec()).order)
    for shape in ((2, 3), (0, 3)):
        answer = DraftAnswer(np.zeros(shape, np.int32), 0.25)
        back = transferred(Drafted.of(answer), core_codec()).answer
        assert back.duration_s == 0.25 and back.token_ids.size == answer.token_ids.size


def test_invalid_messages_are_rejected() -> None:
    with pytest.raises(EngineError, match="not quire's"):
        rank_codec().decode(b"\x81\xa4type\xa3Odd")
    with pytest.raises(EngineError, match="not quire's"):
        rank_codec().decode(b"")
    with pytest.raises(NotImplementedError, match="function cannot be sent"):
        params = SamplingParams(logits_processors=[lambda ids, logits: logits])
        start = RowStart(0, ints(1), 0, 1, params, 0)
        rank_codec().encode(Step(0, Plan(0, started=(start,)), True, False))
