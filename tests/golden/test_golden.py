"""Runs recorded in the past give the same plans today.

If this fails after a change that should not change plans, the change is wrong. Then `quire replay
tests/golden/NAME.rec` shows the first different plan. If plans should change, record again: python
-m tests.golden.make
"""

from pathlib import Path

import pytest

from quire.engine.recording.calls import calls_of
from quire.engine.recording.files import read_recording, read_segment
from quire.engine.recording.frames import State
from quire.tools.replay import replay_all
from tests.golden.make import CONTENTS, RUNS, contents, golden_paths

MAX_BYTES = 60_000


@pytest.mark.parametrize("path", golden_paths(), ids=lambda path: path.stem)
def test_all_plans_are_identical(path: Path) -> None:
    outcome = replay_all(read_recording(path))
    assert outcome.difference is None, "\n".join(outcome.difference.lines())
    assert outcome.num_steps > 20
    assert outcome.state is State.WHOLE


def test_golden_files_keep_their_recorded_contents() -> None:
    """A conversion of the files to another format changes no contents."""
    found = {path.stem: contents(path) for path in golden_paths()}
    lines = CONTENTS.read_text("utf-8").splitlines()
    assert found == {line.split()[1]: line.split()[0] for line in lines}


def test_golden_runs_cover_forks_copies_and_swaps() -> None:
    assert {path.stem for path in golden_paths()} == set(RUNS)
    kinds: dict[str, set[str]] = {}
    for path in golden_paths():
        assert path.stat().st_size < MAX_BYTES, path.name
        segment = read_segment(path)
        assert not segment.header["has_tokens"]
        found = kinds.setdefault(path.stem, set())
        for call in calls_of(segment.items):
            found |= set(call.plan or ())
            found |= {move[2]["kind"] for move in (call.plan or {}).get("moves", [None])[1:]}
    for name, found in kinds.items():
        assert {"forked", "sources", "released", "block_writes", "copy"} <= found, name
        assert ({"swap_out", "load"} <= found) == ("swap" in name), name
