"""Finished branches of conversations, whose blocks are evicted first.

    turn 1 -- turn 2 -+- subagent A: turns 1 and 2
                      +- subagent B: turn 1
                      +- turn 3

An agent forks its context for subagents, and continues it when they have ended. A client that edits
or repeats a turn also leaves a branch behind. Such a branch is not continued. But its blocks were
used last, so they would stay cached longer than the blocks of waiting conversations.

A prompt continues a turn if it begins with all full blocks of the turn's prompt and answer. Then
the other branches from the end of this turn are finished, unless one of their requests is open.
Their blocks become the next to evict, on the device and in host memory. If a branch is continued
after all, the blocks that it uses count as used again. So a mistake can cost time, and changes no
answer.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from quire.kv.manager import KVBlocks, KVManager
from quire.scheduler.core.extension import (
    CacheListener,
    Extension,
    HitSource,
    StepEnd,
    StepExtension,
)
from quire.scheduler.core.sequence import Sequence

MAX_BLOCKS = 1 << 18  # names of all remembered turns together: about 20 MB


@dataclass(eq=False, slots=True)
class Turn:
    """One request of a conversation. digests: names of its own full blocks, which follow the
    blocks of the turn that it continues. branches: requests that continue it."""

    is_open: bool = True
    digests: list[bytes] = field(default_factory=list)
    branches: list["Turn"] = field(default_factory=list)

    def all(self) -> Iterator["Turn"]:
        """Yield this turn and all turns after it, earlier ones first."""
        left = [self]
        while left:
            turn = left.pop()
            yield turn
            left += turn.branches


class FinishedBranches(HitSource, CacheListener, Extension, StepExtension):
    """Extension that finds finished branches. max_blocks: maximum number of remembered names."""

    entries = (True,)  # never empty, so that `begin` is called for each admission
    follows_steps = True

    def __init__(self, kv: KVManager, max_blocks: int = MAX_BLOCKS) -> None:
        self._kv, self._max_blocks = kv, max_blocks
        self.reset(0.0)

    def reset(self, now: float) -> None:
        """See CacheListener: forget all turns."""
        self._ends = OrderedDict[bytes, Turn]()  # by the name of the turn's last full block
        self._open: dict[int, tuple[Turn, int]] = {}  # by arrival: turn, blocks before its own
        self._finished = OrderedDict[bytes, None]()  # names of blocks to evict first
        self._num_blocks = 0

    def begin(self, sequence: Sequence, hit: KVBlocks, now: float) -> None:
        """See HitSource: find the turn that a request continues, and finish its other branches."""
        if sequence.arrival in self._open or sequence.group is not None:
            return
        digests = sequence.digests
        num_before, turn = self._last_turn(digests), Turn()
        if num_before:
            before = self._ends[digests[num_before - 1]]
            for branch in [*before.branches]:
                if not any(each.is_open for each in branch.all()):
                    before.branches.remove(branch)
                    self._finish(branch)
            before.branches.append(turn)
        if self._finished:
            for digest in digests:
                self._finished.pop(digest, None)
        self._open[sequence.arrival] = turn, num_before
        sequence.watch(self)

    def leave(self, sequence: Sequence, reason: str, now: float) -> None:
        """See Extension: remember the end of a turn."""
        turn, num_before = self._open.pop(sequence.arrival, (Turn(), 0))
        turn.is_open = False
        num_blocks = sequence.blocks.num_indexed
        turn.digests = sequence.digests[num_before:num_blocks]
        if turn.digests:
            self._forget(turn.digests[-1])
            self._ends[turn.digests[-1]] = turn
            self._num_blocks += len(turn.digests)
        while self._num_blocks > self._max_blocks:
            self._forget(next(iter(self._ends)))

    def end_step(self, end: StepEnd, now: float) -> None:
        """See StepExtension: blocks of finished branches that the device has evicted leave host
        memory first, too."""
        if self._finished:
            self._kv.evict_soon(d for _, d in end.settled if d in self._finished)

    def fail(self, failed: Collection[Sequence], now: float) -> None:
        """See Extension: the names of failed sequences may be gone."""
        self.reset(now)

    def _last_turn(self, digests: list[bytes]) -> int:
        """Return after how many of these blocks the last remembered turn ends; 0 for none."""
        return next((i for i in range(len(digests), 0, -1) if digests[i - 1] in self._ends), 0)

    def _finish(self, branch: Turn) -> None:
        """Make the blocks of a branch the next to evict, the last block first."""
        for turn in branch.all():
            for digest in turn.digests:
                self._finished[digest] = None
            self._kv.evict_soon(turn.digests)
        while len(self._finished) > self._max_blocks:
            self._finished.popitem(last=False)

    def _forget(self, end: bytes) -> None:
        """Forget the turn that ends with this block, if there is one."""
        turn = self._ends.pop(end, None)
        if turn is not None:
            self._num_blocks -= len(turn.digests)
            turn.digests = []
