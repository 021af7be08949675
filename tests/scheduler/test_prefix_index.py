"""Which of several hits a sequence begins with. Hit sources are called in their order."""

from types import SimpleNamespace
from typing import Any

import pytest

from quire.base.messages import MeasuredRates
from quire.kv.manager import LOAD, KVBlocks
from quire.scheduler.reuse.held import Branch
from quire.scheduler.reuse.prefix_index import loading_is_cheaper
from tests.scheduler.test_step_results import scheduler_of
from tests.support.scheduler.fake_device import make_request


@pytest.mark.parametrize(
    ("held", "named", "found"), [(None, 8, 8), (4, 8, 8), (8, 8, 8), (12, 8, 12), (19, 0, 19)]
)
def test_the_longer_of_the_retained_and_the_indexed_hit_is_used(
    held: int | None, named: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt has 20 tokens, and the last one is always computed."""
    scheduler = scheduler_of()
    scheduler.add(make_request("r", list(range(20))), 0.0)
    sequence, memory = scheduler.lifecycle.sequences["r"], scheduler.memory
    retained = scheduler.retained
    branch = Branch(memory.new_sequence(), held or 0, "other")
    if held is not None:
        retained.branches["r"] = branch
    monkeypatch.setattr(retained, "_usable", lambda _: (branch, held))
    by_name = KVBlocks(named, ([],))
    monkeypatch.setattr(memory.kv, "get_computed_blocks", lambda *_: by_name)
    hit = memory.find_hit(sequence)
    assert hit.num_tokens == found
    assert (hit is by_name) == (held is None or held < named)
    assert hit.source == ("" if hit is by_name else "held")


def test_hit_sources_without_entries_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("called")

    scheduler = scheduler_of()
    for source in (scheduler.retained, scheduler.pinned):
        for name in ("find", "num_tokens", "begin"):
            monkeypatch.setattr(source, name, fail)
    scheduler.add(make_request("r", list(range(20))), 0.0)
    assert scheduler.schedule(0.0).plan is not None
    assert scheduler.memory.num_found_tokens(scheduler.lifecycle.sequences["r"]) == 16


@pytest.mark.parametrize(
    ("copy_bytes_per_s", "tokens_per_s", "is_cheaper"),
    [(1000, 40, False), (1001, 40, True), (1000, 39, True), (0, 40, True), (1000, 0, True)],
)
def test_blocks_are_loaded_if_that_is_faster_than_computing_their_tokens(
    copy_bytes_per_s: float, tokens_per_s: float, is_cheaper: bool
) -> None:
    """Twelve tokens are on the device. Loading two blocks of 100 bytes takes 0.2 s, and
    computing their 8 tokens as long."""
    near = KVBlocks(12, ([0, 1, 2],))
    hit = KVBlocks(20, ([0, 1, 2, LOAD, LOAD],), ({3: 5, 4: 6},))
    rates = MeasuredRates(tokens_per_s, copy_bytes_per_s)
    kv = SimpleNamespace(block_bytes=[100])
    assert loading_is_cheaper(kv, hit, near, rates) is is_cheaper  # type: ignore[arg-type]
