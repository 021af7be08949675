"""Finished branches of conversations, whose blocks are evicted first.

    turn 1 -- turn 2 -+- subagent A: turns 1 and 2
                      +- subagent B: turn 1
                      +- turn 3

An agent forks its context for subagents, and continues it when they have ended. A client that edits
or repeats a turn also leaves a branch behind. Such a branch is not continued. But its blocks were
used last, so they would stay cached longer than the blocks of waiting conversations.

A prompt continues a turn if it begins with all full blocks of the turn's prompt and answer. Then
the other branches from the end of this turn are finished, unless one of their requests is open,
which includes requests that wait. Their blocks become the next to evict, on the device and in host
memory. If a branch is continued after all, the blocks that it uses count as used again. So a
mistake can cost time, and changes no answer.

A turn ends with a block that holds a part of its answer. Otherwise it could end with a prompt that
several conversations share, and each of them would look like a branch of this turn.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from quire.base.kv_orders import Kept
from quire.kv.manager import KVBlocks, KVManager
from quire.scheduler.core.extension import (
    CacheListener,
    Extension,
    Handler,
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


@dataclass(eq=False, slots=True)
class OpenTurn:
    """Turn of an open request. parent: turn that it continues. num_before: blocks up to the end of
    the parent."""

    turn: Turn = field(default_factory=Turn)
    parent: Turn | None = None
    num_before: int = 0
    has_begun: bool = False

    def continue_turn(self, parent: Turn | None, num_before: int) -> None:
        """Make this turn a branch of another parent; None for no parent."""
        self.num_before = num_before
        if parent is self.parent:
            return
        if self.parent is not None:
            self.parent.branches.remove(self.turn)
        if parent is not None:
            parent.branches.append(self.turn)
        self.parent = parent


class FinishedBranches(HitSource, CacheListener, Extension, StepExtension):
    """Extension that finds finished branches. max_blocks: maximum number of remembered names."""

    entries = (True,)  # never empty, so that `begin` is called for each admission
    follows_steps = True
    reads_digests = True

    def __init__(self, kv: KVManager, max_blocks: int = MAX_BLOCKS) -> None:
        self._kv, self._max_blocks = kv, max_blocks
        self.reset(0.0)

    def handlers(self) -> Mapping[type, Handler]:
        """See Extension: a store lets blocks go that it has kept."""
        return {Kept: lambda answer, now: self._evict_released()}

    def reset(self, now: float) -> None:
        """See CacheListener: forget all turns."""
        self._ends = OrderedDict[bytes, Turn]()  # by the name of the turn's last full block
        self._open: dict[str, OpenTurn] = {}  # by request id
        self._finished = OrderedDict[bytes, None]()  # names of blocks to evict first
        self._in_use = dict[bytes, None]()  # finished names whose host block was in use
        self._num_blocks = 0

    def enter(self, sequence: Sequence, now: float) -> None:
        """See Extension: the turn that a request continues has an open branch. A pinned prefix is
        no turn."""
        if sequence.samples:
            self._join(sequence)

    def begin(self, sequence: Sequence, hit: KVBlocks, now: float) -> None:
        """See HitSource: finish the other branches of the turn that a request continues."""
        digests = sequence.digests
        if self._finished:
            for digest in digests:
                self._finished.pop(digest, None)
        known = self._open.get(sequence.request.request_id)
        if not sequence.samples or (known is not None and known.has_begun):
            return
        opened = self._join(sequence)  # again: an earlier turn may have ended meanwhile
        opened.has_begun = True
        if opened.parent is not None:
            for branch in [*opened.parent.branches]:
                if not any(each.is_open for each in branch.all()):
                    opened.parent.branches.remove(branch)
                    self._finish(branch)

    def leave(self, sequence: Sequence, reason: str, now: float) -> None:
        """See Extension: remember the end of a turn. Several answers to a prompt have no common
        end."""
        group, request_id = sequence.group, sequence.request.request_id
        is_last = group is None or all(each is sequence for each in group.unfinished)
        opened = self._open.pop(request_id, None) if is_last else None
        if opened is None:
            return
        turn, num_blocks = opened.turn, sequence.blocks.num_indexed
        num_prompt = sequence.num_prompt_tokens // self._kv.block_size
        turn.is_open = False
        if group is not None or num_blocks <= max(num_prompt, opened.num_before):
            opened.continue_turn(None, 0)
            return
        turn.digests = sequence.digests[opened.num_before : num_blocks]
        self._forget(turn.digests[-1])
        self._ends[turn.digests[-1]] = turn
        self._num_blocks += len(turn.digests)
        while self._num_blocks > self._max_blocks:
            self._forget(next(iter(self._ends)))

    def end_step(self, end: StepEnd, now: float) -> None:
        """See StepExtension: blocks of finished branches that the device has evicted leave host
        memory first, too."""
        if self._finished:
            self._evict(d for _, d in end.settled if d in self._finished)

    def fail(self, failed: Collection[Sequence], now: float) -> None:
        """See Extension: the names of failed sequences may be gone."""
        self.reset(now)

    def _join(self, sequence: Sequence) -> OpenTurn:
        """Make an open request a branch of the last remembered turn in its prompt."""
        digests, request_id = sequence.digests, sequence.request.request_id
        opened = self._open.setdefault(request_id, OpenTurn())
        num = next((i for i in range(len(digests), 0, -1) if digests[i - 1] in self._ends), 0)
        opened.continue_turn(self._ends[digests[num - 1]] if num else None, num)
        sequence.watch(self)
        return opened

    def _finish(self, branch: Turn) -> None:
        """Make the blocks of a branch the next to evict, the last block first."""
        for turn in branch.all():
            for digest in turn.digests:
                self._finished[digest] = None
            self._evict(turn.digests)
        while len(self._finished) > self._max_blocks:
            self._finished.popitem(last=False)

    def _evict(self, digests: Iterable[bytes]) -> None:
        """Make blocks the next to evict. Note the blocks that stores hold in host memory."""
        self._in_use.update(dict.fromkeys(self._kv.evict_soon(digests)))

    def _evict_released(self) -> None:
        """Make the blocks of finished branches that stores have released the next to evict."""
        names, self._in_use = [d for d in self._in_use if d in self._finished], {}
        self._evict(names)

    def _forget(self, end: bytes) -> None:
        """Forget the turn that ends with this block, if there is one."""
        turn = self._ends.pop(end, None)
        if turn is not None:
            self._num_blocks -= len(turn.digests)
            turn.digests = []
