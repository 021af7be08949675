"""How often a process is restarted, and after which pauses."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from quire.serve.processes.children import MAX_RESTARTS, RESTART_WINDOW_S, Child, Process, Restarts


@pytest.fixture
def sleeper() -> Iterator[Process]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_restart_pauses_grow_until_it_gives_up() -> None:
    restarts, pauses = Restarts(), []
    while (pause_s := restarts.pause_s(float(len(pauses)))) is not None:
        pauses.append(pause_s)
    assert pauses == [0.0, 1.0, 2.0] and len(pauses) == MAX_RESTARTS


def test_old_deaths_do_not_count() -> None:
    restarts = Restarts()
    for i in range(20):
        assert restarts.pause_s(i * RESTART_WINDOW_S / MAX_RESTARTS) is not None
    assert restarts.pause_s(20 * RESTART_WINDOW_S) == 0.0


def test_process_that_cannot_be_watched_is_ended(
    sleeper: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replaced, and two of them must not serve together."""

    def none_left(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", none_left)
    child = Child("a child", lambda: sleeper, may_restart=True)
    with pytest.raises(OSError, match="Too many open files"):
        child.start()
    assert sleeper.returncode is not None
    assert not child.is_running
