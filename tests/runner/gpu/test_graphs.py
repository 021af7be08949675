"""Which steps are recorded, when, in what order, and what is remembered of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.ops.rows.step_inputs import StepInputs
from quire.runner.gpu import graphs
from quire.runner.gpu.graphs import FIRST_TIMES, FIRST_TIMES_MIXED, Graphs, Size, UsedSizes
from quire.runner.gpu.pieces import record
from quire.runner.memory_plan import ladder
from quire.runner.step_ops import Needs, StepShape
from tests.support.runner.late_device import LateDevice

PLAIN, FILTERED, EDITED = Needs(), Needs(has_filters=True), Needs(edits=0)


class Decoder:
    """Notes what is recorded: a runner, with its rows and sampler. most: graphs that find room."""

    max_model_len = 8
    attachments: tuple[()] = ()

    def __init__(self, most: int = 1000, takes_any_lengths: bool = True) -> None:
        self.backend: Any = self
        self.rows = self.ops = self.sampler = self
        self.takes_any_lengths = takes_any_lengths
        self.sizes: list[Size] = []
        self.most = most
        self._is_new = False

    def prepare_empty_step(self) -> None:
        self._is_new = True

    def gather(self, shape: StepShape) -> Any:
        if self._is_new and len(self.sizes) == self.most:
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
        pass

    def parts(self, needs: Needs) -> list[Any]:
        return []

    def finish(self, *_: Any) -> list[torch.Tensor]:
        return []


class AtOnce(LateDevice):
    def run(self, work):
        arrival = super().run(work)
        arrival.wait()
        return arrival


def make(max_rows: int, decoder: Any, **more: Any) -> Graphs:
    device: Any = AtOnce(torch.device("cpu"))
    return Graphs(device, decoder, max_rows, **more)


@pytest.mark.parametrize("most", [1, 3, 64, 100, 256, 300, 1024])
def test_no_size_of_the_ladder_has_much_too_much_room(most: int) -> None:
    sizes = ladder(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most and sizes[0] == 1
    for num in range(1, most + 1):
        size = next(size for size in sizes if size >= num)
        assert size < num + 16 and (size < 2 * num or size - num < 1)


def test_the_second_step_of_a_kind_is_recorded_and_the_largest_before_all() -> None:
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
    assert found.find(21, 0, PLAIN) is None, "more rows than there are"
    assert found.find(3, 0, Needs(num_candidates=500)) is None


@pytest.mark.parametrize("takes_any_lengths", [True, False])
def test_mixed_steps_have_places_for_rows_and_tokens(takes_any_lengths: bool) -> None:
    """They are cut where attention must know lengths."""
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
        found.find(40, 3, PLAIN)  # copies that sample, of one row: no place without a token
    wide = found.find(40, 3, PLAIN)
    assert wide is not None and wide.size == Size(64, 64)
    assert all(found.find(3, 4096, PLAIN) is None for _ in range(9))


def test_not_every_kind_of_mixed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_MIXED", 2)
    found = make(4, Decoder())
    recorded = [[found.find(4, tokens, PLAIN) for _ in range(9)][-1] for tokens in (16, 32, 48, 64)]
    assert [each is not None for each in recorded] == [True, True, False, False]


def test_without_memory_steps_are_launched_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    decoder = Decoder(most=2)
    found = make(20, decoder)
    for num_rows in (1, 1, 4, 4, 8, 8):
        found.find(num_rows, 0, PLAIN)
    assert decoder.sizes == [Size(20), Size(1)]
    assert found.find(1, 0, PLAIN) is not None, "what is there is used"
    assert not found.record_next()
    assert len(caplog.messages) == 1 and "enforce_eager" in caplog.text


def test_idle_moments_begin_with_what_was_used_before(tmp_path: Path) -> None:
    facts = ["a model", "a GPU"]
    first = make(8, Decoder(), used=UsedSizes(tmp_path, facts))
    assert not first.record_next(), "nobody has asked for anything yet"
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
    assert decoder.sizes[6:] == [Size(4, 64)], "mixed steps that came"
    assert second.find(2, 0, FILTERED) is not None
    third = make(8, Decoder(), used=UsedSizes(tmp_path, ["another model", "a GPU"]))
    third.find(1, 0, PLAIN)
    third.record_next()
    assert third.find(2, 0, FILTERED) is None


def test_graphs_of_a_table_that_has_moved_are_dropped() -> None:
    found = make(4, Decoder())
    old = [found.find(2, 0, EDITED) for _ in range(2)][-1]
    assert old is not None
    for _ in range(2):
        found.find(2, 0, Needs(edits=1))
    assert found.find(2, 0, EDITED) is not old


@pytest.mark.parametrize("text", ["", "{", "[]", '{"graphs": [[1]]}', '{"graphs": [["a", 1]]}'])
def test_a_damaged_memory_is_no_memory(text: str, tmp_path: Path, caplog: Any) -> None:
    used = UsedSizes(tmp_path, [])
    used.path.write_text(text, encoding="utf-8")
    assert used.read() == []
    assert "cannot be read" in caplog.text


def test_a_memory_that_cannot_be_written(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").write_text("")
    UsedSizes(tmp_path / "file" / "below", []).write([])
    assert "cannot be saved" in caplog.text


def test_a_recording_that_fails_ends_its_graph() -> None:
    device = AtOnce(torch.device("cpu"))
    began: list[Any] = []
    begin = device.begin_capture
    device.begin_capture = lambda: began.append(begin()) or began[-1]  # type: ignore[method-assign]

    def fails(backend: Any, between: Any) -> list[torch.Tensor]:
        raise ValueError("in the middle")

    backend: Any = None
    with pytest.raises(ValueError, match="in the middle"):
        record(device, backend, fails, in_pieces=False)  # type: ignore[arg-type]
    assert device.graphs == began
