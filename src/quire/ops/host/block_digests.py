"""Digests of blocks of tokens, computed by the C++ core."""

import hashlib
from collections.abc import Callable

from quire.ops.host.native import core

Chain = Callable[[bytes, bytes, int], list[bytes]]  # parent, blocks, bytes per block


def chain_of(block_hash: object) -> Chain | None:
    """Return the core's function for the digests of consecutive blocks: the SHA-256 of the digest
    before a block and of its bytes. Return None without a core, or for another hash function."""
    native = core()
    return native.chain_digests if native is not None and block_hash is hashlib.sha256 else None
