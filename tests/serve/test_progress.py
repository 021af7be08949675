"""Test bars and log lines of progress: counts, time left, and lines without a terminal."""

import logging
import sys

import pytest

from quire.serve.processes import progress
from quire.serve.processes.progress import CountBar, LoadBar, time_left


def test_time_left_follows_the_mean_rate() -> None:
    assert time_left(1, 4, 10.0) == "0:00:30 left"
    assert time_left(2, 7202, 2.0) == "2:00:00 left"
    assert time_left(1, 2, 59.7) == "0:01:00 left"
    assert time_left(5, 5, 9.0) == "0:00:00 left"
    assert time_left(0, 5, 9.0) == "-"


def test_bar_is_shown_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with CountBar(3, "Work") as bar:
        bar.advance()
        assert bar._shown is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with CountBar(3, "Work", enabled=False) as bar:
        assert bar._shown is None
    with CountBar(3, "Work") as bar:
        bar.advance(2)
        bar.describe("More")
        assert bar._shown is not None
        [task] = bar._shown.tasks
        assert (task.completed, task.total, task.description) == (2, 3, "More")


@pytest.mark.parametrize("enabled", [True, False])
def test_loading_logs_lines_without_a_terminal(
    enabled: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    with caplog.at_level(logging.INFO, "quire"), LoadBar(enabled) as bar:
        for done, seconds in ((10, 4.0), (25, 15.0), (40, 16.0), (100, 60.0)):
            now_s[0] = 100.0 + seconds
            bar.update(done, 100)
    lines = ["loading weights: 25 %, 0:00:55 left"] if enabled else []
    assert caplog.messages == lines
