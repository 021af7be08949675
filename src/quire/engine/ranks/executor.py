"""An executor whose plans are carried out by the processes of ranks.

    core     plan N ->  all ranks                 result N (of the first rank of the last stage)
    rank 0           |        step N              | Result
    rank 1           |        step N              | Done

A step counts when all ranks have done it, and has failed when it failed on all: then no row has
moved anywhere, and it may be repeated in parts. Where it failed on some, their rows are no longer
equal, and the engine ends.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from quire.base.draft_order import DraftAnswer, DraftOrder
from quire.base.errors import EngineError, RankLost
from quire.base.masks import MaskPromise, TokenMasks
from quire.base.plan import Plan, StepResult
from quire.engine.ranks.messages import (
    Done,
    FromRank,
    Guessed,
    Idle,
    Idled,
    Masks,
    Order,
    Result,
    Step,
)
from quire.engine.ranks.processes import RankProcesses

DISAGREE_S = 2.0  # how much later than the first one others may fail on a step


@dataclass
class RankTimes:
    """What one rank's steps took. seconds: all of them."""

    num_steps: int = 0
    seconds: float = 0.0


@dataclass
class _Open:
    """A step that was handed over. answers: by rank. failed_s: when the first one failed."""

    answers: dict[int, Result | Done] = field(default_factory=dict)
    failed_s: float = 0.0

    def failed(self) -> list[int]:
        return [rank for rank, answer in self.answers.items() if answer.error is not None]


class RankExecutor:
    """num_ranks: of which `answering` gives the results. idles: they have something to do in idle
    moments."""

    def __init__(
        self,
        processes: RankProcesses,
        num_ranks: int,
        copy_bytes_per_s: float,
        *,
        answering: int = 0,
        idles: bool = False,
    ) -> None:
        self._processes = processes
        self._copy_bytes_per_s = copy_bytes_per_s
        self._answering = answering
        self._results: SimpleQueue[StepResult | RankLost] = SimpleQueue()
        self._guesses: SimpleQueue[Guessed | RankLost] = SimpleQueue()
        self._open: dict[int, _Open] = {}  # by number
        self._lock = threading.Lock()
        self._num_submitted = self._num_unanswered = 0
        self._on_result: Callable[[], None] = lambda: None
        self._loss: RankLost | None = None
        self._idles = idles
        self._num_idling = 0
        self.times = [RankTimes() for _ in range(num_ranks)]

    # ---- the core's thread -------------------------------------------------------------------

    def start(self, on_result: Callable[[], None]) -> None:
        self._on_result = on_result

    def copy_bytes_per_s(self) -> float:
        return self._copy_bytes_per_s

    def submit(self, plan: Plan, masks: MaskPromise | None = None) -> None:
        self._check()
        number, is_first = self._num_submitted, self._num_unanswered == 0
        self._num_submitted += 1
        self._num_unanswered += 1
        with self._lock:
            self._open[number] = _Open()
        self._processes.send(Step(number, plan, is_first, masks is not None))
        if masks is not None:
            masks.then(lambda made: self._send_masks(number, made))

    def is_ready(self) -> bool:
        return not self._results.empty()

    def next_result(self) -> StepResult:
        found = self._results.get()
        if isinstance(found, RankLost):
            self._results.put(found)  # and so it stays
            raise found
        self._num_unanswered -= 1
        return found

    def draft(self, order: DraftOrder) -> DraftAnswer:
        """Let the ranks' models guess; waits for it. Raises EngineError."""
        self._check()
        self._processes.send(Order(order))
        found = self._guesses.get()
        if isinstance(found, RankLost):
            raise found
        if found.error is not None:
            raise EngineError(f"guessing failed: {found.error}")
        return found.answer

    def close(self) -> None:
        self._processes.close()

    def _check(self) -> None:
        if self._loss is not None:
            raise self._loss

    def _send_masks(self, number: int, masks: TokenMasks) -> None:
        self._processes.send(Masks.of(number, masks))

    # ---- the thread that hears the ranks -----------------------------------------------------

    def hear(self, rank: int, message: FromRank) -> None:
        """Take what a rank says."""
        if isinstance(message, Result | Done):
            self._take(rank, message)
        elif isinstance(message, Guessed):
            if rank == self._answering:
                self._guesses.put(message)
        elif isinstance(message, Idled):
            self._num_idling -= 1
            self._idles = self._idles and message.has_more

    def lose(self, error: RankLost) -> None:
        """Nothing can be carried out any more."""
        self._loss = error
        self._guesses.put(error)
        self._results.put(error)
        self._on_result()

    def _take(self, rank: int, answer: Result | Done) -> None:
        with self._lock:
            step = self._open[answer.number]
            step.answers[rank] = answer
            is_complete = len(step.answers) == len(self.times)
            if is_complete:
                del self._open[answer.number]
        times = self.times[rank]
        times.num_steps += 1
        times.seconds += answer.duration_s
        if not is_complete:
            if answer.error is not None:
                step.failed_s = step.failed_s or time.monotonic()
            return
        failed = step.failed()
        if 0 < len(failed) < len(self.times):
            self._disagree(step)
            return
        result = step.answers[self._answering]
        assert isinstance(result, Result)
        lost = any(isinstance(each, Done) and each.lost_swaps for each in step.answers.values())
        self._results.put(replace(result.result, lost_swaps=result.lost_swaps or lost))
        self._on_result()

    def tick(self) -> None:
        """Look around, some times a second: give up where not all failed on a step on which one
        did, since others may wait for it; use an idle moment."""
        late_s = time.monotonic() - DISAGREE_S
        with self._lock:
            steps = [step for step in self._open.values() if 0 < step.failed_s < late_s]
            is_idle = self._idles and not self._open and self._num_idling == 0
        if steps:
            self._disagree(steps[0])
        elif is_idle and self._loss is None:
            self._num_idling = len(self.times)
            self._processes.send(Idle())

    def _disagree(self, step: _Open) -> None:
        rank, num = step.failed()[0], len(self.times)
        error = step.answers[rank].error
        self._processes.give_up(
            f"a step failed on rank {rank} of {num} and not on all of them: {error}"
        )
