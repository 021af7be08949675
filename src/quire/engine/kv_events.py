"""Which blocks the prefix cache has, told to routers: vLLM's KV events (`event_encoding.py`), by a
publisher with threads of its own. The core's thread only passes on what the index has noted."""

import logging
import time
import weakref

from quire.base.clock import MonotonicClock
from quire.base.config import EngineConfig
from quire.base.errors import ConfigError
from quire.base.kv_events import NAME, parse_kv_events
from quire.base.messages import Control, Request
from quire.base.plan import StepResult
from quire.engine.connectors.log_throttle import ThrottledLog
from quire.engine.core import EngineCore
from quire.engine.event_encoding import EventMaker
from quire.engine.event_publisher import EventPublisher
from quire.engine.record import Doors
from quire.scheduler.decisions import Decisions
from quire.scheduler.index_changes import IndexDelta
from quire.scheduler.scheduler import Topic

logger = logging.getLogger("quire")


class TellingDoors:
    """The doors of a scheduler, with somebody who is told what changes in its index."""

    def __init__(self, doors: Doors, publisher: EventPublisher) -> None:
        self._doors = doors
        self._publisher = publisher
        self._log = ThrottledLog(MonotonicClock())
        self._has_lost = self._is_closed = False
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
        """Tell nobody any more: whoever listens hears that this engine has gone."""
        self._is_closed = True
        self._end()

    def _tell(self, decisions: Decisions) -> Decisions:
        """Pass changes on. Once some were lost, whoever listens is to forget all that it knows:
        then it knows too little, never what is not so."""
        if decisions.notes and not self._is_closed:
            deltas = [note for note in decisions.notes if type(note) is IndexDelta]
        else:
            deltas = []
        for delta in deltas:
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
    core.scheduler.subscribe(Topic.INDEX, keeps_tokens=events.token_ids)
    core.watch(TellingDoors(core.doors, publisher))
    logger.info("KV events are published at %s", publisher.endpoint)
