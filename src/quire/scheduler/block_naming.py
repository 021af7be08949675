"""Names of blocks: digests of all tokens up to a block's end, and who may be found by them.

A name begins with the root of its request (`kv/digest.py`), so that salts, adapters and images keep
apart what must not be shared. In steady decode a sixteenth of the rows fills a block in every step;
these are named together, since a call of their own for each would be most of the time of a step.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from quire.base.messages import Request
from quire.kv.digest import extend_by_one, extend_digests, root_digest
from quire.scheduler.sequence import Int32, Sequence

NewNames = tuple[int, list[bytes], int, int]  # arrival; of this list, those from here to there


@dataclass(slots=True)
class Prefix:
    """The first tokens of a sequence, to be named as if they were one block."""

    arrival: int
    root: bytes
    known_tokens: Int32
    digests: list[bytes] = field(default_factory=list)
    row: int = -1


Named = Sequence | Prefix
Digester = Callable[[Seq[Named], int, Seq[int]], None]


def digest_blocks(named: Seq[Named], block_size: int, counts: Seq[int]) -> None:
    """Extend the digests of each to its first `count` blocks."""
    rows = [each.row for each in named]
    lacks_one = [len(s.digests) == n - 1 for s, n in zip(named, counts, strict=True)]
    if len(named) < 2 or min(rows) < 0 or not all(lacks_one):
        for each, count in zip(named, counts, strict=True):
            extend_digests(each.digests, each.root, each.known_tokens, block_size, count)
        return
    first = named[0]
    assert isinstance(first, Sequence), "only a sequence holds a row"
    starts = (np.array(counts) - 1) * block_size
    places = np.array(rows)[:, None], starts[:, None] + np.arange(block_size)
    tokens = first.table.tokens[places]
    extend_by_one([each.digests for each in named], [each.root for each in named], tokens)


class BlockNaming:
    """Gives names. fingerprint: identifies the contents of the cache; new: where names are noted as
    they are given, if a subscriber wants them. digester: a replay has the names from its record.
    """

    def __init__(
        self, block_size: int, caches: bool, fingerprint: bytes, digester: Digester = digest_blocks
    ) -> None:
        self.block_size = block_size
        self.fingerprint = fingerprint
        self.new: list[NewNames] | None = None
        self.digester = digester
        self._caches = caches

    def is_indexed(self, sequence: Sequence) -> bool:
        """Tell whether its blocks enter the index. Without prefix caching the sequences of a group
        still share the prompt."""
        return self._caches or sequence.group is not None

    def root(self, request: Request, num: int, arrival: int) -> bytes:
        """Return the root of the digests of a request for `num` sequences. Without prefix caching
        nobody else has the root of a group."""
        salt = request.cache_salt
        if num > 1 and not self._caches:
            salt = f"{salt} of group {arrival} alone"
        return root_digest(self.fingerprint, salt, request.adapter_id, request.media_ids)

    def extend(self, named: Seq[Named], counts: Seq[int], size: int | None = None) -> None:
        """Name the first `count` blocks of each, as far as they have no names. size: tokens of a
        block, if not the cache's."""
        if self.new is not None:
            self.new += [
                (each.arrival, digests, len(digests), count)
                for each, count in zip(named, counts, strict=True)
                if count > len(digests := each.digests)
            ]
        self.digester(named, size or self.block_size, counts)

    def readable(self, sequence: Sequence) -> tuple[Seq[bytes], int]:
        """Name the blocks that a sequence may find in the index; return the names, and the number
        of tokens: all of these but the last may be found."""
        num_tokens = sequence.num_known_tokens
        if not self.is_indexed(sequence) or not sequence.may_read_cache:
            return (), num_tokens
        num_tokens = min(num_tokens, sequence.num_readable_tokens + 1)
        num_blocks = num_tokens // self.block_size
        if len(sequence.digests) < num_blocks:
            self.extend([sequence], [num_blocks])
        return sequence.digests, num_tokens

    def of_prefix(self, sequence: Sequence, num_tokens: int) -> bytes:
        """Name the first tokens of a sequence as one block."""
        found = sequence.prefix_digests.get(num_tokens)
        if found is None:
            request = sequence.request
            parts = request.cache_salt, request.adapter_id, request.media_ids
            root = root_digest(self.fingerprint, *parts)
            prefix = Prefix(sequence.arrival, root, sequence.known_tokens)
            self.extend([prefix], [1], size=num_tokens)
            found = sequence.prefix_digests[num_tokens] = prefix.digests[0]
        return found
