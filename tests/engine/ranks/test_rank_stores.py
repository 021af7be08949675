"""Stores with ranks: each rank moves its own parts, and a block is found only if all parts are."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.clock import FakeClock
from quire.base.errors import ConfigError, EngineError, RankLost
from quire.base.kv_orders import Answer, Fetched, Kept, LookedUp, Order, Removed
from quire.base.settings.cache_config import CacheConfig
from quire.engine.attachments.stores import StoresAttachment
from quire.engine.loop.front import Attachments
from quire.engine.ranks.messages import (
    CloseStores,
    CoreDisconnected,
    Failed,
    FromRank,
    StoreAnswers,
    StoreOrders,
    StoresClosed,
    ToRank,
    core_codec,
    rank_codec,
)
from quire.engine.ranks.rank_stores import (
    PartedStores,
    RankStores,
    check_stores,
    combine,
    open_part,
)
from tests.scheduler.test_stores import Lab as StoresLab
from tests.support.engine.scenarios import COMMON
from tests.support.engine.stores import (
    PATIENCE_S,
    Memory,
    contents,
    fetch,
    keep,
    look_up,
    remove,
)
from tests.support.models.checkpoints import random_tokens
from tests.support.models.reference_checkpoints import pool_bytes, text_checkpoint
from tests.support.scheduler.fake_device import make_request

PROMPTS = [{"prompt_token_ids": tokens} for tokens in random_tokens(*[40] * 3, seed=3)]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


# ---- answers ---------------------------------------------------------------------------------


def test_block_is_found_only_if_all_ranks_have_their_part() -> None:
    parts = [LookedUp(0, "r", [True, True], 7), LookedUp(0, "r", [True, False], 7)]
    assert combine(parts, 1) == LookedUp(0, "r", [True, False], 7)
    removed = [Removed(1, 3, [False]), Removed(1, 3, [True])]
    assert combine(removed, 1) == Removed(1, 3, [False])


@pytest.mark.parametrize(("num_stages", "duration_s"), [(1, 4.0), (2, 2.0)])
def test_transfer_rate_counts_the_parts_of_one_rank(num_stages: int, duration_s: float) -> None:
    """Two ranks of one stage move 100 bytes each, and so do two stages of one rank."""
    parts = [Fetched(0, 5, [True], 100, 1.0), Fetched(0, 5, [True], 100, 3.0)]
    assert combine(parts, num_stages) == Fetched(0, 5, [True], 200, duration_s)
    kept = [Kept(0, 6, [False, True], 0, 0.5), Kept(0, 6, [True, True], 10, 0.5)]
    assert combine(kept, 1) == Kept(0, 6, [False, True], 10, 1.0)


# ---- two ranks in this process ---------------------------------------------------------------


class EarlyMemory(Memory):
    def allocate_early(self) -> None:
        pass


class Ranks:
    """Two ranks with a directory, connected through the codecs. loss: set when the ranks are
    lost."""

    def __init__(self, directory: Path) -> None:
        self.memories = [EarlyMemory(), EarlyMemory()]
        self.loss: RankLost | None = None
        self.rung: SimpleQueue[None] = SimpleQueue()
        self.stores = PartedStores(self, 2, 1, lambda: self.rung.put(None))
        cache = CacheConfig(kv_disk_dir=str(directory))
        self.ranks = [
            open_part(cache, bytes([rank]) * 32, memory, "torch", self._send)
            for rank, memory in enumerate(self.memories)
        ]

    def send_to_stores(self, message: StoreOrders | CloseStores) -> None:
        self.check()
        codec = rank_codec()
        for rank in self.ranks:
            received: ToRank = codec.decode(codec.encode(message)[4:])
            assert isinstance(received, StoreOrders | CloseStores)
            rank.put(received)

    def check(self) -> None:
        if self.loss is not None:
            raise self.loss

    def _send(self, message: FromRank) -> None:
        codec = core_codec()
        received = codec.decode(codec.encode(message)[4:])
        assert isinstance(received, StoreAnswers | StoresClosed)
        self.stores.hear(received)

    def answer(self, order: Order) -> Answer:
        self.stores.submit([order])
        assert self.stores.num_open == 1
        self.rung.get(timeout=PATIENCE_S)
        assert self.stores.has_answers
        [found] = self.stores.take(0.0)
        assert self.stores.num_open == 0
        return found


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.stores.close(5.0, FakeClock())


def fill(ranks: Ranks, *numbers: int) -> None:
    """Write blocks whose bytes differ between the ranks."""
    for rank, memory in enumerate(ranks.memories):
        memory.blocks |= {(0, i): contents(10 * rank + i) for i in numbers}


def folders(directory: Path) -> list[Path]:
    """Return the directories of the two fingerprints."""
    return sorted(path for path in (directory / "quire-kv-1").iterdir() if path.name != "tmp")


def test_each_rank_stores_and_fetches_its_own_bytes(ranks: Ranks, tmp_path: Path) -> None:
    fill(ranks, 1, 2)
    kept = ranks.answer(keep(1, 2))
    assert isinstance(kept, Kept) and kept.ok == [True, True] and kept.num_bytes == 4000
    assert len(folders(tmp_path)) == 2
    for memory in ranks.memories:
        memory.blocks.clear()
    found = ranks.answer(look_up(1, 2, 3))
    assert isinstance(found, LookedUp) and found.found == [True, True, False]
    fetched = ranks.answer(fetch(1, 2))
    assert isinstance(fetched, Fetched) and fetched.ok == [True, True]
    assert ranks.memories[0].blocks == {(0, i): contents(i) for i in (1, 2)}
    assert ranks.memories[1].blocks == {(0, i): contents(10 + i) for i in (1, 2)}


def test_block_with_a_missing_part_is_a_miss(ranks: Ranks, tmp_path: Path) -> None:
    fill(ranks, 1, 2)
    ranks.answer(keep(1, 2))
    shutil.rmtree(folders(tmp_path)[1])
    found = ranks.answer(look_up(1, 2))
    assert isinstance(found, LookedUp) and found.found == [False, False]
    fetched = ranks.answer(fetch(1, 2))
    assert isinstance(fetched, Fetched) and fetched.ok == [False, False]
    kept = ranks.answer(keep(1))
    assert isinstance(kept, Kept) and kept.ok == [True], "the missing part was not written"
    assert kept.num_bytes == 1000


def test_parts_are_removed_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    fill(ranks, 1)
    ranks.answer(keep(1))
    assert len(list(tmp_path.rglob("*.kv"))) == 2
    removed = ranks.answer(remove(1))
    assert isinstance(removed, Removed) and removed.ok == [True]
    assert not list(tmp_path.rglob("*.kv"))


def test_close_completes_the_submitted_orders(ranks: Ranks, tmp_path: Path) -> None:
    fill(ranks, *range(8))
    ranks.stores.submit([keep(*range(8))])
    ranks.stores.close(PATIENCE_S, FakeClock())
    assert len(list(tmp_path.rglob("*.kv"))) == 16
    assert ranks.stores.has_answers


def test_lost_ranks_raise_instead_of_waiting(ranks: Ranks) -> None:
    ranks.loss = RankLost("rank 1 has ended")
    ranks.stores.close(1e6, FakeClock())
    with pytest.raises(RankLost):
        ranks.stores.submit([look_up(1)])
    with pytest.raises(RankLost):
        ranks.stores.take(0.0)


class LostLink:
    """A link to a rank that ends when it gets an order."""

    def __init__(self) -> None:
        self.loss: RankLost | None = None

    def send_to_stores(self, message: StoreOrders | CloseStores) -> None:
        self.loss = RankLost("rank 1 has ended")

    def check(self) -> None:
        if self.loss is not None:
            raise self.loss


def test_engine_stops_if_a_rank_is_lost_during_a_look_up() -> None:
    """The only request waits for the look-up, so no plan reports the loss."""
    core = StoresLab().core
    stores = PartedStores(LostLink(), 2, 1, core.bell.ring)
    core.attachments = Attachments()
    core.attach(StoresAttachment(stores, FakeClock()))
    core.add(make_request("r", list(range(1, 21)), max_tokens=2))
    errors: SimpleQueue[BaseException] = SimpleQueue()

    def step() -> None:
        try:
            core.step()
        except EngineError as error:
            errors.put(error)

    threading.Thread(target=step, daemon=True).start()
    assert isinstance(errors.get(timeout=PATIENCE_S), RankLost)


def test_rank_lost_during_close_does_not_delay_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lab = StoresLab()
    lab.generate(list(range(1, 21)))
    clock, core = FakeClock(), lab.core
    core.attachments = Attachments()
    core.attach(StoresAttachment(PartedStores(LostLink(), 2, 1, core.bell.ring), clock))
    core.bell.wait = lambda timeout_s: clock.advance(timeout_s)  # type: ignore[method-assign]
    core.attachments.close(core)
    assert clock.now() < 1.0
    assert "cached blocks are not saved: rank 1 has ended" in caplog.text
    assert "did not close" not in caplog.text


def store_thread(sent: "SimpleQueue[FromRank]", error: Exception, directory: Path) -> RankStores:
    """Return the stores of a rank whose first answer raises an error."""

    def send(message: FromRank) -> None:
        sent.put(message)
        if isinstance(message, StoreAnswers):
            raise error

    settings = CacheConfig(kv_disk_dir=str(directory))
    rank: RankStores = open_part(settings, bytes(32), EarlyMemory(), "", send)
    return rank


def wait_for_end(rank: RankStores) -> None:
    rank._thread.join(PATIENCE_S)
    assert not rank._thread.is_alive()


def test_rank_stops_quietly_when_the_core_has_disconnected(tmp_path: Path) -> None:
    """Its thread ends without an error message and ignores later orders."""
    sent: SimpleQueue[FromRank] = SimpleQueue()
    rank = store_thread(sent, CoreDisconnected(), tmp_path)
    rank.put(StoreOrders([look_up(1)]))
    assert isinstance(sent.get(timeout=PATIENCE_S), StoreAnswers)
    rank.put(StoreOrders([look_up(2)]))
    wait_for_end(rank)
    assert sent.empty()


def test_core_is_notified_of_failing_stores(tmp_path: Path) -> None:
    """Otherwise requests would wait for the answers forever."""
    sent: SimpleQueue[FromRank] = SimpleQueue()
    rank = store_thread(sent, ValueError("no such block"), tmp_path)
    rank.put(StoreOrders([look_up(1)]))
    assert isinstance(sent.get(timeout=PATIENCE_S), StoreAnswers)
    failed = sent.get(timeout=PATIENCE_S)
    assert failed == Failed("EngineError", "stores: ValueError: no such block")
    wait_for_end(rank)


# ---- rejected settings -----------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["serve://0.0.0.0:7400", "peer://10.0.0.2:7400"])
def test_stores_of_a_single_process_are_rejected(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"host memory of one process.*use dir:PATH"):
        check_stores(CacheConfig(kv_store=(setting,)))
    check_stores(CacheConfig(kv_store=("dir:/tmp/x", "shm:x", "redis://here:6379")))


def test_backend_without_shared_blocks_is_rejected() -> None:
    ignore: Callable[[FromRank], None] = lambda message: None  # noqa: E731
    with pytest.raises(ConfigError, match="the attention backend 'other' does not share"):
        open_part(CacheConfig(kv_disk_dir="/tmp/x"), bytes(32), None, "'other'", ignore)
    with pytest.raises(ConfigError, match=r"which 'redis://:\*+@here:6379' needs"):
        open_part(CacheConfig(kv_store=("redis://:word@here:6379",)), bytes(32), None, "x", ignore)


# ---- engines ---------------------------------------------------------------------------------


def run(
    directory: Path | None, architecture: str = "llama", **settings: Any
) -> tuple[list[list[int]], list[int]]:
    """Serve the prompts one after the other in a new engine; return outputs and cached tokens."""
    model = text_checkpoint(architecture)
    few = {
        "kv_cache_memory_bytes": pool_bytes(model, 20, 4, 4),
        "max_model_len": 64,
        "dtype": "float32",
    }
    settings = COMMON | few | settings
    if directory is not None:
        settings |= {"kv_disk_dir": str(directory)}
    outputs = []
    with LLM(str(model), **settings) as llm:
        for prompt in PROMPTS:
            outputs += llm.generate([prompt], GREEDY, use_tqdm=False)
        llm.engine.client.core.scheduler.check_invariants()
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    return answers, [output.num_cached_tokens or 0 for output in outputs]


TWO = {"tensor_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2}
NOTHING, ALL = [0] * 3, [36] * 3


def test_only_engines_with_the_same_ranks_share_stored_blocks(tmp_path: Path) -> None:
    """Engines with another division of the model have no hits in each other's blocks."""
    wanted = run(None)[0]
    assert run(tmp_path, **TWO) == (wanted, NOTHING)
    assert run(tmp_path, **TWO) == (wanted, ALL)
    assert run(tmp_path) == (wanted, NOTHING)


@pytest.mark.parametrize(
    "layout",
    [
        STAGES,
        pytest.param(STAGES | TWO, marks=pytest.mark.slow),
        pytest.param({"kv_eager": True} | TWO, marks=pytest.mark.slow),
    ],
)
def test_each_division_of_a_model_finds_its_blocks(layout: dict[str, Any], tmp_path: Path) -> None:
    wanted = run(None)[0]
    run(tmp_path, **TWO)
    others = [] if "kv_eager" in layout else [NOTHING]
    for cached in [*others, ALL]:
        assert run(tmp_path, **layout) == (wanted, cached)


@pytest.mark.slow
def test_context_parallel_ranks_find_their_parts(tmp_path: Path) -> None:
    layout = TWO | {"decode_context_parallel_size": 2}
    wanted = run(None, "multi_query")[0]
    for cached in (NOTHING, ALL):
        assert run(tmp_path, "multi_query", **layout) == (wanted, cached)
