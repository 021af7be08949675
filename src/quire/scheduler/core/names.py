"""Names of blocks.

A block's name is the digest of all tokens up to its end. It begins with the root of its request, so
that requests with different salts or adapters share no blocks. Marks (`kv/digest.py`) identify
tokens in addition to their ids. A decoding row fills one block at a time; the name is computed from
that block's tokens alone. After `ResetPrefixCache` all names change (`rename`):

    arrived before, without blocks    root of the new epoch, since all of it is still to be computed
    arrived before, with blocks       root of its own, unique for all time
    pinned                            root of the new epoch; its blocks are computed again

The names of an epoch are valid in this engine only. In a shared store, the blocks of older names
stay, for other engines and for a later run of this one.
"""

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from quire.base.messages import Request
from quire.kv.digest import BlockChain, BlockHash, KnownRuns, Mark, extend_by_one, root_digest
from quire.scheduler.core.sequence import Int32, Sequence

NewNames = tuple[int, list[bytes], int, int]  # arrival, digests, range of this list


@dataclass(slots=True)
class Prefix:
    """Leading tokens of a sequence, which are named as if they were one block."""

    arrival: int
    root: bytes
    known_tokens: Int32
    digests: list[bytes] = field(default_factory=list)
    marks: Seq[Mark] = ()

    def tokens_between(self, first: int, last: int) -> Int32:
        """See Sequence."""
        return self.known_tokens[first:last]


Named = Sequence | Prefix


class Digester:
    """Function that computes the digests of blocks from their tokens. block_hash: hash function.
    chain: a faster form of it, if there is one."""

    def __init__(
        self, block_hash: BlockHash = hashlib.sha256, chain: BlockChain | None = None
    ) -> None:
        self.block_hash, self.chain = block_hash, chain
        self._runs = KnownRuns(block_hash, chain=chain)

    def __call__(self, named: Seq[Named], block_size: int, counts: Seq[int]) -> None:
        """Extend the digests of named[i] to its first counts[i] blocks."""
        for i, s in enumerate(named):
            digests, marks, block_hash = s.digests, s.marks, self.block_hash
            first, n = len(digests), counts[i]
            if n == first + 1 and not marks:  # as a decoding row fills a block
                tokens = s.tokens_between(first * block_size, n * block_size)
                extend_by_one(digests, s.root, tokens, block_hash, self.chain)
            elif n > first:
                self._runs.extend(digests, s.root, s.known_tokens, block_size, n, marks)


class BlockNaming:
    """Assignment of names to blocks.

    fingerprint: identifies the contents of the cache. new: list of new names while a subscriber
    wants them, else None. digester: computes digests; a replay uses one that reads recorded names.
    """

    def __init__(
        self, block_size: int, caches: bool, fingerprint: bytes, digester: Digester
    ) -> None:
        self.block_size = block_size
        self.fingerprint = fingerprint
        self.new: list[NewNames] | None = None
        self.digester = digester
        self._caches = caches

    def is_indexed(self, sequence: Sequence) -> bool:
        """Return whether its blocks enter the index. Without prefix caching, the sequences of a
        group still share their prompt."""
        return self._caches or sequence.group is not None

    def root(self, request: Request, num: int, arrival: int) -> bytes:
        """Return the root of the digests of a request for `num` sequences. Without prefix caching,
        a group's root is unique."""
        salt = request.cache_salt
        if num > 1 and not self._caches:
            salt = f"{salt} of group {arrival} alone"
        return root_digest(self.fingerprint, salt, request.adapter_id)

    def extend(self, named: Seq[Named], counts: Seq[int], size: int | None = None) -> None:
        """Name the first counts[i] blocks of named[i], if they have no names yet. size: tokens per
        block, by default the cache's block size."""
        if len(named) == 1 and len(named[0].digests) >= counts[0]:
            return
        if self.new is not None:
            self.new += [
                (each.arrival, digests, len(digests), count)
                for each, count in zip(named, counts, strict=True)
                if count > len(digests := each.digests)
            ]
        self.digester(named, size or self.block_size, counts)

    def readable(self, sequence: Sequence) -> tuple[Seq[bytes], int]:
        """Name the blocks that a sequence may find in the index. Return the names and a number of
        tokens, of which all but the last may be found."""
        num_tokens, num_readable = sequence.num_known_tokens, sequence.num_readable_tokens
        if not num_readable or not self.is_indexed(sequence):
            return (), num_tokens
        num_tokens = min(num_tokens, num_readable + 1)
        num_blocks = num_tokens // self.block_size
        if len(sequence.digests) < num_blocks:
            self.extend([sequence], [num_blocks])
        return sequence.digests, num_tokens

    def of_prefix(self, sequence: Sequence, num_tokens: int) -> bytes:
        """Return the name of the first num_tokens tokens of a sequence, hashed as one block."""
        found = sequence.prefix_digests.get(num_tokens)
        if found is None:
            request = sequence.request
            root = root_digest(self.fingerprint, request.cache_salt, request.adapter_id)
            prefix = Prefix(sequence.arrival, root, sequence.known_tokens)
            prefix.marks = sequence.marks
            self.extend([prefix], [1], size=num_tokens)
            found = sequence.prefix_digests[num_tokens] = prefix.digests[0]
        return found

    def of_partial(self, sequence: Sequence, num_blocks: int, length: int) -> bytes:
        """Return the name of a block of `length` tokens, which is not full, after the first
        num_blocks blocks of a sequence. These are named and at least one. Its tokens have no
        marks."""
        first = num_blocks * self.block_size
        found = sequence.partial_digests.get(first + length)
        if found is None:
            tokens = sequence.tokens_between(first, first + length)
            block = Prefix(sequence.arrival, sequence.digests[num_blocks - 1], tokens)
            self.extend([block], [1], size=length)
            found = sequence.partial_digests[first + length] = block.digests[0]
        return found


def rename(sequence: Sequence, names: BlockNaming, epoch: str) -> None:
    """Give the sequences of a request, which share blocks by name, another root."""
    members = sequence.members
    first = members[0]
    root = root_digest(first.root, epoch, "held")
    holds = any(member.row >= 0 or member.host_blocks is not None for member in members)
    if not holds:
        num = 1 if first.group is None else first.group.num_members
        root = names.root(first.request, num, first.arrival)
    for member in members:
        member.is_renamed = holds
        member.root, member.digests = root, []  # a new list: a recorder may hold the old one
        member.prefix_digests, member.partial_digests, member.found_at = {}, {}, -1
