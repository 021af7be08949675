"""Executor that runs each plan on all rank processes and returns one result per plan.

    core     plan N ->  all ranks                 result N (of the first rank of the last stage)
    rank 0           |        step N              | Done, with the result
    rank 1           |        step N              | Done

A step is complete once all ranks have answered. If it failed on all ranks, no row has advanced on
any of them, and the core may repeat the step in parts. If it failed on some ranks only, the rows of
the ranks differ, and the engine ends.

With several stages, all stages after a failed one must fail too; stages before it may succeed, and
the step counts as failed (runner/stage.py). Within a stage, all ranks fail or none.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from quire.base.errors import EngineError, RankLost
from quire.base.masks import MaskPromise
from quire.base.plan import DraftAnswer, DraftOrder, Plan, StepResult
from quire.base.step_progress import StepProgress
from quire.engine.observability.heartbeat import StepLimit
from quire.engine.observability.rank_times import RankTimes
from quire.engine.ranks.messages import (
    AdapterLoaded,
    Beat,
    CloseStores,
    Done,
    Drafted,
    FromRank,
    Idle,
    Idled,
    LoadAdapter,
    Masks,
    Order,
    Step,
    StoreAnswers,
    StoreOrders,
    StoresClosed,
)
from quire.engine.ranks.rank_set import RankLink, RankSet
from quire.engine.ranks.rank_stores import PartedStores
from quire.engine.ranks.stragglers import StragglerWatch

DISAGREE_S = 2.0  # wait without progress, after a step's first failure, for other ranks to fail


@dataclass
class _Open:
    """Outstanding step. lacks_masks: whether its masks are still being computed. answers: by rank.
    failed_s: time of the first failure; 0.0 without one."""

    lacks_masks: bool = False
    answers: dict[int, Done] = field(default_factory=dict)
    failed_s: float = 0.0

    def failed(self) -> list[int]:
        return [rank for rank, answer in self.answers.items() if answer.error is not None]


class RankExecutor:
    """Executor that runs plans on rank processes. num_ranks: ranks of all num_stages. idles:
    whether ranks have work for idle moments. expected_s: time of a large step."""

    def __init__(
        self,
        processes: RankSet,
        num_ranks: int,
        copy_bytes_per_s: float,
        *,
        num_stages: int = 1,
        idles: bool = False,
        expected_s: float = 0.0,
    ) -> None:
        limit = StepLimit(expected_s)
        self.steps = RankSteps(processes.link, num_ranks, num_stages, limit, idles=idles)
        self._processes, self._num_stages = processes, num_stages
        self._copy_bytes_per_s = copy_bytes_per_s
        self._num_submitted = self._num_unanswered = 0

    @property
    def progress(self) -> StepProgress:
        """Receiver of reports that ranks make progress within a step."""
        return self.steps.progress

    @property
    def times(self) -> list[RankTimes]:
        """Step times by rank so far."""
        return self.steps.times

    def start(self, on_result: Callable[[], None]) -> None:
        self.steps.on_result = on_result

    def copy_bytes_per_s(self) -> float:
        return self._copy_bytes_per_s

    def submit(self, plan: Plan, masks: MaskPromise | None = None) -> None:
        number, is_first = self._num_submitted, self._num_unanswered == 0
        self._num_submitted += 1
        self._num_unanswered += 1
        steps = self.steps
        steps.begin(Step(number, plan, is_first, masks is not None))
        if masks is not None:
            masks.then(lambda made: steps.give_masks(Masks.of(number, made)))

    def is_ready(self) -> bool:
        return not self.steps.results.empty()

    def next_result(self) -> StepResult:
        found = self.steps.results.get()
        if isinstance(found, RankLost):
            self.steps.results.put(found)  # further calls raise it too
            raise found
        self._num_unanswered -= 1
        return found

    def draft(self, order: DraftOrder) -> DraftAnswer:
        """Run an order on the ranks' draft models and wait for the draft tokens. Raises RankLost if
        a rank is lost, EngineError if drafting failed."""
        self.steps.order(Order(order))
        found = self.steps.draft_answers.get()
        if isinstance(found, RankLost):
            raise found
        if found.error is not None:
            raise EngineError(f"drafting failed: {found.error}")
        return found.answer

    def load_adapter(self, slot: int, adapter_id: str, path: str) -> None:
        """Load an adapter into a slot of all ranks, and wait. One thread at a time may call this.
        Raises EngineError with a rank's error, or RankLost."""
        self.steps.check()
        self.steps.link.send(LoadAdapter(slot, adapter_id, path))
        errors: list[str] = []
        for _ in self.steps.times:
            found = self.steps.adapter_answers.get()
            if isinstance(found, RankLost):
                self.steps.adapter_answers.put(found)  # further calls raise it too
                raise found
            errors += [] if found.error is None else [found.error]
        if errors:
            raise EngineError(errors[0])

    def connect_stores(self, ring: Callable[[], None]) -> PartedStores:
        """Connect to the stores that all ranks have opened. ring: called when an answer has
        arrived."""
        stores = PartedStores(self.steps, len(self.steps.times), self._num_stages, ring)
        self.steps.on_stores = stores.hear
        return stores

    def close(self) -> None:
        self._processes.close()


class RankSteps:
    """State of outstanding steps, and listener of the ranks' messages. It holds no reference to the
    executor, so that garbage collection of the executor ends the ranks."""

    def __init__(
        self, link: RankLink, num_ranks: int, num_stages: int, limit: StepLimit, *, idles: bool
    ) -> None:
        self.link = link
        self.results: SimpleQueue[StepResult | RankLost] = SimpleQueue()
        self.draft_answers: SimpleQueue[Drafted | RankLost] = SimpleQueue()
        self.adapter_answers: SimpleQueue[AdapterLoaded | RankLost] = SimpleQueue()
        self.on_result: Callable[[], None] = lambda: None
        self.on_stores: Callable[[StoreAnswers | StoresClosed], None] = lambda message: None
        self.progress = StepProgress()
        self.times = [RankTimes() for _ in range(num_ranks)]
        self._of_stage = num_ranks // num_stages
        self._answering = num_ranks - self._of_stage
        self._open: dict[int, _Open] = {}  # outstanding steps by number
        self._drafting: set[int] = set()  # ranks that are still drafting
        self._stragglers = StragglerWatch(num_ranks, self._of_stage, limit, time.monotonic())
        self._lock = threading.Lock()
        self._loss: RankLost | None = None
        self._idles, self._num_idling = idles, 0

    def begin(self, step: Step) -> None:
        """Send a step to all ranks. Raises RankLost."""
        self.check()
        with self._lock:
            if not self._open:
                self._stragglers.begin(time.monotonic())
            self._open[step.number] = _Open(step.has_masks)
        self.link.send(step)

    def give_masks(self, masks: Masks) -> None:
        """Send the masks of a step, and restart its time limit: ranks no longer wait for masks."""
        with self._lock:
            if (step := self._open.get(masks.number)) is not None:
                step.lacks_masks = False
                self._stragglers.begin(time.monotonic())
        self.link.send(masks)

    def order(self, order: Order) -> None:
        """Send a drafting order to all ranks. Raises RankLost."""
        self.check()
        with self._lock:
            self._drafting = set(range(len(self.times)))
            self._stragglers.begin(time.monotonic())
        self.link.send(order)

    def send_to_stores(self, message: StoreOrders | CloseStores) -> None:
        """Send a message to the stores of all ranks. Raises RankLost."""
        self.check()
        self.link.send(message)

    def check(self) -> None:
        """Raise RankLost if a rank was lost, after which no plan can run."""
        if self._loss is not None:
            raise self._loss

    def hear(self, rank: int, message: FromRank) -> None:
        """Handle a message from a rank."""
        if isinstance(message, Done):
            self._take(rank, message)
        elif isinstance(message, Beat):
            self.times[rank].expert_pairs = message.expert_pairs
            with self._lock:
                has_moved = self._stragglers.hear(rank, message, time.monotonic())
                if has_moved and self._under_way()[1]:
                    self.progress.report()
        elif isinstance(message, Drafted):
            with self._lock:
                self._drafting.discard(rank)
                if not self._drafting:
                    self._stragglers.begin(time.monotonic())  # steps after the order start now
            if rank == self._answering:
                self.draft_answers.put(message)
        elif isinstance(message, AdapterLoaded):
            self.adapter_answers.put(message)
        elif isinstance(message, StoreAnswers | StoresClosed):
            self.on_stores(message)
        elif isinstance(message, Idled):
            self._num_idling -= 1
            self._idles = self._idles and message.has_more

    def lose(self, error: RankLost) -> None:
        """Record the loss of the ranks, and raise it in all waiting and later calls."""
        self._loss = error
        self.draft_answers.put(error)
        self.adapter_answers.put(error)
        self.results.put(error)
        self.on_result()

    def tick(self) -> None:
        """End the ranks if a step exceeds its time limit. Also end them if a step failed on some
        ranks of a stage, and the others, which may wait for these, make no progress. Otherwise let
        idle ranks use the moment."""
        now_s = time.monotonic()
        self._miss(now_s)
        with self._lock:
            steps = [
                step
                for step in self._open.values()
                if self._has_disagreement(step, is_complete=False)
                and self._stragglers.idle_s(now_s, step.failed_s, self._missing(step)) > DISAGREE_S
            ]
            is_idle = self._idles and not self._open and self._num_idling == 0
        if steps:
            self._disagree(steps[0])
        elif is_idle and self._loss is None:
            self._num_idling = len(self.times)
            self.link.send(Idle())

    def _miss(self, now_s: float) -> None:
        """End the ranks if the current step or order exceeds its limit, and name the straggler."""
        with self._lock:
            work, absent = self._under_way()
            if not absent or not self._stragglers.is_late(now_s, absent):
                return
            rank = self._stragglers.straggler(absent)
            why = self._stragglers.describe(rank, work, now_s)
        self.link.give_up(rank, why)

    def _under_way(self) -> tuple[str, set[int]]:
        """Return the current work and the ranks that have not finished it. Return no ranks if there
        is no work, or while they wait for masks."""
        if self._drafting:
            return "guessing", self._drafting
        for number, step in self._open.items():
            if step.lacks_masks:
                break
            return f"step {number}", self._missing(step)
        return "", set()

    def _missing(self, step: _Open) -> set[int]:
        """Return the ranks without an answer to a step."""
        return set(range(len(self.times))) - step.answers.keys()

    def _take(self, rank: int, answer: Done) -> None:
        with self._lock:
            step = self._open[answer.number]
            step.answers[rank] = answer
            is_complete = len(step.answers) == len(self.times)
            if is_complete:
                del self._open[answer.number]
                self._stragglers.end(time.monotonic())
            elif answer.error is not None:
                step.failed_s = step.failed_s or time.monotonic()
        times = self.times[rank]
        times.num_steps += 1
        times.seconds += answer.duration_s
        if is_complete:
            self._finish(step)

    def _finish(self, step: _Open) -> None:
        """Queue the result of a step that all ranks have answered."""
        if self._has_disagreement(step, is_complete=True):
            self._disagree(step)
            return
        answer = step.answers[self._answering]
        has_lost = any(each.lost_swaps for each in step.answers.values())
        result = answer.result.replace(lost_swaps=has_lost)
        if failed := step.failed():
            result = result.replace(error=step.answers[min(failed)].error)
        self.results.put(result)
        self.on_result()

    def _has_disagreement(self, step: _Open, *, is_complete: bool) -> bool:
        """Return whether a step failed on some ranks of the first failing stage but not on all. If
        all ranks have answered (is_complete), later stages must have failed too."""
        failed = step.failed()
        if not failed:
            return False
        first = min(failed) // self._of_stage * self._of_stage
        end = len(self.times) if is_complete else first + self._of_stage
        return not set(range(first, end)) <= set(failed)

    def _disagree(self, step: _Open) -> None:
        rank = step.failed()[0]
        self.link.give_up(rank, f"failed on a step, and not all did: {step.answers[rank].error}")
