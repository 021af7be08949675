"""Attachments that only some requests need: no step calls them before the first such request."""

import weakref
from collections.abc import Sequence

from quire.base.messages import Request
from quire.engine.attachments.order import Order
from quire.engine.loop.attachment import Attachment, Loop
from quire.engine.loop.front import Front


class OnDemand(Attachment):
    """Attachment that attaches others before the core accepts the first request with one of
    `fields`.

    It holds no strong reference to the core: an engine without references must end."""

    order = Order.GRAMMARS

    def __init__(self, core: Front, fields: Sequence[str], others: Sequence[Attachment]) -> None:
        self._core, self._fields, self.others = weakref.ref(core), fields, others

    def accept(self, request: Request) -> Request:
        if request.sets(self._fields):
            core = self._core()
            assert core is not None, "the core calls this"
            core.detach(self)
            for each in self.others:
                core.attach(each)
        return request

    def close(self, loop: Loop) -> None:
        for each in self.others:
            each.close(loop)
