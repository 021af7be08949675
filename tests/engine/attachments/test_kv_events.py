"""KV events for routers, decoded as vLLM's structs and compared with the prefix indexes.

After each call of a door, a router that receives every message knows exactly the blocks of the
device and of host memory. Random programs check this. The router can compute each name from the
events' tokens, parent block and salts.

Covers `scheduler/reuse/index_changes.py`.
"""

import json
from collections import defaultdict
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis.stateful import invariant

from benchmarks.virtual.dry_run import dry_request, dry_run
from quire.base.errors import ConfigError
from quire.base.messages import Control, Request, ResetPrefixCache
from quire.base.plan import StepResult
from quire.base.requests.media_items import MediaItem
from quire.base.settings.config import CacheConfig, EngineConfig, SchedulerConfig
from quire.engine.attachments.event_encoding import EventMaker
from quire.engine.attachments.kv_events import KVEvents, publish_events
from quire.engine.loop.attachment import Given
from quire.kv.digest import extend_digests, root_digest
from quire.kv.manager import KVManager
from quire.scheduler.core.memory import Memory
from quire.scheduler.decisions import Decisions
from quire.scheduler.reuse.index_changes import IndexDelta
from quire.scheduler.scheduler import Scheduler, Topic
from quire.serve.python.llm import LLM
from quire.serve.vllm_compat import VLLM_SETTINGS
from quire.spec.cache_group import CacheGroup
from tests.scheduler.test_scheduler_machine import (
    BLOCK,
    FULL,
    STATES,
    WINDOW,
    SchedulerMachine,
)
from tests.support.cases import slow_but
from tests.support.models.reference_checkpoints import text_checkpoint
from tests.support.scheduler.state_machines import run_machine

# ---- vLLM's side: fields, order and options as in its vllm/distributed/kv_events.py -------------


class VllmEvent(msgspec.Struct, omit_defaults=True, tag=True, forbid_unknown_fields=True):
    pass


class BlockStored(VllmEvent):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(VllmEvent):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(VllmEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(KVEventBatch)


def hash_of(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


class Router:
    """Stands in for the publisher and keeps the blocks of all messages. has_room: for more."""

    endpoint = "here"

    def __init__(self, maker: EventMaker) -> None:
        self.maker = maker
        self.has_room, self.has_missed = True, False
        self.batches: list[KVEventBatch] = []
        self.stored: dict[tuple[str, int], set[int]] = defaultdict(set)

    def publish(self, message: Any) -> bool:
        self.has_missed |= not self.has_room
        if self.has_room:
            self.take(DECODER.decode(self.maker.encode([message])))
        return self.has_room

    def close(self) -> None:
        pass

    def take(self, batch: KVEventBatch) -> None:
        self.batches.append(batch)
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.stored.clear()
                continue
            assert event.medium is not None and event.group_idx is not None
            stored = self.stored[event.medium, event.group_idx]
            hashes = set(event.block_hashes)
            assert len(hashes) == len(event.block_hashes) > 0
            if isinstance(event, BlockStored):
                assert not hashes & stored, "the block is stored already"
                stored |= hashes  # type: ignore[arg-type]
            else:
                assert hashes <= stored or self.has_missed, "the block was never stored"
                stored -= hashes  # type: ignore[arg-type]

    def check(self, kv: KVManager) -> None:
        for medium, pools in (("GPU", kv.pools), ("CPU", kv.host_pools)):
            for g, pool in enumerate(pools):
                mine = {hash_of(digest) for digest in pool._index}
                assert self.stored[medium, g] == mine, f"{medium}, group {g}"


class ObservedDoors:
    """The doors of a scheduler, with an attachment that hears their decisions."""

    def __init__(self, scheduler: Scheduler, attachment: KVEvents) -> None:
        self._scheduler, self.attachment = scheduler, attachment

    def add(self, request: Request, now: float) -> Decisions:
        return self._heard(request, self._scheduler.add(request, now))

    def control(self, message: Control, now: float) -> Decisions:
        return self._heard(message, self._scheduler.control(message, now))

    def schedule(self, now: float) -> Decisions:
        return self._heard(None, self._scheduler.schedule(now))

    def update(self, result: StepResult, now: float) -> Decisions:
        return self._heard(result, self._scheduler.update(result, now))

    def _heard(self, given: Given, decisions: Decisions) -> Decisions:
        self.attachment.hear(given, decisions)
        return decisions


def watch(scheduler: Scheduler, keeps_tokens: bool = True) -> tuple[ObservedDoors, Router]:
    kv = scheduler.memory.kv
    router = Router(EventMaker(kv.groups, kv.block_size, 3))
    scheduler.subscribe(Topic.INDEX, keeps_tokens)
    return ObservedDoors(scheduler, KVEvents(router)), router  # type: ignore[arg-type]


# ---- random programs ----------------------------------------------------------------------------


class WatchedMachine(SchedulerMachine):
    router: Router | None = None
    num_read = 0

    def make_executor(self, sizes: tuple, lazy: bool):  # type: ignore[no-untyped-def,type-arg]
        self.watching, self.router = watch(self.scheduler)
        self.digests: dict[int, bytes] = {}  # by hash, of blocks on the device
        return super().make_executor(sizes, lazy)

    @invariant()
    def knows_what_is_there(self) -> None:
        if self.router is None:
            return
        if self.watching.attachment not in self.core.attachments.all:  # no request has come yet
            self.core.attach(self.watching.attachment)
        self.router.check(self.kv)
        batches = self.router.batches[self.num_read :]
        self.num_read = len(self.router.batches)
        for event in (event for batch in batches for event in batch.events):
            if isinstance(event, BlockStored):
                self.recompute_names(event)

    def recompute_names(self, event: BlockStored) -> None:
        """Recompute the event's block names from its fields and the parent block's digest."""
        if event.medium == "CPU":
            assert event.token_ids == [] and event.parent_block_hash is None
            return
        assert len(event.token_ids) == BLOCK * len(event.block_hashes)
        if not self.kv.enable_prefix_caching or self.num_resets:
            return  # a router cannot know these roots
        salt = (event.extra_keys or [None])[0] or ("",)
        root = root_digest(b"", salt[0])
        digests = []
        if event.parent_block_hash is not None:
            assert event.extra_keys is None, "only the first block has a salt"
            known = self.digests.get(event.parent_block_hash)  # type: ignore[call-overload]
            if known is None:
                return  # the parent left the window before it was full
            digests = [known]
        tokens = np.array(event.token_ids, np.int32)
        num = len(event.block_hashes)
        if digests:  # extend_digests counts blocks from the first digest on
            tokens = np.concatenate([np.zeros(BLOCK, np.int32), tokens])
        extend_digests(digests, root, tokens, BLOCK, num + len(digests))
        assert [hash_of(digest) for digest in digests[-num:]] == event.block_hashes
        self.digests |= {hash_of(digest): digest for digest in digests}


class WatchedStates(WatchedMachine):
    groups = (STATES, FULL)


class WatchedWindows(WatchedMachine):
    groups = (WINDOW, FULL)


@pytest.mark.parametrize("max_examples", [5, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "machine",
    slow_but((WatchedMachine, WatchedWindows, WatchedStates), WatchedMachine, WatchedStates),
)
def test_router_knows_all_cached_blocks_after_every_call(machine: type, max_examples: int) -> None:
    run_machine(machine, max_examples)


# ---- single messages -----------------------------------------------------------------------------


def scheduler_of(num_blocks: int = 8, tier: bool = False) -> Scheduler:
    group = CacheGroup("full", (0,), num_kv_heads=1, head_dim=1)
    kv = KVManager((group,), (num_blocks,), BLOCK, True, host_limits=(4,) if tier else None)
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64)
    return Scheduler(Memory(kv, 64), config, 100, takes_media=True)


def finish(doors: ObservedDoors, request_id: str, prompt: list[int], **changed: Any) -> None:
    """Run a request of one token to its end."""
    request = msgspec.structs.replace(dry_request(request_id, prompt, 1), **changed)
    assert doors.add(request, 0.0).refusal is None
    plan = doors.schedule(0.0).plan
    assert plan is not None
    executor = dry_run(8, BLOCK, SchedulerConfig(2, 64), 100, True)[1]
    executor.submit(plan)
    doors.update(executor.next_result(), 0.0)


def test_stored_event_has_every_field() -> None:
    scheduler = scheduler_of()
    doors, router = watch(scheduler)
    finish(doors, "a", [*range(2 * BLOCK), 9], cache_salt="ours")
    (batch,) = router.batches
    assert batch.data_parallel_rank == 3 and batch.ts > 1.7e9
    root = root_digest(b"", "ours")
    digests: list[bytes] = []
    extend_digests(digests, root, np.arange(2 * BLOCK, dtype=np.int32), BLOCK, 2)
    assert batch.events == [
        BlockStored(
            block_hashes=[hash_of(digest) for digest in digests],
            parent_block_hash=None,
            token_ids=list(range(2 * BLOCK)),
            block_size=BLOCK,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            extra_keys=[("ours",), None],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )
    ]
    nothing = IndexDelta(False, [], [], BLOCK)
    raw = msgspec.msgpack.decode(router.maker.encode([(1.0, nothing)]))
    assert raw == [1.0, [], 3], "the batch is an array, with the data-parallel rank"


def test_tokens_salts_and_adapters_are_omitted_without_token_ids() -> None:
    doors, router = watch(scheduler_of(), keeps_tokens=False)
    finish(doors, "a", [*range(BLOCK), 9], cache_salt="secret", adapter_id="mine")
    (event,) = router.batches[0].events
    assert isinstance(event, BlockStored)
    assert event.token_ids == [] and event.extra_keys is None and event.lora_name is None
    assert len(event.block_hashes) == 1


def test_extra_keys_list_the_images_that_start_in_each_block() -> None:
    doors, router = watch(scheduler_of())
    items = [MediaItem(start, 2, bytes([start]) * 32) for start in (1, BLOCK + 1)]
    finish(doors, "a", [*range(2 * BLOCK), 9], media=tuple(items), cache_salt="ours")
    (event,) = router.batches[0].events
    assert isinstance(event, BlockStored)
    digests = [item.digest.hex() for item in items]
    assert event.extra_keys == [(digests[0], "ours"), (digests[1],)]


def test_stored_event_names_parent_block_and_adapter() -> None:
    doors, router = watch(scheduler_of())
    finish(doors, "a", [*range(BLOCK), 9], adapter_id="fox")
    finish(doors, "b", [*range(2 * BLOCK), 9], adapter_id="fox")
    first, second = (batch.events[0] for batch in router.batches)
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert second.parent_block_hash == first.block_hashes[0]
    assert second.token_ids == list(range(BLOCK, 2 * BLOCK))
    assert second.lora_name == "fox" and second.extra_keys == [("fox",)]


def test_prefix_cache_reset_is_one_event() -> None:
    scheduler = scheduler_of()
    doors, router = watch(scheduler)
    finish(doors, "a", [*range(3 * BLOCK), 9])
    doors.control(ResetPrefixCache("epoch"), 0.0)
    assert router.batches[-1].events == [AllBlocksCleared()]
    router.check(scheduler.memory.kv)


def test_lost_message_clears_the_routers_blocks() -> None:
    """The router then knows fewer blocks than are cached, never one that is not cached."""
    scheduler = scheduler_of(num_blocks=6)
    doors, router = watch(scheduler)
    finish(doors, "a", [*range(3 * BLOCK), 9])
    router.has_room = False
    finish(doors, "b", [*range(50, 50 + 4 * BLOCK), 9])  # takes a's blocks
    router.has_room = True
    finish(doors, "c", [*range(90, 90 + BLOCK), 9])
    assert isinstance(router.batches[-1].events[0], AllBlocksCleared)
    cached = {hash_of(digest) for digest in scheduler.memory.kv.pools[0]._index}
    assert 0 < len(router.stored["GPU", 0]) < len(cached)
    assert router.stored["GPU", 0] < cached


def test_index_changes_are_not_collected_without_a_subscriber() -> None:
    scheduler = scheduler_of(tier=True)
    kv = scheduler.memory.kv
    assert all(pool.changes is None for pool in (*kv.pools, *kv.host_pools))
    assert scheduler.schedule(0.0).notes == []


def test_kv_events_require_the_prefix_cache() -> None:
    config = EngineConfig(
        cache=CacheConfig(enable_prefix_caching=False),
        kv_events_config='{"enable_kv_cache_events": true}',
    )
    with pytest.raises(ConfigError, match="prefix cache"):
        publish_events(None, config)  # type: ignore[arg-type]
    assert "kv_events_config" not in VLLM_SETTINGS, "quire has this setting itself"


def test_kv_events_reject_reuse_of_partial_blocks() -> None:
    scheduler, events = SchedulerConfig(reuse_partial_blocks=True), '{"enable_kv_cache_events": %s}'
    config = EngineConfig(scheduler=scheduler, kv_events_config=events % "true")
    with pytest.raises(ConfigError, match="remove one of them"):
        publish_events(None, config)  # type: ignore[arg-type]
    off = EngineConfig(scheduler=scheduler, kv_events_config=events % "false")
    publish_events(None, off)  # type: ignore[arg-type]


# ---- a real engine ------------------------------------------------------------------------------


def test_engine_publishes_events_over_a_socket(tmp_path: Any) -> None:
    """A subscriber asks for a replay of the messages that it missed."""
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/pub",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
        "token_ids": True,
    }
    llm = LLM(str(text_checkpoint()), kv_events_config=events, block_size=BLOCK, device="cpu")
    llm.generate([{"prompt_token_ids": list(range(1, 14))}])
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(events["replay_endpoint"])
    dealer.send_multipart((b"", (0).to_bytes(8, "big")))
    assert dealer.poll(10_000)
    _, number, payload = dealer.recv_multipart()
    (event, *_) = DECODER.decode(payload).events
    assert number == bytes(8) and isinstance(event, BlockStored)
    assert event.token_ids[:BLOCK] == [1, 2, 3, 4] and event.group_idx == 0
    llm.close()
    context.destroy(linger=0)
    assert json.loads(msgspec.json.encode(events))  # a dictionary works like a JSON text


def test_changes_after_the_close_are_not_reported_as_lost(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that closes moves its cached blocks to its stores."""
    doors, router = watch(scheduler_of())
    finish(doors, "a", [*range(2 * BLOCK), 9])
    router.has_room = False
    doors.attachment.close()
    finish(doors, "b", [*range(50, 50 + 2 * BLOCK), 9])
    assert len(router.batches) == 1 and "were lost" not in caplog.text
