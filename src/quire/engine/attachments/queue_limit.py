"""The limit of requests that wait for a row (`max_num_queued_reqs`)."""

from typing import Protocol

from quire.base.errors import EngineBusy
from quire.base.messages import Request
from quire.engine.attachments.order import Order
from quire.engine.loop.attachment import Attachment, Given
from quire.scheduler.decisions import Decisions


class Waiting(Protocol):
    """Numbers that the limit reads from the scheduler."""

    @property
    def num_waiting(self) -> int: ...
    @property
    def num_free_rows(self) -> int: ...


class QueueLimit(Attachment):
    """Attachment that refuses requests while `max_num_queued` wait. Requests that arrived after the
    last plan may fill free rows, so they do not count unless that plan left requests waiting."""

    order = Order.QUEUE_LIMIT

    def __init__(self, scheduler: Waiting, max_num_queued: int) -> None:
        self._scheduler = scheduler
        self._max_num_queued = max_num_queued
        self._has_left_waiting = False  # set by the last plan

    def accept(self, request: Request) -> Request:
        limit, num_waiting = self._max_num_queued, self._scheduler.num_waiting
        room = limit + (0 if self._has_left_waiting else self._scheduler.num_free_rows)
        if num_waiting >= room:
            raise EngineBusy(
                f"too many requests are waiting already ({num_waiting}, and max_num_queued_reqs is"
                f" {limit}); try again in a moment, or raise max_num_queued_reqs."
            )
        return request

    def hear(self, given: Given, decisions: Decisions) -> None:
        if given is None:
            self._has_left_waiting = self._scheduler.num_waiting > 0
