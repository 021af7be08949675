"""KV events: report to routers which blocks the prefix cache has, in vLLM's format
(`event_encoding.py`). The publisher has its own threads; the core's thread only passes on the
changes that the index noted."""

import logging
import time
import weakref

from quire.base.clock import MonotonicClock
from quire.base.errors import ConfigError
from quire.base.messages import KeepCached
from quire.base.settings.config import EngineConfig
from quire.base.settings.kv_events import NAME, parse_kv_events
from quire.engine.attachments.event_encoding import EventMaker
from quire.engine.attachments.event_publisher import EventPublisher
from quire.engine.attachments.order import Order
from quire.engine.loop.attachment import Attachment, Given, Loop
from quire.engine.loop.core import EngineCore
from quire.engine.observability.log_throttle import ThrottledLog
from quire.scheduler.decisions import Decisions
from quire.scheduler.reuse.index_changes import IndexDelta
from quire.scheduler.scheduler import Topic

logger = logging.getLogger("quire")


class KVEvents(Attachment):
    """Attachment that publishes the changes of the scheduler's index."""

    order = Order.KV_EVENTS
    is_vital = False

    def __init__(self, publisher: EventPublisher) -> None:
        self._publisher = publisher
        self._log = ThrottledLog(MonotonicClock())
        self._has_lost = self._is_closed = False
        self._end = weakref.finalize(self, publisher.close)  # also if the core is never closed

    def hear(self, given: Given, decisions: Decisions) -> None:
        """Publish the changes of the index. After a loss, the next message makes routers forget all
        blocks, so they may know too few blocks, but never wrong ones."""
        if type(given) is KeepCached:
            self.close()
        if self._is_closed:
            return
        deltas = [note for note in decisions.notes if type(note) is IndexDelta]
        for delta in deltas:
            if self._has_lost:
                delta = delta._replace(was_cleared=True)
            self._has_lost = not self._publisher.publish((time.time(), delta))
            if self._has_lost:
                self._log.warn(
                    "lost", "KV events were lost: too many are waiting, or sending has stopped."
                )

    def close(self, loop: Loop | None = None) -> None:
        """Stop publishing, and close the sockets: routers then see that this engine has ended."""
        self._is_closed = True
        self._end()


def publish_events(core: EngineCore, config: EngineConfig, core_id: int = 0) -> None:
    """Publish the changes of a core's prefix cache, if configured. Raises ConfigError."""
    events = parse_kv_events(config.kv_events_config)
    if not events.is_on:
        return
    if not config.cache.enable_prefix_caching:
        raise ConfigError(
            f"{NAME} reports the prefix cache, which is off; remove it, or set"
            " enable_prefix_caching."
        )
    if config.scheduler.reuse_partial_blocks:
        raise ConfigError(
            f"{NAME} can describe only full blocks, but reuse_partial_blocks caches others, too;"
            " remove one of them."
        )
    kv = core.scheduler.memory.kv
    maker = EventMaker(kv.groups, kv.block_size, core_id)
    publisher = EventPublisher(events, maker.encode, core_id)
    core.scheduler.subscribe(Topic.INDEX, keeps_tokens=events.token_ids)
    core.attach(KVEvents(publisher))
    logger.info("KV events are published at %s", publisher.endpoint)
