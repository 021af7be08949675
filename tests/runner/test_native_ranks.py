"""Programs of ranks that share memory: their sums are instructions."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from quire.base.errors import RankLost
from quire.ops.attention.base import AttentionBackend, KVLayout
from quire.ops.attention.select import make_backend
from quire.ops.collective import RankGroup, all_reduce
from quire.ops.collectives.shared_group import SharedGroup
from quire.ops.collectives.thread_group import run_ranks
from quire.ops.elementwise import relu
from quire.ops.embedding import embedding, part_of_embedding
from quire.ops.host.native import core
from quire.ops.linear import linear
from quire.ops.moe import moe_experts, moe_route
from quire.ops.trace.program import Kind
from quire.ops.weights.device_weights import pack_weight
from quire.runner.native_model import NativeModel, native_or_same
from quire.runner.native_program import trace
from quire.spec.cache_group import CacheGroup
from tests.support.models.checkpoints import write_checkpoint
from tests.support.models.paged_forward import CPU, RowPart, make_step
from tests.support.models.ranks import logits_of

if core() is None:
    pytest.skip("the C++ core is not built", allow_module_level=True)

VOCAB, SIZE, INNER, RANKS = 50, 48, 64, 2


class SharedLayers:
    """Layers of a linear product whose inputs ranks share, each followed by a sum."""

    def __init__(self, group: RankGroup, packs: bool = True) -> None:
        generator = torch.Generator().manual_seed(2)
        self.table = torch.randn(VOCAB, SIZE, generator=generator)
        up, down = torch.randn(2, 3, INNER, SIZE, generator=generator) / 7
        mine = slice(group.rank * INNER // group.size, (group.rank + 1) * INNER // group.size)
        self.layers = [
            (self._pack(a[mine], packs), self._pack(b.T[:, mine], packs))
            for a, b in zip(up, down, strict=True)
        ]
        self.group = group

    @staticmethod
    def _pack(weight: torch.Tensor, packs: bool) -> torch.Tensor:
        packed = pack_weight(weight.contiguous()) if packs else weight
        return packed  # type: ignore[return-value]

    def __call__(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, backend: AttentionBackend
    ) -> torch.Tensor:
        x_TD = embedding(ids_T, self.table)
        for up, down in self.layers:
            x_TD = relu(all_reduce(linear(relu(linear(x_TD, up)), down), self.group))
        return x_TD


def backend_of(name: str) -> AttentionBackend:
    layout = KVLayout((CacheGroup("full", (0,), 1, 4, None),), (24,), 4, torch.float32, CPU)
    return make_backend(name, layout)


def run_some(model: object, backend: AttentionBackend, ids: torch.Tensor) -> torch.Tensor:
    step = make_step([RowPart(0, len(ids), (range(23),))], 4)
    backend.prepare(step)
    found: torch.Tensor = model(ids, step.positions_T, backend)  # type: ignore[operator]
    return found


def test_sums_over_ranks_are_instructions(tmp_path: Path) -> None:
    ids = torch.arange(29) % VOCAB

    def work(rank: int) -> torch.Tensor:
        group = SharedGroup(str(tmp_path / "ranks"), rank, RANKS, slot_bytes=4096, timeout_s=30)
        backend, model = backend_of("cpu"), SharedLayers(group)
        run = native_or_same(model, backend)
        assert isinstance(run, NativeModel)
        kinds = [each.kind for each in trace(model)[0].instructions]
        assert kinds.count(Kind.ALL_REDUCE) == 3
        return torch.cat([run_some(run, backend, part) for part in ids.split([20, 9])])

    with ThreadPoolExecutor(RANKS) as pool:
        first, second = pool.map(work, range(RANKS))
    assert torch.equal(first, second)
    alone = SharedGroup(str(tmp_path / "alone"), 0, 1)
    expected = run_some(SharedLayers(alone), backend_of("reference"), ids)
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "variant", ["llama_tied", "olmo2_biases", "qwen3_next", "gpt_oss", "gemma2", "opt_350m"]
)
def test_models_of_several_ranks_run_as_programs(variant: str, tmp_path: Path) -> None:
    spec = write_checkpoint(tmp_path, variant).spec
    (expected,) = run_ranks(1, lambda group: logits_of(tmp_path, spec, group))

    def work(rank: int) -> list[torch.Tensor]:
        group = SharedGroup(str(tmp_path / "ranks"), rank, RANKS, timeout_s=60)
        return logits_of(tmp_path, spec, group, torch.float32, native=True, backend="cpu")

    with ThreadPoolExecutor(RANKS) as pool:
        for found in pool.map(work, range(RANKS)):
            for one_TV, other_TV in zip(expected, found, strict=True):
                torch.testing.assert_close(other_TV.double(), one_TV, rtol=1e-4, atol=1e-4)


def test_step_fails_if_another_rank_aborts(tmp_path: Path) -> None:
    groups = [SharedGroup(str(tmp_path / "ranks"), rank, RANKS, timeout_s=30) for rank in (0, 1)]
    ids, is_traced = torch.arange(5), threading.Barrier(RANKS)

    def work(rank: int) -> None:
        backend = backend_of("cpu")
        run = native_or_same(SharedLayers(groups[rank]), backend)
        assert isinstance(run, NativeModel)
        is_traced.wait()
        if rank == 1:
            return groups[1].abort()
        with pytest.raises(RankLost, match="given up"):
            run_some(run, backend, ids)

    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(work, range(RANKS)))


class SharedExperts:
    """A mixture of four experts, two on each rank; each rank has the whole router."""

    def __init__(self, group: RankGroup) -> None:
        generator = torch.Generator().manual_seed(5)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.group, num = group, 4 // group.size
        self.table, self.router = random(VOCAB, SIZE), pack_weight(random(4, SIZE))
        self.first = None if group.size == 1 else group.rank * num
        up = [pack_weight(random(2 * INNER, SIZE) / 8) for _ in range(4)]
        down = [pack_weight(random(SIZE, INNER) / 8) for _ in range(4)]
        own = slice(group.rank * num, (group.rank + 1) * num)
        self.experts = up[own], down[own]

    def __call__(
        self, ids_T: torch.Tensor, _positions: torch.Tensor, _backend: AttentionBackend
    ) -> torch.Tensor:
        x_TD = embedding(ids_T, self.table)
        routed = moe_route(linear(x_TD, self.router), 2, True)
        out_TD = moe_experts(x_TD, *routed, *self.experts, first=self.first)
        return relu(all_reduce(out_TD, self.group))


def test_experts_of_other_ranks_are_skipped(tmp_path: Path) -> None:
    ids = torch.arange(29) % VOCAB

    def work(place: tuple[int, int]) -> tuple[torch.Tensor, int]:
        rank, size = place
        group = SharedGroup(str(tmp_path / f"of {size}"), rank, size, timeout_s=30)
        backend = backend_of("cpu")
        run = native_or_same(SharedExperts(group), backend)
        assert isinstance(run, NativeModel)
        found = torch.cat([run_some(run, backend, part) for part in ids.split([27, 1, 1])])
        return found, run.expert_pairs

    expected, all_pairs = work((0, 1))
    assert all_pairs == 2 * len(ids)
    with ThreadPoolExecutor(RANKS) as pool:
        (first, some), (second, others) = pool.map(work, [(0, 2), (1, 2)])
    assert torch.equal(first, second) and some + others == all_pairs and some and others
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-5)


def test_part_of_an_embedding_gives_zeros_for_other_ids(tmp_path: Path) -> None:
    """The table is plain or packed."""
    table, ids = torch.randn(10, SIZE), torch.tensor([3, 0, 9, 4, 5])
    for part in (table[4:8].clone(), pack_weight(table[4:8].clone())):
        backend = backend_of("cpu")
        run = native_or_same(partial(part_of, part), backend)
        assert isinstance(run, NativeModel)
        found = run_some(run, backend, ids)
        assert (found[[0, 1, 2]] == 0).all()
        torch.testing.assert_close(found[3:], table[4:6].relu(), rtol=1e-2, atol=1e-2)


def part_of(table: torch.Tensor, ids_T: torch.Tensor, *_: object) -> torch.Tensor:
    return relu(part_of_embedding(ids_T, table, 4, torch.float32))
