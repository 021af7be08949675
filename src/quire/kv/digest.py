"""Digests of blocks of tokens: chains of hashes that are equal in every process.

    root  = SHA-256(cache fingerprint, cache salt, adapter)
    block = H(digest of the block before it or root, int32 token ids, marks; little endian)

A mark is a token index and 32 bytes. The bytes identify what token ids cannot, such as the image
that placeholder tokens stand for. A mark holds from its index on. A block includes the marks at its
own tokens, in order. Each is encoded as its index in the block (int32), followed by the 32 bytes.

Most blocks of a long conversation are known from its last turn. `KnownRuns` remembers runs of them.
So for prompts without marks, only the blocks after the last whole known run are hashed.

H is a `BlockHash`, SHA-256 by default. The fingerprint covers H's name and everything besides the
tokens that determines a block's bytes (engine/connectors/identity.py). So processes with the same
fingerprint compute the same digests, also after a restart. Tenants with different salts never share
blocks. Python's `hash` is unsuitable: it differs between processes and can be made to collide.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import numpy.typing as npt


class HasDigest(Protocol):
    """Result of a hash function of hashlib."""

    def digest(self) -> bytes: ...  # 32 bytes


BlockHash = Callable[[bytes], HasDigest]
# Digests of consecutive blocks without marks, given the digest before them, their tokens, and the
# bytes of tokens per block. It is a faster form of a `BlockHash`.
BlockChain = Callable[[bytes, bytes, int], list[bytes]]
LITTLE_INT32 = np.dtype("<i4")
RUN_BLOCKS = 64
MAX_RUN_BYTES = 20 << 20  # of all remembered runs: 2.2 million tokens in blocks of 16 tokens
DIGEST_BYTES = 88  # of a remembered digest: a bytes object, and its place in a list
Mark = tuple[int, bytes]  # token index, and 32 bytes that identify the tokens from there on


def cache_fingerprint(*parts: str) -> bytes:
    """Return the digest of the strings that identify a cache's contents, in order."""
    return _digest_strings(b"quire-kv-2", parts)


@functools.lru_cache(maxsize=64)
def root_digest(fingerprint: bytes, salt: str = "", adapter_id: str = "") -> bytes:
    """Return the digest before a request's first block."""
    return _digest_strings(fingerprint, (salt, adapter_id))


def marks_between(marks: Iterable[Mark], first: int, last: int) -> bytes:
    """Return the encoded marks at the tokens [first, last) of a block."""
    return b"".join(
        (index - first).to_bytes(4, "little") + data
        for index, data in marks
        if first <= index < last
    )


def extend_digests(
    digests: list[bytes],
    root: bytes,
    token_ids: npt.NDArray[np.int32],
    block_size: int,
    num_blocks: int,
    block_hash: BlockHash = hashlib.sha256,
    marks: Seq[Mark] = (),
    chain: BlockChain | None = None,
) -> None:
    """Append digests in place until there are `num_blocks`, for token_ids of shape [num_tokens].
    num_tokens is at least num_blocks * block_size. marks: the marks of all tokens, in order. chain:
    a faster form of block_hash."""
    if len(digests) >= num_blocks:
        return
    parent = digests[-1] if digests else root
    first, end = len(digests) * block_size, num_blocks * block_size
    tokens, width = token_ids[first:end].astype(LITTLE_INT32, copy=False).tobytes(), 4 * block_size
    if chain is not None and not marks:
        digests += chain(parent, tokens, width)
        return
    for i in range(0, len(tokens), width):
        data = tokens[i : i + width]
        if marks:
            data += marks_between(marks, first + i // 4, first + i // 4 + block_size)
        parent = block_hash(parent + data).digest()
        digests.append(parent)


def extend_by_one(
    digests: list[bytes],
    root: bytes,
    token_ids: npt.NDArray[np.int32],
    block_hash: BlockHash = hashlib.sha256,
    chain: BlockChain | None = None,
) -> None:
    """Append the digest of the next block, without marks. token_ids: its tokens, [block_size]."""
    tokens, parent = (
        token_ids.astype(LITTLE_INT32, copy=False).tobytes(),
        digests[-1] if digests else root,
    )
    if chain is not None:
        digests += chain(parent, tokens, len(tokens))
    else:
        digests.append(block_hash(parent + tokens).digest())


class KnownRuns:
    """Digests of runs of RUN_BLOCKS blocks without marks, least recently used first.

    A run is named by the digest before it and its tokens, so equal names have equal digests.
    block_hash, chain: hash function of all runs. max_bytes: maximum memory of all runs.
    """

    def __init__(
        self,
        block_hash: BlockHash = hashlib.sha256,
        max_bytes: int = MAX_RUN_BYTES,
        chain: BlockChain | None = None,
    ) -> None:
        self._block_hash, self._chain, self._num_bytes_left = block_hash, chain, max_bytes
        self._runs: dict[tuple[bytes, bytes], list[bytes]] = {}

    def __len__(self) -> int:
        """Return the number of remembered runs."""
        return len(self._runs)

    def extend(
        self,
        digests: list[bytes],
        root: bytes,
        token_ids: npt.NDArray[np.int32],
        block_size: int,
        num_blocks: int,
        marks: Seq[Mark] = (),
    ) -> None:
        """Append digests as `extend_digests` does, for token_ids of shape [num_tokens], but hash
        only unknown runs."""
        size, block_hash, chain = block_size, self._block_hash, self._chain
        first = -(-len(digests) // RUN_BLOCKS) * RUN_BLOCKS
        if not marks and first + RUN_BLOCKS <= num_blocks:
            extend_digests(digests, root, token_ids, size, first, block_hash, (), chain)
            for end in range(first + RUN_BLOCKS, num_blocks + 1, RUN_BLOCKS):
                tokens = token_ids[(end - RUN_BLOCKS) * size : end * size]
                self._extend_by_run(digests, digests[-1] if digests else root, tokens, size)
        extend_digests(digests, root, token_ids, size, num_blocks, block_hash, marks, chain)

    def _extend_by_run(
        self, digests: list[bytes], parent: bytes, tokens: npt.NDArray[np.int32], block_size: int
    ) -> None:
        """Append the digests of a run after `parent`, and remember it as the last one used."""
        name = parent, tokens.tobytes()
        run = self._runs.pop(name, None)
        if run is None:
            run = list[bytes]()
            block_hash, chain = self._block_hash, self._chain
            extend_digests(run, parent, tokens, block_size, RUN_BLOCKS, block_hash, (), chain)
            self._num_bytes_left -= len(name[1]) + RUN_BLOCKS * DIGEST_BYTES
        digests += run
        self._runs[name] = run
        while self._num_bytes_left < 0:
            oldest = next(iter(self._runs))
            del self._runs[oldest]
            self._num_bytes_left += len(oldest[1]) + RUN_BLOCKS * DIGEST_BYTES


def _digest_strings(start: bytes, parts: Iterable[str]) -> bytes:
    """Hash each part with its length, so that different lists of parts have different digests."""
    state = hashlib.sha256(start)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little") + data)
    return state.digest()
