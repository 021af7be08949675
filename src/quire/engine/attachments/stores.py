"""Stores as an attachment: passes the scheduler's orders to the stores, and their answers back.

When the engine ends, the device's cached blocks are saved in the stores, within KEEP_AT_END_S.
"""

import logging
from collections.abc import Sequence

from quire.base.clock import Clock
from quire.base.errors import RankLost
from quire.base.kv_orders import KEEP_AT_END_S
from quire.base.messages import Abort, Control, Hold, KeepCached, Request, Unpin
from quire.engine.attachments.order import Order
from quire.engine.connectors.connections import OpenStores
from quire.engine.connectors.named_peers import NamedPeers
from quire.engine.loop.attachment import Attachment, Given, Loop, Pending
from quire.scheduler.decisions import Decisions

logger = logging.getLogger("quire")


class StoresAttachment(Attachment):
    """Attachment that has the scheduler's store orders carried out.

    names: the settings of the stores, among which requests choose peers.
    keeps_at_end: whether cached blocks are saved when the engine ends."""

    order = Order.STORES

    def __init__(
        self,
        stores: OpenStores,
        clock: Clock,
        names: Sequence[str] = (),
        keeps_at_end: bool = True,
    ) -> None:
        self.stores = stores
        self._clock = clock
        self._peers = NamedPeers(names)
        self._keeps_at_end = keeps_at_end

    @property
    def pending(self) -> Pending:
        return Pending(self.stores.has_answers, self.stores.num_open, self.stores.next_s)

    def accept(self, request: Request) -> Request:
        return self._peers.choose(request)

    def hear(self, given: Given, decisions: Decisions) -> None:
        if decisions.orders:
            self.stores.submit(decisions.orders)

    def answers(self, now: float) -> Sequence[Control]:
        return self.stores.take(now)

    def close(self, loop: Loop) -> None:
        until_s = self._clock.now() + KEEP_AT_END_S
        try:
            if self._keeps_at_end and _end_requests(loop):
                self._flush(loop, until_s)
        except RankLost as error:
            logger.warning("cached blocks are not saved: %s", error)
        self.stores.close(until_s, self._clock)

    def _flush(self, loop: Loop, until_s: float) -> None:
        """Save the device's cached blocks, in parts that fit into host memory. These plans belong
        to no request, so the loop does not track them."""
        loop.control(KeepCached())
        while True:
            while self.stores.num_open and self._clock.now() < until_s:
                loop.wait_for_answers()
            plan = loop.schedule().plan
            if plan is None or self.stores.num_open:
                return
            loop.executor.submit(plan)
            result = loop.executor.next_result()
            if result.error is not None:
                return
            loop.update(result)


def _end_requests(loop: Loop) -> bool:
    """Take the results in flight, and end all requests, pins and retained requests, so that no
    block is in use. Return whether that was possible."""
    try:
        while not loop.has_failed and loop.num_in_flight:
            loop.take()
        for found in loop.requests():
            loop.control(Abort(found.request.request_id))
        for prefix in loop.prefixes():
            loop.control(Unpin(prefix.id))
        for held in loop.held():
            loop.control(Hold(held.id, 0.0))
    except Exception as error:
        logger.warning("cached blocks are not saved: %s: %s", type(error).__name__, error)
        return False
    return not loop.has_failed
