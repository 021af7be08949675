"""Changes of the prefix index as data.

Changes are names that were added to and removed from pools. They are only recorded for a subscriber
(`Scheduler.subscribe`). Pools then record names as they add and remove them, in order. The tokens
and the predecessor of a name come from the sequences whose blocks are named, in the same call of a
door. Both are returned unprocessed (`IndexDelta`), which takes the core hardly any time. The
subscriber combines them in its own thread (`engine/attachments/event_encoding.py`).

A change is reported when its plan is made, as the index itself changes then. If the step fails, the
names are removed again, which is an ordinary change.
"""

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np

from quire.base.messages import Request
from quire.kv.manager import KVManager
from quire.scheduler.core.extension import CacheListener
from quire.scheduler.core.sequence import Int32, Sequence


class Named(NamedTuple):
    """Sequences whose blocks `firsts` to `lasts` may have been named. digests: their names, in
    lists that only grow. tokens: int32, tokens of all these blocks, concatenated; None unless
    requested."""

    digests: list[list[bytes]]
    firsts: list[int]
    lasts: Seq[int]
    requests: list[Request]
    tokens: Int32 | None


class IndexDelta(NamedTuple):
    """Changes since the last delta. changes: per pool: cache group, whether it is a host pool,
    its recorded changes (`BlockPool.changes`). was_cleared: the index was emptied before these
    changes."""

    was_cleared: bool
    changes: list[tuple[int, bool, list[bytes]]]
    named: list[Named]
    block_size: int


class IndexWatch(CacheListener):
    """Recorder of index changes between two calls of `take`. keeps_tokens: include the tokens of
    blocks."""

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
        """See CacheListener: record the sequences and tokens of newly named blocks."""
        tokens = self._tokens(sequences, firsts, counts) if self._keeps_tokens else None
        digests, requests = [s.digests for s in sequences], [s.request for s in sequences]
        self._named.append(Named(digests, list(firsts), counts, requests, tokens))

    def loaded(self, sequence: Sequence, num_blocks: int) -> None:
        """See CacheListener."""
        self.named([sequence], [0], [num_blocks], ())

    def _tokens(self, sequences: Seq[Sequence], firsts: Seq[int], lasts: Seq[int]) -> Int32:
        """Copy the tokens of these blocks, int32 [num_tokens], concatenated."""
        size = self._block_size
        parts = [
            s.tokens_between(i * size, j * size)
            for s, i, j in zip(sequences, firsts, lasts, strict=True)
        ]
        return parts[0].copy() if len(parts) == 1 else np.concatenate(parts)

    def reset(self, now: float) -> None:
        """Note that all names were removed."""
        self._was_cleared = True
        for _, _, pool in self._watched:
            pool.changes = []

    def take(self, now: float = 0.0) -> IndexDelta | None:
        """Return the changes since the last call, or None. now: unused."""
        changes = [(g, is_host, pool.changes) for g, is_host, pool in self._watched if pool.changes]
        for _, _, pool in self._watched:
            if pool.changes:
                pool.changes = []
        named, self._named = self._named, []
        was_cleared, self._was_cleared = self._was_cleared, False
        if not changes and not was_cleared:
            return None
        return IndexDelta(was_cleared, changes, named, self._block_size)
