"""Which blocks the prefix cache has, told to routers: vLLM's KV events.

A message is `[time, [event, ...], number of the core]`, in msgpack; an event is a map with its
`type`, as vLLM has sent it since its PR #42892 (June 2026; it was an array before). Names of blocks
are whole numbers: the last eight bytes of a digest, as vLLM's are. A router that reads the tokens
of blocks gets them only if `token_ids` is set, and with them adapters, salts and images.
"""

import logging
import time
import weakref

import msgspec

from quire.base.cache_group import CHUNKED, FULL, LATENT, STATE, WINDOW, CacheGroup
from quire.base.clock import MonotonicClock
from quire.base.config import EngineConfig
from quire.base.errors import ConfigError
from quire.base.kv_events import NAME, parse_kv_events
from quire.base.messages import Control, Request
from quire.base.plan import StepResult
from quire.engine.connectors.log_throttle import ThrottledLog
from quire.engine.core import EngineCore
from quire.engine.event_publisher import EventPublisher
from quire.engine.record import Doors
from quire.scheduler.decisions import Decisions
from quire.scheduler.index_changes import (
    Cleared,
    IndexChange,
    IndexDelta,
    Removed,
    changes_of,
)

logger = logging.getLogger("quire")

DEVICE, HOST = "GPU", "CPU"  # vLLM's names of where blocks are, whatever the device
KINDS = {  # and of what cache groups keep
    FULL: "full_attention", LATENT: "mla_attention", WINDOW: "sliding_window",
    CHUNKED: "chunked_local_attention", STATE: "mamba",
}  # fmt: skip
HASH_BYTES = 8


class KVEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Any of them; the tag is the name of its class."""


class BlockStored(KVEvent):
    """Blocks, each behind the one before it, are there now. Of those in host memory there is no
    parent and no token."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVEvent):
    """These blocks are not there any more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVEvent):
    """No block is there any more."""


class Batch(msgspec.Struct, array_like=True, gc=False):
    """What one call of the scheduler has changed."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int


class EventMaker:
    """Makes messages of changes of the index, each with the time at which it was told."""

    def __init__(self, groups: tuple[CacheGroup, ...], block_size: int, core_id: int) -> None:
        self._groups = groups
        self._block_size = block_size
        self._core_id = core_id
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: tuple[float, IndexDelta]) -> bytes:
        """Return a message's payload."""
        at_s, delta = message
        events = [self._event(change) for change in changes_of(delta)]
        return self._encoder.encode(Batch(at_s, events, self._core_id))

    def _event(self, change: IndexChange) -> KVEvent:
        if isinstance(change, Cleared):
            return AllBlocksCleared()
        medium, hashes = HOST if change.is_on_host else DEVICE, list(map(_hash, change.digests))
        if isinstance(change, Removed):
            return BlockRemoved(hashes, medium, change.group)
        group = self._groups[change.group]
        adapter, keys = None, None
        if change.token_ids and change.request is not None:
            adapter = change.request.adapter_id or None
            keys = _extra_keys(change.request, change.parent is None, len(hashes))
        return BlockStored(
            hashes,
            None if change.parent is None else _hash(change.parent),
            change.token_ids,
            self._block_size,
            None,
            medium,
            adapter,
            keys,
            change.group,
            KINDS[group.kind],
            group.window if group.kind == WINDOW else None,
        )


class TellingDoors:
    """The doors of a scheduler, with somebody who is told what changes in its index."""

    def __init__(self, doors: Doors, publisher: EventPublisher) -> None:
        self._doors = doors
        self._publisher = publisher
        self._log = ThrottledLog(MonotonicClock())
        self._has_lost = False
        self._end = weakref.finalize(self, publisher.close)  # also of a core that nobody closes

    def add(self, request: Request, now: float) -> Decisions:
        return self._tell(self._doors.add(request, now))

    def control(self, message: Control, now: float) -> Decisions:
        return self._tell(self._doors.control(message, now))

    def schedule(self, now: float) -> Decisions:
        return self._tell(self._doors.schedule(now))

    def update(self, result: StepResult, now: float) -> Decisions:
        return self._tell(self._doors.update(result, now))

    def close(self) -> None:
        self._end()

    def _tell(self, decisions: Decisions) -> Decisions:
        """Pass changes on. Once some were lost, whoever listens is to forget all that it knows:
        then it knows too little, never what is not so."""
        delta = decisions.index_delta
        if delta is not None:
            if self._has_lost:
                delta = delta._replace(was_cleared=True)
            self._has_lost = not self._publisher.publish((time.time(), delta))
            if self._has_lost:
                self._log.warn(
                    "lost", "KV events are lost: too many wait, or none are sent any more."
                )
        return decisions


def publish_events(core: EngineCore, config: EngineConfig, core_id: int = 0) -> None:
    """Let a core tell what its prefix cache has, if that is asked for. Raises ConfigError."""
    events = parse_kv_events(config.kv_events_config)
    if not events.is_on:
        return
    if not config.cache.enable_prefix_caching:
        raise ConfigError(f"{NAME} tells of the prefix cache; leave it out, or set it on.")
    kv = core.scheduler.memory.kv
    maker = EventMaker(kv.groups, kv.block_size, core_id)
    publisher = EventPublisher(events, maker.encode, core_id)
    core.scheduler.memory.watch_index(events.token_ids)
    core.watch(TellingDoors(core.doors, publisher))
    logger.info("KV events are published at %s", publisher.endpoint)


def _hash(digest: bytes) -> int:
    return int.from_bytes(digest[-HASH_BYTES:], "big")


def _extra_keys(request: Request, is_first: bool, num_blocks: int) -> list[list[str] | None] | None:
    """Return what else the names of blocks are made of, one entry for each: it enters with the
    first block of a sequence, whose images count for all of it, and the adapter with each."""
    adapter = [request.adapter_id] if request.adapter_id else []
    salt = [request.cache_salt] if request.cache_salt else []
    first = [*request.media_ids, *adapter, *salt] if is_first else adapter
    keys = [first or None, *[adapter or None] * (num_blocks - 1)]
    return keys if any(keys) else None
