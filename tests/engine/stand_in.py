"""In the place of who guesses for an engine."""

from quire.base.messages import Draft
from quire.base.plan import Plan, StepResult
from quire.engine.drafting import Int64
from quire.scheduler.sequence import RowTable, Sequence


class StandIn:
    """Guesses nothing. num_tried: guesses that plans have tried."""

    is_idle = holds_back = is_ahead = looks_ahead = False
    num_tried = 0

    def worth(self, table: RowTable, rows: Int64) -> Int64:
        return rows

    def guess(self, sequences: list[Sequence], num_running: int) -> list[Draft]:
        return []

    def follow(self) -> None:
        pass

    def look_ahead(self, sequences: list[Sequence], num_pending: int, num_running: int) -> None:
        pass

    def planned(self, plan: Plan) -> None:
        self.num_tried += int(plan.num_drafts.sum())

    def observe(self, plan: Plan, result: StepResult) -> None:
        pass
