"""A plug-in: cancels a tenant's request once the tenant has got more tokens than allowed."""

from collections import Counter
from collections.abc import Sequence

from quire.base.messages import Cancel, Control, Request
from quire.engine.client.output import StepReader
from quire.engine.loop.attachment import Attachment, Given, Pending
from quire.scheduler.decisions import Decisions


class TokenLimit(Attachment):
    """max_tokens: of all requests of a tenant together."""

    is_vital = False

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens: Counter[str] = Counter()  # by tenant
        self._max_tokens = max_tokens
        self._tenants: dict[str, str] = {}  # by request id
        self._reader = StepReader()
        self._late: list[Control] = []

    @property
    def pending(self) -> Pending:
        return Pending(has_answers=bool(self._late))

    def hear(self, given: Given, decisions: Decisions) -> None:
        if isinstance(given, Request) and decisions.refusal is None:
            self._tenants[given.request_id] = given.tenant
        for name, _ in self._reader.tokens(decisions.outputs):
            self._count(name.request_id, 1)
        for update in decisions.outputs.details:
            self._count(update.request_id, len(update.token_ids))
        for update, _ in decisions.outputs.finished:
            self._tenants.pop(update.request_id, None)

    def answers(self, now: float) -> Sequence[Control]:
        late, self._late = self._late, []
        return late

    def _count(self, request_id: str, num_tokens: int) -> None:
        tenant = self._tenants.get(request_id, "")
        self.num_tokens[tenant] += num_tokens
        if self.num_tokens[tenant] > self._max_tokens:
            self._late.append(Cancel(request_id))
