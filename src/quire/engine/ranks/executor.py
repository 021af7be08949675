"""An executor whose plans are carried out by the processes of ranks.

    core     plan N ->  all ranks                 result N (of the first rank of the last stage)
    rank 0           |        step N              | Done, with the result
    rank 1           |        step N              | Done

A step counts when all ranks have done it, and has failed when it failed on all: then no row has
moved anywhere, and it may be repeated in parts. Where it failed on some, their rows are no longer
equal, and the engine ends.

Of several stages those behind one that failed fail as well, and those before it may not: the step
has failed then (runner/stage.py). Within a stage, all do or none.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from quire.base.errors import EngineError, RankLost
from quire.base.masks import MaskPromise
from quire.base.plan import DraftAnswer, DraftOrder, Plan, StepResult
from quire.base.step_progress import StepProgress
from quire.engine.observability.heartbeat import StepLimit
from quire.engine.observability.rank_times import RankTimes
from quire.engine.ranks.lateness import Lateness
from quire.engine.ranks.messages import (
    Beat,
    Done,
    FromRank,
    Guessed,
    Idle,
    Idled,
    Masks,
    Order,
    Step,
)
from quire.engine.ranks.rank_set import RankLink, RankSet

DISAGREE_S = 2.0  # without progress after the first failure on a step: the others do not fail


@dataclass
class _Open:
    """A step that was handed over. lacks_masks: they are still made. answers: by rank. failed_s:
    when the first one failed."""

    lacks_masks: bool = False
    answers: dict[int, Done] = field(default_factory=dict)
    failed_s: float = 0.0

    def failed(self) -> list[int]:
        return [rank for rank, answer in self.answers.items() if answer.error is not None]


class RankExecutor:
    """num_ranks: of num_stages; the first of the last stage gives the results. idles: they have
    something to do in idle moments. expected_s: what a large step takes."""

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
        self._processes = processes
        self._copy_bytes_per_s = copy_bytes_per_s
        self._num_submitted = self._num_unanswered = 0

    @property
    def progress(self) -> StepProgress:
        """What tells that ranks make progress within a step."""
        return self.steps.progress

    @property
    def times(self) -> list[RankTimes]:
        """What the ranks' steps took so far."""
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
            self.steps.results.put(found)  # and so it stays
            raise found
        self._num_unanswered -= 1
        return found

    def draft(self, order: DraftOrder) -> DraftAnswer:
        """Let the ranks' models guess; waits for it. Raises EngineError."""
        self.steps.order(Order(order))
        found = self.steps.guesses.get()
        if isinstance(found, RankLost):
            raise found
        if found.error is not None:
            raise EngineError(f"drafting failed: {found.error}")
        return found.answer

    def close(self) -> None:
        self._processes.close()


class RankSteps:
    """The side of the thread that hears the ranks: it must not hold the executor, whose end is
    theirs."""

    def __init__(
        self, link: RankLink, num_ranks: int, num_stages: int, limit: StepLimit, *, idles: bool
    ) -> None:
        self.link = link
        self.results: SimpleQueue[StepResult | RankLost] = SimpleQueue()
        self.guesses: SimpleQueue[Guessed | RankLost] = SimpleQueue()
        self.on_result: Callable[[], None] = lambda: None
        self.progress = StepProgress()
        self.times = [RankTimes() for _ in range(num_ranks)]
        self._of_stage = num_ranks // num_stages
        self._answering = num_ranks - self._of_stage
        self._open: dict[int, _Open] = {}  # by number
        self._unguessed: set[int] = set()  # ranks that still carry out an order
        self._lateness = Lateness(num_ranks, self._of_stage, limit, time.monotonic())
        self._lock = threading.Lock()
        self._loss: RankLost | None = None
        self._idles, self._num_idling = idles, 0

    def begin(self, step: Step) -> None:
        """Hand a step over. Raises RankLost."""
        self.check()
        with self._lock:
            if not self._open:
                self._lateness.begin(time.monotonic())
            self._open[step.number] = _Open(step.has_masks)
        self.link.send(step)

    def give_masks(self, masks: Masks) -> None:
        """Hand over the masks of a step, which can go on."""
        with self._lock:
            if (step := self._open.get(masks.number)) is not None:
                step.lacks_masks = False
                self._lateness.begin(time.monotonic())
        self.link.send(masks)

    def order(self, order: Order) -> None:
        """Let the ranks' models guess. Raises RankLost."""
        self.check()
        with self._lock:
            self._unguessed = set(range(len(self.times)))
            self._lateness.begin(time.monotonic())
        self.link.send(order)

    def check(self) -> None:
        """Raise RankLost if nothing can be carried out any more."""
        if self._loss is not None:
            raise self._loss

    def hear(self, rank: int, message: FromRank) -> None:
        """Take what a rank says."""
        if isinstance(message, Done):
            self._take(rank, message)
        elif isinstance(message, Beat):
            self.times[rank].expert_pairs = message.expert_pairs
            with self._lock:
                has_moved = self._lateness.hear(rank, message, time.monotonic())
                if has_moved and self._under_way()[1]:
                    self.progress.tell()
        elif isinstance(message, Guessed):
            with self._lock:
                self._unguessed.discard(rank)
                if not self._unguessed:
                    self._lateness.begin(time.monotonic())  # for what waits behind it
            if rank == self._answering:
                self.guesses.put(message)
        elif isinstance(message, Idled):
            self._num_idling -= 1
            self._idles = self._idles and message.has_more

    def lose(self, error: RankLost) -> None:
        """Nothing can be carried out any more."""
        self._loss = error
        self.guesses.put(error)
        self.results.put(error)
        self.on_result()

    def tick(self) -> None:
        """Give up where not all failed on a step on which one did, since others may wait for it,
        and where a step does not end; use an idle moment."""
        now_s = time.monotonic()
        self._miss(now_s)
        with self._lock:
            steps = [
                step
                for step in self._open.values()
                if self._is_torn(step, is_complete=False)
                and self._lateness.idle_s(now_s, step.failed_s, self._absent(step)) > DISAGREE_S
            ]
            is_idle = self._idles and not self._open and self._num_idling == 0
        if steps:
            self._disagree(steps[0])
        elif is_idle and self._loss is None:
            self._num_idling = len(self.times)
            self.link.send(Idle())

    def _miss(self, now_s: float) -> None:
        """Give up where a rank keeps what is under way from ending."""
        with self._lock:
            what, absent = self._under_way()
            if not absent or not self._lateness.is_late(now_s, absent):
                return
            rank = self._lateness.who(absent)
            why = self._lateness.tell(rank, what, now_s)
        self.link.give_up(rank, why)

    def _under_way(self) -> tuple[str, set[int]]:
        """Return what the ranks do now, and who has not done it yet; nobody, if they have to
        wait."""
        if self._unguessed:
            return "guessing", self._unguessed
        for number, step in self._open.items():
            if step.lacks_masks:
                break
            return f"step {number}", self._absent(step)
        return "", set()

    def _absent(self, step: _Open) -> set[int]:
        """Return the ranks that have not answered a step."""
        return set(range(len(self.times))) - step.answers.keys()

    def _take(self, rank: int, answer: Done) -> None:
        with self._lock:
            step = self._open[answer.number]
            step.answers[rank] = answer
            is_complete = len(step.answers) == len(self.times)
            if is_complete:
                del self._open[answer.number]
                self._lateness.end(time.monotonic())
            elif answer.error is not None:
                step.failed_s = step.failed_s or time.monotonic()
        times = self.times[rank]
        times.num_steps += 1
        times.seconds += answer.duration_s
        if is_complete:
            self._finish(step)

    def _finish(self, step: _Open) -> None:
        """Pass on what all ranks have answered."""
        if self._is_torn(step, is_complete=True):
            self._disagree(step)
            return
        answer = step.answers[self._answering]
        has_lost = any(each.lost_swaps for each in step.answers.values())
        result = replace(answer.result, lost_swaps=has_lost)
        if failed := step.failed():
            result = replace(result, error=step.answers[min(failed)].error)
        self.results.put(result)
        self.on_result()

    def _is_torn(self, step: _Open, *, is_complete: bool) -> bool:
        """Tell whether ranks of a stage have done a step, or do it still, that failed on others of
        it, or have done it behind a stage on which it failed. is_complete: all have answered."""
        failed = step.failed()
        if not failed:
            return False
        first = min(failed) // self._of_stage * self._of_stage
        end = len(self.times) if is_complete else first + self._of_stage
        return not set(range(first, end)) <= set(failed)

    def _disagree(self, step: _Open) -> None:
        rank = step.failed()[0]
        self.link.give_up(rank, f"failed on a step, and not all did: {step.answers[rank].error}")
