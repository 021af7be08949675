"""Single blocks of host mirrors, which stores read and write."""

import threading

import numpy as np
import pytest
import torch

from quire.ops.blocks.host_blocks import HostBlocks

SHAPES = [((2, 3, 2, 5, 4, 8), 3), ((2, 5, 4, 2, 8), 1), ((5, 6), 0), ((3, 5), 1)]


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.int32)


def random_kv(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator)
    return values.to(torch.uint8).view(dtype).squeeze(-1)


def block_of(kv: torch.Tensor, dim: int, block: int) -> bytes:
    """Return a block's bytes, read from the tensor instead of a mirror."""
    values = kv.contiguous().view(torch.uint8).reshape(*kv.shape, kv.element_size())
    return values.select(dim, block).contiguous().numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float64])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_blocks_are_read_and_written_byte_for_byte(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype
) -> None:
    kv = random_kv(shape, dtype)
    before, host = kv.clone(), HostBlocks([kv], dim)
    host.swap_out(0, ids(1, 3), ids(4, 0))
    assert host.block_bytes(0) == kv.numel() // 5 * dtype.itemsize
    read = host.read(0, 4)
    assert len(read) == host.block_bytes(0) and bytes(read) == block_of(before, dim, 1)
    assert bytes(host.read(0, 0)) == block_of(before, dim, 3)
    assert bytes(host.read(0, 2)) == bytes(host.block_bytes(0))  # never written
    host.write(0, 2, read)
    kv.view(torch.uint8).zero_()
    host.load(0, ids(2, 0), ids(0, 1))
    assert block_of(kv, dim, 0) == block_of(before, dim, 1)
    assert block_of(kv, dim, 1) == block_of(before, dim, 3)
    assert not any(block_of(kv, dim, 2))


def test_read_returns_a_copy() -> None:
    kv = random_kv((5, 6), torch.float32)
    host = HostBlocks([kv], dim=0)
    host.swap_out(0, ids(1), ids(1))
    read = host.read(0, 1)
    before = bytes(read)
    host.write(0, 1, bytes(24))
    assert bytes(read) == before and bytes(host.read(0, 1)) == bytes(24)


def test_write_of_a_wrong_size_is_rejected_and_changes_nothing() -> None:
    kv = random_kv((2, 5, 4), torch.bfloat16)
    host = HostBlocks([kv], dim=1)
    host.swap_out(0, ids(1), ids(1))
    before = bytes(host.read(0, 1))
    for data in (b"", bytes(15), bytes(17)):
        with pytest.raises(ValueError, match=f"has 16 bytes, got {len(data)}"):
            host.write(0, 1, data)
    assert bytes(host.read(0, 1)) == before


def test_each_tensor_has_its_own_mirror() -> None:
    host = HostBlocks([torch.zeros(2, 5, 4), torch.zeros(2, 5, 3)], dim=1)
    host.write(1, 2, bytes(range(24)))
    assert not any(host.read(0, 2))
    assert bytes(host.read(1, 2)) == bytes(range(24))


def test_concurrent_stores_and_swaps_do_not_interfere() -> None:
    """They use different blocks of one mirror, which the first of them creates."""
    kv = random_kv((2, 64, 512), torch.bfloat16)
    host, errors = HostBlocks([kv], dim=1), []
    before = kv.clone()

    def store(block: int) -> None:
        for round_ in range(200):
            data = bytes([(block + round_) % 256]) * host.block_bytes(0)
            host.write(0, block, data)
            if bytes(host.read(0, block)) != data:
                errors.append(block)

    threads = [threading.Thread(target=store, args=(block,)) for block in (60, 61)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        host.swap_out(0, np.arange(32, dtype=np.int32), np.arange(20, 52, dtype=np.int32))
        kv[:, :32] = 0
        host.load(0, np.arange(20, 52, dtype=np.int32), np.arange(32, dtype=np.int32))
    for thread in threads:
        thread.join()
    assert not errors
    assert torch.equal(kv.view(torch.int16), before.view(torch.int16))
