"""Digests of blocks of tokens: chains of hashes that mean the same in every process.

    root  = SHA-256(cache fingerprint, cache salt, adapter, media ids)
    block = H(digest of the block before it or root, int32 token ids, little endian)

H is a `BlockHash`, SHA-256 by default. The fingerprint covers what determines a block's bytes
besides its tokens, and the name of H (engine/start/identity.py). So processes with the same
fingerprint agree, also after a restart. Tenants with different salts never share. Python's `hash`
is not used: it differs between processes and can be made to collide.
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt


class HasDigest(Protocol):
    """What a hash function of hashlib returns."""

    def digest(self) -> bytes: ...  # 32 bytes


BlockHash = Callable[[bytes], HasDigest]


def cache_fingerprint(*parts: str) -> bytes:
    """Digest the strings that identify a cache's contents, in order."""
    return _digest_strings(b"quire-kv-2", parts)


def root_digest(
    fingerprint: bytes, salt: str = "", adapter_id: str = "", media_ids: Iterable[str] = ()
) -> bytes:
    """Return the digest before a request's first block."""
    return _digest_strings(fingerprint, (salt, adapter_id, *media_ids))


def extend_digests(
    digests: list[bytes],
    root: bytes,
    token_ids: npt.NDArray[np.int32],
    block_size: int,
    num_blocks: int,
    block_hash: BlockHash = hashlib.sha256,
) -> None:
    """Append in place until there are `num_blocks`; token_ids: [>= num_blocks * block_size]."""
    parent = digests[-1] if digests else root
    for i in range(len(digests), num_blocks):
        tokens = token_ids[i * block_size : (i + 1) * block_size]
        parent = block_hash(parent + tokens.astype("<i4", copy=False).tobytes()).digest()
        digests.append(parent)


def extend_by_one(
    all_digests: Iterable[list[bytes]],
    roots: Iterable[bytes],
    token_ids: npt.NDArray[np.int32],
    block_hash: BlockHash = hashlib.sha256,
) -> None:
    """Append the digest of one more block to each of N lists; token_ids: [N, block_size]."""
    data, width = token_ids.astype("<i4", copy=False).tobytes(), 4 * token_ids.shape[1]
    for i, (digests, root) in enumerate(zip(all_digests, roots, strict=True)):
        parent = digests[-1] if digests else root
        digests.append(block_hash(parent + data[i * width : (i + 1) * width]).digest())


def _digest_strings(start: bytes, parts: Iterable[str]) -> bytes:
    """Hash each part with its length, so that no two lists of parts look alike."""
    state = hashlib.sha256(start)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little") + data)
    return state.digest()
