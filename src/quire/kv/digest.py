"""Digests of blocks of tokens: chains of hashes that mean the same in every process.

    root  = SHA-256(cache fingerprint, cache salt, adapter, media ids)
    block = H(digest of the block before it or root, int32 token ids, little endian)

H is a `BlockHash`, SHA-256 by default. The fingerprint covers what determines a block's bytes
besides its tokens, and the name of H (engine/start/identity.py). So processes with the same
fingerprint agree, also after a restart. Tenants with different salts never share. Python's `hash`
is not used: it differs between processes and can be made to collide.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.base.errors import ConfigError
from quire.base.plugins import BLOCK_HASHES as KIND
from quire.base.plugins import load_plugin

DIGEST_BYTES = 32


class HasDigest(Protocol):
    """What a hash function of hashlib returns."""

    def digest(self) -> bytes:
        """Return the digest of the data, DIGEST_BYTES long."""
        ...


BlockHash = Callable[[bytes], HasDigest]
HASHES: Mapping[str, BlockHash] = MappingProxyType(
    {
        "sha256": hashlib.sha256,
        "sha256_cbor": hashlib.sha256,
        "blake2b": partial(hashlib.blake2b, digest_size=DIGEST_BYTES),
    }
)


def make_block_hash(name: str) -> BlockHash:
    """Return the hash of this name. Raises ConfigError if there is none.

    A hash of another package is tried, so that what is wrong with it shows now.
    """
    if name in HASHES:
        return HASHES[name]
    found: BlockHash = load_plugin(KIND, name, HASHES)
    try:
        digests = [found(data).digest() for data in (b"one", b"one", b"other")]
    except Exception as error:
        raise ConfigError(
            f"the block hash {name!r} cannot be used: {type(error).__name__}: {error}."
        ) from error
    one, again, other = digests
    if not isinstance(one, bytes) or len(one) != DIGEST_BYTES or one != again or one == other:
        raise ConfigError(
            f"the block hash {name!r} cannot be used: `digest` must return {DIGEST_BYTES} bytes,"
            f" the same for equal data and others for other data. It gave {digests}."
        )
    return found


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
