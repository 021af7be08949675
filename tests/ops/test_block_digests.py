"""Compare digests of blocks by the C++ core with hashlib's."""

import hashlib

import numpy as np
import pytest

from quire.kv.digest import BlockChain, extend_by_one, extend_digests
from quire.ops.host.native import chain_of, core, needed_core
from quire.scheduler.core.names import Digester

pytestmark = pytest.mark.skipif(core() is None, reason="the C++ core was not built")
RNG = np.random.default_rng(7)


def sha256_chain() -> BlockChain:
    found = chain_of(hashlib.sha256)
    assert found is not None
    return found


@pytest.mark.parametrize("block_bytes", [1, 4, 22, 23, 24, 31, 32, 64, 86, 87, 88, 1024])
def test_each_digest_equals_hashlibs(block_bytes: int) -> None:
    """The padding of a block may need a chunk of its own: 23 and 87 bytes are the last without."""
    parent, blocks = RNG.bytes(32), RNG.bytes(5 * block_bytes)
    expected, digest = [], parent
    for i in range(5):
        digest = hashlib.sha256(digest + blocks[i * block_bytes : (i + 1) * block_bytes]).digest()
        expected.append(digest)
    assert sha256_chain()(parent, blocks, block_bytes) == expected
    assert needed_core().chain_digests(parent, blocks, block_bytes, True) == expected
    assert sha256_chain()(parent, b"", block_bytes) == []


def test_other_hashes_have_no_chain() -> None:
    assert chain_of(hashlib.blake2b) is None


@pytest.mark.parametrize(
    ("parent", "num_bytes", "width"), [(31, 64, 64), (32, 65, 64), (32, 64, 0)]
)
def test_partial_blocks_are_rejected(parent: int, num_bytes: int, width: int) -> None:
    with pytest.raises(ValueError, match="whole blocks"):
        sha256_chain()(bytes(parent), bytes(num_bytes), width)


def test_block_names_are_the_same_with_and_without_the_core() -> None:
    """Runs of many blocks, single blocks, and blocks with marks, which hashlib hashes."""
    tokens, root = RNG.integers(0, 1 << 31, 2112).astype(np.int32), RNG.bytes(32)
    for marks in ((), ((70, bytes(32)),)):
        plain, fast = list[bytes](), list[bytes]()
        extend_digests(plain, root, tokens, 16, 131, marks=marks)
        Digester(chain=sha256_chain())._runs.extend(fast, root, tokens, 16, 131, marks)
        assert fast == plain
    for digests, chain in ((plain, None), (fast, sha256_chain())):
        extend_by_one(digests, root, tokens[:16], chain=chain)
    assert fast == plain and len(fast) == 132
