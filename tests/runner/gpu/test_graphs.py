"""Which steps are recorded, when and in which order, and which kinds the next engine remembers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.ops import moe
from quire.ops.rows.step_inputs import StepInputs
from quire.ops.sampling.device_drafts import Runs
from quire.runner import memory_plan
from quire.runner.attachment import ForwardPart, are_unused
from quire.runner.gpu import graphs
from quire.runner.gpu.graphs import DROPPED_TIMES, FIRST_TIMES, FIRST_TIMES_MIXED, Graphs
from quire.runner.gpu.pieces import record
from quire.runner.gpu.sizes import Drafted, Size, Sizes, kind_of, size_and_needs
from quire.runner.gpu.used_sizes import UsedSizes
from quire.runner.memory_plan import ladder
from quire.runner.step_ops import Needs, StepShape, unused
from tests.support.runner.late_device import LateDevice

PLAIN, FILTERED, EDITED = Needs(), Needs(has_filters=True), Needs(edits=0)


class Decoder:
    """A runner with its rows and sampler that notes recorded sizes. maximum: graphs that fit."""

    max_model_len = 8
    attachments: tuple[Any, ...] = ()

    def __init__(self, maximum: int = 1000, takes_any_lengths: bool = True) -> None:
        self.backend: Any = self
        self.rows = self.ops = self.sampler = self
        self.takes_any_lengths = takes_any_lengths
        self.sizes: list[Size] = []
        self.maximum = maximum
        self._is_new = False

    def prepare_empty_step(self) -> None:
        self._is_new = True

    def gather(self, shape: StepShape) -> Any:
        if self._is_new and len(self.sizes) == self.maximum:
            raise torch.OutOfMemoryError
        if self._is_new:
            tokens = shape.num_tokens
            self.sizes.append(Size(shape.num_samples, tokens if shape.query_lens[0] > 1 else 0))
            self._is_new = False
        one = torch.zeros(1, dtype=torch.int64)
        return SimpleNamespace(inputs=StepInputs(one, one, one, one, (one,), (one,)))

    def attention_step(self, inputs: Any, shape: Any) -> Any:
        return shape

    def prepare(self, step: Any) -> None:
        pass

    def compute(self, *_: Any) -> Any:
        self.num_real = moe._num_real.get()  # of the tokens that reach experts

    def parts(self, needs: Needs) -> list[Any]:
        return []

    def finish(self, *_: Any) -> list[torch.Tensor]:
        return []


class EagerDevice(LateDevice):
    def run(self, work):
        arrival = super().run(work)
        arrival.wait()
        return arrival


def make(max_rows: int, decoder: Any, **more: Any) -> Graphs:
    device: Any = EagerDevice(torch.device("cpu"))
    return Graphs(device, decoder, max_rows, **more)


@pytest.mark.parametrize("maximum", [1, 3, 64, 100, 256, 300, 1024])
def test_ladder_sizes_waste_little_room(maximum: int) -> None:
    sizes = ladder(maximum)
    assert sizes == sorted(set(sizes)) and sizes[-1] == maximum and sizes[0] == 1
    for num in range(1, maximum + 1):
        size = next(size for size in sizes if size >= num)
        assert size < num + 16 and (size < 2 * num or size - num < 1)


def test_second_step_of_a_kind_is_recorded_after_the_largest_size() -> None:
    decoder = Decoder()
    found = make(20, decoder)
    assert [found.find(3, 0, PLAIN) for _ in range(FIRST_TIMES)] == [None] * FIRST_TIMES
    assert decoder.sizes == []
    recorded = found.find(4, 0, PLAIN)
    assert recorded is not None and recorded.size == Size(4) and not recorded.in_pieces
    assert decoder.sizes == [Size(20), Size(4)]
    assert found.find(3, 0, PLAIN) is recorded
    assert found.find(3, 0, FILTERED) is None, "another kind"
    assert found.find(3, 0, FILTERED) not in (None, recorded)
    assert found.find(21, 0, PLAIN) is None, "more rows than the engine has"
    assert found.find(3, 0, Needs(num_candidates=500)) is None


def test_padding_tokens_skip_the_experts() -> None:
    """The last entry of the rows' starts is the number of tokens of a step."""
    decoder = Decoder()
    found = make(4, decoder)
    assert [found.find(2, 0, PLAIN) for _ in range(2)][1] is not None
    assert decoder.num_real is not None and decoder.num_real.shape == (1,)
    assert moe._num_real.get() is None


@pytest.mark.parametrize("takes_any_lengths", [True, False])
def test_mixed_sizes_have_room_for_rows_and_tokens(takes_any_lengths: bool) -> None:
    """They are recorded in pieces if attention must know lengths."""
    decoder = Decoder(takes_any_lengths=takes_any_lengths)
    found = make(64, decoder)
    for _ in range(FIRST_TIMES_MIXED):
        assert found.find(3, 17, PLAIN) is None
    recorded = found.find(3, 17, PLAIN)
    assert recorded is not None and recorded.size == Size(4, 32)
    assert recorded.in_pieces != takes_any_lengths
    assert found.find(4, 32, PLAIN) is recorded
    assert found.find(4, 33, PLAIN) is None
    for _ in range(FIRST_TIMES_MIXED):
        found.find(40, 3, PLAIN)  # forks of one row, which sample: each sample needs a token
    wide = found.find(40, 3, PLAIN)
    assert wide is not None and wide.size == Size(64, 64)
    assert all(found.find(3, 4096, PLAIN) is None for _ in range(9))


def test_least_recently_used_graph_is_dropped() -> None:
    """Plain decoding graphs are kept. A dropped kind is recorded again once it occurs often."""
    found = make(4, decoder := Decoder(), max_others=2)

    def after(times: int, tokens: int) -> Any:
        return [found.find(4, tokens, PLAIN) for _ in range(times)][-1]

    first, second = after(9, 16), after(9, 32)
    assert first is not None and second is not None
    assert found.find(4, 16, PLAIN) is first
    third = after(9, 48)
    assert third is not None and third.size.tokens == 48, "it replaces the second"
    assert found.find(4, 16, PLAIN) is first
    larger = after(9, 32)
    assert larger is not None and larger.size.tokens == 48, "until then, a larger graph serves it"
    own = after(DROPPED_TIMES, 32)
    assert own is not None and own.size.tokens == 32
    while found.record_next():
        pass
    assert len([size for size in decoder.sizes if not size.is_mixed]) == 3, "each size once"
    assert found.find(4, 48, PLAIN) is third, "idle moments drop nothing"


def test_repeated_steps_do_not_find_their_dropped_graph() -> None:
    """The last step that had a graph was of the same kind, with the same needs."""
    found = make(4, Decoder(), max_others=1)
    first = [found.find(4, 0, FILTERED) for _ in range(3)][-1]
    assert first is not None and found.find(4, 0, FILTERED) is first
    steps = [found.find(4, 16, PLAIN) for _ in range(FIRST_TIMES_MIXED + 1)]
    assert steps[-1] is not None, "its graph replaces the first"
    assert found.find(4, 0, FILTERED) is None
    again = [found.find(4, 0, FILTERED) for _ in range(DROPPED_TIMES + FIRST_TIMES)][-1]
    assert again not in (None, first)


def test_failed_recording_disables_its_own_kind_only(caplog: pytest.LogCaptureFixture) -> None:
    decoder = Decoder()
    gather = decoder.gather
    num_attempts = []

    def fail_for_eight(shape: StepShape) -> Any:
        if shape.num_samples == 8:
            num_attempts.append(1)
            raise RuntimeError("a product of this size has no plan")
        return gather(shape)

    decoder.gather = fail_for_eight  # type: ignore[method-assign]
    found = make(8, decoder)
    recorded = [[found.find(rows, 0, PLAIN) for _ in range(5)][-1] for rows in (8, 4, 2)]
    assert [each is not None for each in recorded] == [False, True, True]
    while found.record_next():
        pass
    assert decoder.sizes == [Size(4), Size(2), Size(1)] and len(num_attempts) == 1
    assert len(caplog.messages) == 1 and "Size(rows=8" in caplog.text


def test_mixed_sizes_waste_at_most_128_tokens() -> None:
    found = make(64, Decoder()).sizes
    for num_tokens in range(513, 2049):
        size = found.find(4, num_tokens)
        assert size is not None and num_tokens <= size.tokens < num_tokens + 128
    assert found.find(4, 1040) == Size(4, 1152)


def test_steps_without_memory_for_a_graph_are_launched_directly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    decoder = Decoder(maximum=2)
    found = make(20, decoder)
    for num_rows in (1, 1, 4, 4, 8, 8):
        found.find(num_rows, 0, PLAIN)
    assert decoder.sizes == [Size(20), Size(1)]
    assert found.find(1, 0, PLAIN) is not None, "recorded graphs are still used"
    assert not found.record_next()
    assert len(caplog.messages) == 1 and "enforce_eager" in caplog.text


def test_first_step_uses_a_larger_graph_with_more_needs() -> None:
    found = make(64, decoder := Decoder())
    maximum = Needs(True, True, None, 20)
    assert [found.find(9, 0, maximum) for _ in range(2)][0] is None
    assert [found.find(4, 600, maximum) for _ in range(4)][-1] is not None
    recorded = len(decoder.sizes)
    for needs in (PLAIN, FILTERED, Needs(num_candidates=5)):
        small = found.find(3, 0, needs)
        assert small is not None and small.size == Size(16)
        assert found.find(3, 400, needs) is not None, "at most twice its tokens"
        assert found.find(3, 30, needs) is None, "far too many"
    for needs in (EDITED, Needs(has_masks=True)):
        assert found.find(3, 0, needs) is None, "tables and masks of other steps"
    assert len(decoder.sizes) == recorded


class UsedPart(ForwardPart):
    """The part of a feature that a step's rows may use."""

    is_used = True


def test_steps_without_features_have_their_own_graphs() -> None:
    """Idle moments record the whole ladder with features and without, and neither is dropped."""
    none = unused(PLAIN)
    found = make(8, decoder := Decoder(), max_others=1)
    decoder.attachments = (SimpleNamespace(at_rest=UsedPart()),)
    assert [found.find(4, 0, PLAIN) for _ in range(2)][0] is None
    whole = found.find(4, 0, PLAIN)
    assert whole is not None and found.find(4, 0, none) is whole, "until its own graph is recorded"
    own = found.find(4, 0, none)
    assert own not in (None, whole) and found.find(4, 0, PLAIN) is whole
    assert found.find(3, 0, unused(FILTERED)) is None
    assert found.find(3, 0, unused(FILTERED)) not in (None, own)
    assert found.find(3, 0, FILTERED) is None, (
        "the graph without features skips what these rows use"
    )
    while found.record_next():
        pass
    assert sorted(size.rows for size in decoder.sizes) == [1, 1, 2, 2, 4, 4, 4, 8, 8]
    decoder.attachments = ()
    other = make(8, decoder)
    other.find(1, 0, PLAIN)
    while other.record_next():
        pass
    assert len(decoder.sizes) == 9 + 4, "an engine without such features has one ladder"


@pytest.mark.parametrize(("is_used_first", "num_drops"), [(True, 0), (False, 8)])
def test_mixed_kinds_share_a_graph_with_and_without_features(
    is_used_first: bool, num_drops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed steps of 20 sizes alternate, with the feature and without; their graphs fit the limit.
    A graph without the feature is recorded only before the other, which then replaces it."""
    dropped, drop = list[Any](), Graphs._drop
    monkeypatch.setattr(Graphs, "_drop", lambda self, key: dropped.append(key) or drop(self, key))
    found = make(8, decoder := Decoder())
    decoder.attachments = (SimpleNamespace(at_rest=UsedPart()),)
    tokens = memory_plan.MIXED_TOKENS[:20]
    for _ in range(120):
        for needs in (PLAIN, unused(PLAIN)) if is_used_first else (unused(PLAIN), PLAIN):
            steps = [found.find(8, each, needs) for each in tokens]
    assert [each and each.size.tokens for each in steps] == list(tokens)
    assert len(decoder.sizes) == 1 + (20 if is_used_first else 40)
    assert len(dropped) == num_drops and all(needs.is_unused for _, needs in dropped)
    while found.record_next():
        pass
    assert len([size for size in decoder.sizes if size.is_mixed]) == len(decoder.sizes) - 8, "plain"


def test_unused_means_that_no_part_is_used() -> None:
    used, plain, unused_part = UsedPart(), ForwardPart(), ForwardPart()
    unused_part.is_used = False
    assert not are_unused([]) and not are_unused([plain]) and not are_unused([plain, used])
    assert are_unused([plain, unused_part]) and not are_unused([used, unused_part])
    assert used.unused is used and unused(PLAIN) is unused(Needs())


@pytest.mark.parametrize("max_rows", [1, 3, 64, 256, 400])
def test_warm_up_sizes_hold_every_step(max_rows: int) -> None:
    """Each step has a size of at most twice its tokens, or a small one."""
    sizes, runs = Sizes(max_rows), Runs(1, 2, 100)
    warm = sizes.warm(None, runs)
    num_kinds = sum(1 if size.runs else 2 for size in warm)  # and with masks
    assert len(warm) == len(set(warm)) and num_kinds <= memory_plan.MAX_WARM_GRAPHS
    assert all(sizes.has(size) for size in warm)
    rows = sorted({1, 2, 5, 60, 200, max_rows})
    for num_rows in (each for each in rows if each <= max_rows):
        for num_tokens in (0, 7, 100, 513, 1040, 2048):
            for drafted in (None, Drafted(1, 1), Drafted(num_rows, 4, num_tokens > 0, runs)):
                tokens = num_tokens or (0 if drafted is None else num_rows + drafted.total)
                is_recorded = sizes.find(num_rows, tokens, drafted) is not None
                if not is_recorded or 0 < tokens < num_rows:
                    continue
                found = [size for size in warm if size.holds(num_rows, tokens, drafted)]
                assert found, (num_rows, tokens, drafted)
                smallest = min(size.num_tokens for size in found)
                assert smallest <= max(graphs.COVER_TOKENS, 2 * tokens, 2 * num_rows)


def test_idle_moments_record_remembered_kinds_first(tmp_path: Path) -> None:
    facts = ["a model", "a GPU"]
    first = make(8, Decoder(), used=UsedSizes(tmp_path, facts))
    assert not first.record_next(), "no step has run yet"
    for _ in range(9):
        first.find(2, 0, FILTERED)
        first.find(3, 30, PLAIN)
    decoder = Decoder()
    second = make(8, decoder, used=UsedSizes(tmp_path, facts))
    second.find(1, 0, PLAIN)
    second.find(4, 50, PLAIN)
    while second.record_next():
        pass
    known = {Size(8), Size(2), Size(4, 32)}
    assert set(decoder.sizes[:3]) == known
    assert decoder.sizes[3:6] == [Size(4), Size(2), Size(1)], "the ladder, from the top"
    assert decoder.sizes[6:] == [Size(4, 64)], "mixed steps of this engine"
    assert second.find(2, 0, FILTERED) is not None
    third = make(8, Decoder(), used=UsedSizes(tmp_path, ["another model", "a GPU"]))
    third.find(1, 0, PLAIN)
    third.record_next()
    assert third.find(2, 0, FILTERED) is None


def test_kinds_with_unused_features_are_remembered(tmp_path: Path) -> None:
    """An engine without such features forgets them."""
    kinds = [(Size(2), unused(FILTERED)), (Size(4, 32), unused(PLAIN)), (Size(4), FILTERED)]
    UsedSizes(tmp_path, []).write(kind_of(*each) for each in kinds)
    read = UsedSizes(tmp_path, []).read()
    assert {size_and_needs(kind) for kind in read} == set(kinds)
    for attachments, expected in (
        ((SimpleNamespace(at_rest=UsedPart()),), kinds),
        ((), kinds[2:]),
    ):
        found = make(8, decoder := Decoder(), used=UsedSizes(tmp_path, []))
        decoder.attachments = attachments
        found.find(8, 0, EDITED)
        while found.record_next():
            pass
        others = {key for key in found._recorded if key[1].has_filters or key[0].is_mixed}
        assert others == set(expected)
        UsedSizes(tmp_path, []).write(kind_of(*each) for each in kinds)


def test_kinds_written_by_an_earlier_version_are_read(tmp_path: Path) -> None:
    kind = kind_of(Size(4, 32, 8), FILTERED)
    used = UsedSizes(tmp_path, [])
    used.path.write_text(json.dumps({"graphs": [kind[:-1], kind]}), encoding="utf-8")
    assert used.read() == [kind, kind]


def test_graphs_of_a_moved_table_are_dropped() -> None:
    found = make(4, Decoder())
    old = [found.find(2, 0, EDITED) for _ in range(2)][-1]
    assert old is not None
    for _ in range(2):
        found.find(2, 0, Needs(edits=1))
    assert found.find(2, 0, EDITED) is not old


@pytest.mark.parametrize("text", ["", "{", "[]", '{"graphs": [[1]]}', '{"graphs": [["a", 1]]}'])
def test_damaged_list_of_kinds_is_ignored(text: str, tmp_path: Path, caplog: Any) -> None:
    used = UsedSizes(tmp_path, [])
    used.path.write_text(text, encoding="utf-8")
    assert used.read() == []
    assert "cannot be read" in caplog.text


def test_unwritable_list_of_kinds_is_logged(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").write_text("")
    UsedSizes(tmp_path / "file" / "below", []).write([])
    assert "cannot be saved" in caplog.text


def test_failed_recording_ends_its_graph() -> None:
    device = EagerDevice(torch.device("cpu"))
    began: list[Any] = []
    begin = device.begin_capture
    device.begin_capture = lambda: began.append(begin()) or began[-1]  # type: ignore[method-assign]

    def fails(backend: Any, between: Any) -> list[torch.Tensor]:
        raise ValueError("in the middle")

    backend: Any = None
    with pytest.raises(ValueError, match="in the middle"):
        record(device, backend, fails, in_pieces=False)  # type: ignore[arg-type]
    assert device.graphs == began
