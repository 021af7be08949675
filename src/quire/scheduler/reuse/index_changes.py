"""What has changed in the prefix index: which blocks are there now and which are not, as data.

Nobody keeps this unless it was asked for (`Scheduler.subscribe`). Then pools note the names that
they give and take away, in order. What a name stands for, tokens and the block before, is told by
the sequences whose blocks are named, in the same call through a door. Both are handed out as they
are (`IndexDelta`), which takes the core next to no time; who wants to know puts them together, in a
thread of its own (`engine/attachments/event_encoding.py`).

A change is told when a plan is made, as the index itself changes then. If the step fails, the
names are taken away again, which is a change like any other.
"""

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np

from quire.base.messages import Request
from quire.kv.manager import KVManager
from quire.scheduler.core.extension import CacheListener
from quire.scheduler.core.sequence import Int32, Sequence


class Named(NamedTuple):
    """Sequences whose blocks from `first` to `last` may have been named: their names (lists that
    grow, and never change what they have), requests, and the tokens of all these blocks, one after
    the other, if kept."""

    digests: list[list[bytes]]
    firsts: list[int]
    lasts: Seq[int]
    requests: list[Request]
    tokens: Int32 | None


class IndexDelta(NamedTuple):
    """What has changed since the last one. changes: by pool: cache group, whether it is the host's,
    what it noted (`BlockPool.changes`). was_cleared: before all that."""

    was_cleared: bool
    changes: list[tuple[int, bool, list[bytes]]]
    named: list[Named]
    block_size: int


class IndexWatch(CacheListener):
    """Gathers what changes in the indexes of pools between two calls of `take`. keeps_tokens: with
    the tokens of blocks."""

    def __init__(self, kv: KVManager, keeps_tokens: bool) -> None:
        self._block_size = kv.block_size
        self._keeps_tokens = keeps_tokens
        host = () if kv.tier is None else kv.host_pools
        self._watched = [(g, False, pool) for g, pool in enumerate(kv.pools)]
        self._watched += [(g, True, pool) for g, pool in enumerate(host)]
        self._named: list[Named] = []
        self._was_cleared = False
        for _, _, pool in self._watched:
            pool.changes = []

    def named(
        self, sequences: Seq[Sequence], firsts: Seq[int], counts: Seq[int], blocks: Seq[Any]
    ) -> None:
        """See CacheListener: note what the names of these blocks stand for."""
        tokens = self._tokens(sequences, firsts, counts) if self._keeps_tokens else None
        digests, requests = [s.digests for s in sequences], [s.request for s in sequences]
        self._named.append(Named(digests, list(firsts), counts, requests, tokens))

    def loaded(self, sequence: Sequence, num_blocks: int) -> None:
        """See CacheListener."""
        self.named([sequence], [0], [num_blocks], ())

    def _tokens(self, sequences: Seq[Sequence], firsts: Seq[int], lasts: Seq[int]) -> Int32:
        """Copy the tokens of these blocks."""
        size = self._block_size
        parts = [
            s.tokens_between(i * size, j * size)
            for s, i, j in zip(sequences, firsts, lasts, strict=True)
        ]
        return parts[0].copy() if len(parts) == 1 else np.concatenate(parts)

    def reset(self, now: float) -> None:
        """Note that all names were forgotten."""
        self._was_cleared = True
        for _, _, pool in self._watched:
            pool.changes = []

    def take(self, now: float = 0.0) -> IndexDelta | None:
        """Return what has changed since the last call. now: not looked at."""
        changes = [(g, is_host, pool.changes) for g, is_host, pool in self._watched if pool.changes]
        for _, _, pool in self._watched:
            if pool.changes:
                pool.changes = []
        named, self._named = self._named, []
        was_cleared, self._was_cleared = self._was_cleared, False
        if not changes and not was_cleared:
            return None
        return IndexDelta(was_cleared, changes, named, self._block_size)
