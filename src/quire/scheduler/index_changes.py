"""What has changed in the prefix index: which blocks are there now and which are not, as data.

Nobody keeps this unless it was asked for (`Memory.watch_index`). Then the pools note the names that
they give and take away, in order. What a name stands for, tokens and the block before, is told by
the sequences whose blocks are named, in the same call through a door. Both are handed out as they
are (`IndexDelta`), which takes the core next to no time; who wants to know, in a thread of its own,
puts them together (`changes_of`).

A change is told when a plan is made, as the index itself changes then. If the step fails, the
names are taken away again, which is a change like any other.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.base.messages import Request
from quire.kv.pool import BlockPool
from quire.scheduler.sequence import Int32, Sequence


@dataclass(slots=True)
class Stored:
    """Blocks of a cache group that the index has now, each behind the one before it. parent: the
    name of the block before the first, None at the beginning of a sequence. token_ids: of all of
    them, if they are kept. request: who named them; None where only the names are known, as in host
    memory, and none follows another."""

    group: int
    is_on_host: bool
    digests: list[bytes]
    parent: bytes | None = None
    token_ids: list[int] = field(default_factory=list)
    request: Request | None = None


@dataclass(slots=True)
class Removed:
    """Blocks that the index does not have any more."""

    group: int
    is_on_host: bool
    digests: list[bytes]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is in the index any more, on the device or in host memory."""


IndexChange = Stored | Removed | Cleared


class Named(NamedTuple):
    """Sequences whose blocks from `first` to `last` may have been named: their names (lists that
    grow, and never change what they have), requests, and the tokens of these blocks, if kept."""

    digests: list[list[bytes]]
    firsts: list[int]
    lasts: Seq[int]
    requests: list[Request]
    tokens: list[Int32]


class IndexDelta(NamedTuple):
    """What has changed since the last one. changes: by pool: cache group, whether it is the host's,
    names with whether they are there now, in order. was_cleared: before all that."""

    was_cleared: bool
    changes: list[tuple[int, bool, list[tuple[bytes, bool]]]]
    named: list[Named]
    block_size: int


class IndexWatch:
    """Gathers what changes in the indexes of pools between two calls of `take`. device, host: by
    cache group; of the host none if nothing is cached there."""

    def __init__(
        self,
        device: Seq[BlockPool],
        host: Seq[BlockPool],
        block_size: int,
        keeps_tokens: bool,
    ) -> None:
        self._block_size = block_size
        self._keeps_tokens = keeps_tokens
        self._watched = [(g, False, pool) for g, pool in enumerate(device)]
        self._watched += [(g, True, pool) for g, pool in enumerate(host)]
        self._named: list[Named] = []
        self._was_cleared = False
        for _, _, pool in self._watched:
            pool.changes = []

    def explain(self, sequences: Seq[Sequence], firsts: list[int], lasts: Seq[int]) -> None:
        """Note what the names of these blocks stand for: they may be given now."""
        tokens: list[Int32] = []
        if self._keeps_tokens:
            size = self._block_size
            tokens = [
                s.known_tokens[first * size : last * size].copy()
                for s, first, last in zip(sequences, firsts, lasts, strict=True)
            ]
        digests, requests = [s.digests for s in sequences], [s.request for s in sequences]
        self._named.append(Named(digests, firsts, lasts, requests, tokens))

    def clear(self) -> None:
        """Note that all names were forgotten."""
        self._was_cleared = True
        for _, _, pool in self._watched:
            pool.changes = []

    def take(self) -> IndexDelta | None:
        """Return what has changed since the last call."""
        changes = [(g, is_host, pool.changes) for g, is_host, pool in self._watched if pool.changes]
        for _, _, pool in self._watched:
            if pool.changes:
                pool.changes = []
        named, self._named = self._named, []
        was_cleared, self._was_cleared = self._was_cleared, False
        if not changes and not was_cleared:
            return None
        return IndexDelta(was_cleared, changes, named, self._block_size)


class _Origin(NamedTuple):
    """Where a name comes from: a sequence's names, which of them it is, and its tokens."""

    digests: list[bytes]
    place: int
    request: Request
    tokens: Int32 | None


def changes_of(delta: IndexDelta) -> list[IndexChange]:
    """List what has changed, in order for each cache group on the device and on the host."""
    found: list[IndexChange] = [Cleared()] if delta.was_cleared else []
    origins = dict(_origins(delta))
    for group, is_on_host, changes in delta.changes:
        found += _runs(changes, {} if is_on_host else origins, group, is_on_host)
    return found


def _origins(delta: IndexDelta) -> Iterator[tuple[bytes, _Origin]]:
    size = delta.block_size
    for named in delta.named:
        for n, (digests, first, last) in enumerate(
            zip(named.digests, named.firsts, named.lasts, strict=True)
        ):
            for i in range(first, last):
                tokens = named.tokens[n][(i - first) * size :][:size] if named.tokens else None
                yield digests[i], _Origin(digests, i, named.requests[n], tokens)


def _runs(
    changes: Seq[tuple[bytes, bool]], origins: dict[bytes, _Origin], group: int, is_on_host: bool
) -> list[IndexChange]:
    """Put blocks together that follow each other."""
    runs: list[IndexChange] = []
    end: _Origin | None = None  # where the last block comes from
    for digest, is_there in changes:
        run = runs[-1] if runs else None
        if not is_there:
            if not isinstance(run, Removed):
                run = Removed(group, is_on_host, [])
                runs.append(run)
            run.digests.append(digest)
            continue
        origin = origins.get(digest)  # none of those on the host
        if not isinstance(run, Stored) or not _is_next(end, origin):
            run = Stored(group, is_on_host, [])
            if origin is not None:
                run.parent = origin.digests[origin.place - 1] if origin.place else None
                run.request = origin.request
            runs.append(run)
        run.digests.append(digest)
        if origin is not None and origin.tokens is not None:
            run.token_ids += origin.tokens.tolist()
        end = origin
    return runs


def _is_next(last: _Origin | None, origin: _Origin | None) -> bool:
    """Tell whether a block goes into the run that the last one is in: all those of which only the
    names are known, or the one behind it in a sequence."""
    if last is None or origin is None:
        return last is origin
    return origin.digests is last.digests and origin.place == last.place + 1
