"""Compare copy, gather and scatter of whole blocks with torch's indexing."""

import numpy as np
import pytest
import torch

from quire.ops import gpu
from quire.ops.attention.base import KVLayout
from quire.ops.attention.kv_memory import KVMemory
from quire.ops.host.host_memory import lazy_zeros
from quire.ops.kernels.attention import blocks as kernels
from quire.ops.kernels.launch import INTERPRETED
from quire.spec.cache_group import CacheGroup

LAYOUTS = {
    "float32": ((2, 3, 2, 7, 4, 8), torch.float32, 3),
    "float16": ((2, 1, 3, 7, 4, 6), torch.float16, 3),
    "int8": ((2, 2, 1, 7, 4, 12), torch.uint8, 3),
    "fp8": ((2, 1, 1, 7, 2, 8), torch.float8_e4m3fn, 3),
    "odd_bytes": ((2, 1, 2, 7, 1, 5), torch.uint8, 3),
    "two_bytes": ((2, 1, 2, 7, 1, 5), torch.float16, 3),
    "large_blocks": ((2, 1, 1, 7, 16, 150), torch.float32, 3),
    "blocks_first": ((2, 7, 4, 3, 8), torch.float32, 1),
    "states": ((1, 3, 1, 7, 1, 5001), torch.float32, 3),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest, device: torch.device) -> tuple[torch.Tensor, int]:
    """Return a tensor of random bytes, and the dimension of its blocks."""
    shape, dtype, dim = LAYOUTS[request.param]
    size = int(np.prod(shape)) * dtype.itemsize
    values = np.random.default_rng(1).integers(0, 120, size, dtype=np.uint8)
    return torch.from_numpy(values).view(dtype).view(shape).to(device), dim


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def ids(*blocks: int, device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(blocks, dtype=dtype, device=device)


def test_copy_blocks_equals_indexing(
    layout: tuple[torch.Tensor, int], device: torch.device
) -> None:
    kv, dim = layout
    source, destination = [4, 0, 4], [1, 6, 3]
    wanted = kv.clone().movedim(dim, 0)
    wanted[destination] = wanted[source]
    pairs = torch.tensor([source, destination], dtype=torch.int32, device=device)
    kernels.copy_blocks(kv, pairs, dim)
    assert same_bits(kv, wanted.movedim(0, dim))


def test_gather_blocks_equals_indexing(
    layout: tuple[torch.Tensor, int], device: torch.device
) -> None:
    kv, dim = layout
    before = kv.clone()
    found = kernels.gather_blocks(kv, ids(5, 0, 5, device=device), dim)
    assert same_bits(found, kv.movedim(dim, 0)[[5, 0, 5]])
    assert found.is_contiguous() and same_bits(kv, before)


def test_gather_blocks_fills_the_given_memory(
    layout: tuple[torch.Tensor, int], device: torch.device
) -> None:
    kv, dim = layout
    wanted = kv.movedim(dim, 0)[[5, 0]]
    whole = torch.zeros(wanted.nbytes + 8, dtype=torch.uint8, device=device)
    out = whole[: wanted.nbytes].view(kv.dtype).view(wanted.shape)
    assert kernels.gather_blocks(kv, ids(5, 0, device=device), dim, out) is out
    assert same_bits(out, wanted) and not whole[wanted.nbytes :].any()


def test_scatter_blocks_equals_indexing(
    layout: tuple[torch.Tensor, int], device: torch.device
) -> None:
    kv, dim = layout
    wanted = kv.clone().movedim(dim, 0)
    values = wanted[[1, 2]].contiguous()
    wanted[[6, 0]] = values
    kernels.scatter_blocks(kv, ids(6, 0, device=device, dtype=torch.int64), values, dim)
    assert same_bits(kv, wanted.movedim(0, dim))


@pytest.mark.parametrize("sizes", [(1, 2**17, 2**14 + 1), (3, 2**15, 2**15 + 1)])
def test_block_offsets_may_exceed_32_bits(
    sizes: tuple[int, int, int], device: torch.device
) -> None:
    """The last block, or one of the last line, begins after 2^31 units. A unit is a byte for
    blocks of an odd size."""
    lines, last, size = sizes
    kv = lazy_zeros((1, 1, lines, last + 1, 1, size), torch.uint8, device)
    kv[..., last, :, :] = 3
    kernels.copy_blocks(kv, torch.tensor([[last], [1]], dtype=torch.int32, device=device))
    found = kernels.gather_blocks(kv, ids(1, last, 0, device=device))
    assert bool((found[:2] == 3).all()) and not found[2].any()
    kernels.scatter_blocks(kv, ids(last, device=device), found[2:])
    assert not kv[..., last, :, :].any()


def test_no_blocks_change_nothing(device: torch.device) -> None:
    kv = torch.ones(2, 1, 1, 3, 2, 4, device=device)
    kernels.copy_blocks(kv, torch.empty(2, 0, dtype=torch.int32, device=device))
    gathered = kernels.gather_blocks(kv, ids(device=device))
    assert gathered.shape == (0, 2, 1, 1, 2, 4)
    kernels.scatter_blocks(kv, ids(device=device), gathered)
    assert bool((kv == 1).all())


def test_chained_copies_use_gather_and_scatter(device: torch.device) -> None:
    """Block 1 is copied to block 2, and then overwritten by another copy."""
    source, destination = np.array([1, 0], np.int32), np.array([2, 1], np.int32)
    assert not kernels.can_copy_at_once(source, destination)
    assert kernels.can_copy_at_once(source, np.array([2, 3], np.int32))
    assert not kernels.can_copy_at_once(source, np.array([3, 3], np.int32))
    kv = torch.arange(4.0, device=device).view(1, 1, 1, 4, 1, 1).repeat(2, 1, 1, 1, 1, 4)
    values = kernels.gather_blocks(kv, torch.from_numpy(source).to(device))
    kernels.scatter_blocks(kv, torch.from_numpy(destination).to(device), values)
    assert kv[0, 0, 0, :, 0, 0].tolist() == [0.0, 0.0, 1.0, 3.0]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the kernel functions that are called; operations use them without a GPU, too."""
    if INTERPRETED:
        monkeypatch.setattr(gpu, "is_on_gpu", lambda tensor: True)
    names = []
    for real in (kernels.copy_blocks, kernels.gather_blocks, kernels.scatter_blocks):

        def call(*args: object, real=real) -> object:
            names.append(real.__name__)
            return real(*args)

        monkeypatch.setattr(kernels, real.__name__, call)
    return names


def test_copies_take_blocks_of_megabytes(device: torch.device) -> None:
    """A block has the states of 32 heads of 128 x 128, in two layers."""
    size = 32 * 128 * 128 + 3 * 8192
    group = CacheGroup("state", (0, 1), state_size=size)
    memory = KVMemory(KVLayout((group,), (4,), 16, torch.float16, device, "int8"))
    (kv,) = memory.kv
    assert kv.dtype == torch.float32
    kv[0, :, 0, 1, 0] = torch.arange(2 * size, device=device).view(2, size).float()
    kernels.copy_blocks(kv, torch.tensor([[1], [3]], dtype=torch.int32, device=device))
    assert same_bits(kv[:, :, :, 3], kv[:, :, :, 1]) and not kv[:, :, :, [0, 2]].any()


@pytest.mark.parametrize("kv_format", ["auto", "int8", "fp8"])
def test_copies_of_a_cache_group_take_one_launch(
    kv_format: str, launched: list[str], device: torch.device
) -> None:
    """Chained copies take two launches, and the last write to a block wins. Any dtype works."""
    groups = (CacheGroup("full", (0, 2), 2, 8), CacheGroup("window", (1,), 2, 8, window=4))
    memory = KVMemory(KVLayout(groups, (7, 5), 2, torch.float64, device, kv_format))
    for kv in memory.kv:
        kv.copy_((torch.arange(kv.numel(), device=device) % 251).view(kv.shape))
    before = [kv.clone() for kv in memory.kv]
    source, destination = np.array([1, 0, 1], np.int32), np.array([2, 6, 3], np.int32)
    memory.copy_blocks(0, source, destination)
    assert launched == ["copy_blocks"]
    chain = np.array([1, 0, 3], np.int32), np.array([2, 1, 2], np.int32)
    memory.copy_blocks(1, *chain)
    assert launched[1:] == ["gather_blocks", "scatter_blocks"]
    before[0][:, :, :, [2, 6, 3]] = before[0][:, :, :, [1, 0, 1]]
    before[1][:, :, :, [1, 2]] = before[1][:, :, :, [0, 3]]
    assert all(same_bits(*pair) for pair in zip(memory.kv, before, strict=True))


def test_blocks_swapped_out_and_back_keep_their_contents(device: torch.device) -> None:
    """More blocks are swapped than slots hold, and each changes right after. GPUs use streams."""
    group = CacheGroup("full", (0, 1), 8, 128)
    layout = KVLayout((group,), (160,), 64, torch.float32, device)  # blocks of 1 MiB, 16 in a part
    memory = KVMemory(layout)
    kv, rng = memory.kv[0], np.random.default_rng(1)
    kv[...] = torch.arange(160, device=device)[:, None, None]
    wanted = np.arange(160)
    for _ in range(4):
        source, host, back = (rng.permutation(160)[:150].astype(np.int32) for _ in range(3))
        memory.host.swap_out(0, source, host)
        kv.add_(1000)
        memory.host.load(0, host, back)
        away, wanted = wanted[source], wanted + 1000
        wanted[back] = away
        assert float(np.frombuffer(memory.host.read(0, int(host[0])), np.float32)[0]) == away[0]
    found = kv[:, :, :, :, 5, 3].cpu().numpy()
    assert (found == wanted).all()
