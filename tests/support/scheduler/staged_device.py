"""A device of several stages for scheduler tests. Each is a `FakeDevice` with its own blocks; only
the last one samples. Each stage hands its view of a row's tokens to the next one, which must agree.

The first stages run a plan when they get it. The last one runs it when its result is requested, or
all stages do then.
"""

from dataclasses import dataclass

from quire.base.masks import MaskPromise
from quire.base.plan import Plan, StepResult
from quire.engine.executors.executor import failed_step
from tests.support.scheduler.fake_device import CursedStep, FakeDevice, QueueExecutor

Handed = dict[int, list[int]]  # of each row, the contents of its tokens


class Stage(FakeDevice):
    """The last stage, or base of `EarlierStage`. A curse raises on one of the stages."""

    stage, num_stages = 0, 1

    def handed(self, plan: Plan) -> Handed:
        """Return the contents that the last plan handed over, without drafts."""
        columns = plan.rows, plan.computed_bound, plan.last_positions + 1
        spans = zip(*(column.tolist() for column in columns), strict=True)
        return {row: [self._content(row, p) for p in range(a, b)] for row, a, b in spans}

    def _raise_if_cursed(self, step_id: int, spans: list[tuple[int, int, int]]) -> None:
        here = [span for span in spans if self.seeds[span[0]] % self.num_stages == self.stage]
        super()._raise_if_cursed(step_id, here)


class EarlierStage(Stage):
    def run(self, plan: Plan, masks: MaskPromise | None = None) -> StepResult:
        """Take the tokens sampled since, and compute; nothing is sampled here."""
        self._apply(plan)
        columns = plan.rows, plan.last_positions, plan.last_ids, plan.computed_bound
        for row, position, token, bound in zip(*(c.tolist() for c in columns), strict=True):
            assert bound <= position <= len(self.tokens[row]), "tokens that no plan has passed on"
            self.tokens[row][position : position + 1] = [token]
            self.computed[row] = bound
        for draft in plan.drafts:
            known = self.computed[draft.row] + 1
            self.tokens[draft.row][known:] = draft.token_ids.tolist()
        ends = (plan.computed_bound + plan.num_tokens).tolist()
        spans = list(zip(plan.rows.tolist(), plan.computed_bound.tolist(), ends, strict=True))
        known = (plan.last_positions + 1).tolist()
        for span, end in zip(spans, known, strict=True):
            self._write(*span, end, span[0] in plan.sample_rows)
        for (row, start, end), last in zip(spans, known, strict=True):
            self._is_garbled(row, start, end, last)
            self.computed[row] = end
        self._raise_if_cursed(plan.step_id, spans)
        for fork in plan.new_forks:
            self.computed[fork.child] = self.computed[fork.parent]
        return failed_step(plan, "nothing is sampled here")


@dataclass
class Work:
    """A plan in flight. stage: the next stage; error: of an earlier stage."""

    plan: Plan
    masks: MaskPromise | None
    stage: int = 0
    handed: Handed | None = None
    error: str | None = None
    result: StepResult | None = None


class StagedExecutor(QueueExecutor):
    """ahead: number of stages that run a plan when it is submitted."""

    def __init__(self, stages: list[Stage], ahead: int) -> None:
        super().__init__()
        self.stages, self._ahead = stages, ahead
        self._has_failed = [False] * len(stages)

    def submit(self, plan: Plan, masks: MaskPromise | None = None) -> None:
        if not self._queue:
            self._has_failed = [False] * len(self.stages)
        self._queue.append(Work(plan, masks))
        self._go_on(self._queue[-1], self._ahead)

    def next_result(self) -> StepResult:
        work: Work = self._queue.popleft()
        self._go_on(work, len(self.stages))
        if work.error is not None:
            return failed_step(work.plan, work.error)
        assert work.result is not None
        return work.result

    def _go_on(self, work: Work, end: int) -> None:
        for number in range(work.stage, end):
            work.stage, stage = number + 1, self.stages[number]
            if self._has_failed[number]:
                work.error = work.error or "a step before it failed"
            if work.error is None:
                try:
                    work.result = stage.run(work.plan, work.masks)
                except CursedStep as error:
                    work.error = str(error)
            self._has_failed[number] |= work.error is not None
            if work.error is None:
                handed = stage.handed(work.plan)
                assert work.handed in (None, handed), "stages disagree about their rows"
                work.handed = handed
