"""Signs of life of a rank, which tell where it is, from a thread beside the one that computes."""

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import quire
from quire.engine.observability.starvation import Starvation, read_threads
from quire.engine.ranks.messages import Beat

BEAT_S = 0.5  # between two of them
OURS = str(Path(quire.__file__).parent)
MOST_THREADS = 4
MOST_PARTS = 3  # of a path


class Beats:
    """Sent until `send` raises that nobody listens (gone). number: of the step that the rank has
    begun last, which its owner sets; -1 before the first. counts: how often it has met others, and
    how often tokens were sent to its experts; asked on a thread of this object's."""

    def __init__(
        self,
        send: Callable[[Beat], None],
        counts: Callable[[], tuple[int, int]],
        gone: type[Exception],
    ) -> None:
        self.number = -1
        self._send, self._counts, self._gone = send, counts, gone
        threading.Thread(target=self._run, name="quire-beats", daemon=True).start()

    def _run(self) -> None:
        pid = os.getpid()
        starvation = Starvation(lambda: read_threads(pid), time.monotonic())
        while True:
            try:
                num_exchanges, expert_pairs = self._counts()
                starvation.look(time.monotonic())
                starved_s = starvation.starved_s
                self._send(Beat(self.number, num_exchanges, places(), expert_pairs, starved_s))
            except self._gone:
                return
            time.sleep(BEAT_S)


def places() -> str:
    """Say where the other threads of this process are, those first that were started first."""
    own, frames = threading.get_ident(), sys._current_frames()
    others = [thread for thread in threading.enumerate() if thread.ident not in (own, None)]
    found = [
        f"{thread.name} at {place_of(frames[thread.ident])}"
        for thread in others[:MOST_THREADS]
        if thread.ident in frames
    ]
    return "; ".join(found)


def place_of(frame: FrameType) -> str:
    """Say where a frame is, and where in our own code, if it is not."""
    here, each = _line(frame), frame
    while not each.f_code.co_filename.startswith(OURS) and each.f_back is not None:
        each = each.f_back
    ours = _line(each)
    return here if here == ours else f"{here}, from {ours}"


def _line(frame: FrameType) -> str:
    code = frame.f_code
    path = "/".join(Path(code.co_filename).parts[-MOST_PARTS:])
    return f"{path}:{frame.f_lineno} ({code.co_name})"
