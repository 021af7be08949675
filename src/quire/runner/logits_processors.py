"""Functions of other people that change a row's logits, called where they can do no harm but to
their own request: on a thread of its own, for a bounded time, with what they return checked."""

import inspect
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch

from quire.base.plugins import LOGITS_PROCESSORS, load_plugin
from quire.base.sampling_params import processor_name

LIMIT_S = 1.0  # of all processors of a row in a step
MOST_STUCK = 8  # threads that are left to themselves

Tokens = list[int]
Processor = Callable[[Tokens, Tokens, torch.Tensor], torch.Tensor]


class ProcessorError(Exception):
    """A processor failed; the message is for its request."""


class LogitsProcessors:
    """names: of packages' classes that requests may ask for; they are imported now. Raises
    ConfigError for one that cannot be used."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._classes = {name: load_plugin(LOGITS_PROCESSORS, name, ()) for name in names}
        self._calls = BoundedCalls(LIMIT_S, MOST_STUCK)

    def run(
        self, processors: "RowProcessors", prompt: Tokens, output: Tokens, logits_V: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits [V], float32, that a row's processors make of these. Raises
        ProcessorError."""

        def work() -> torch.Tensor:
            # A copy, which was not made in inference mode: a processor may write to it.
            changed = torch.from_numpy(logits_V.numpy().copy())
            for process in processors.made(self._classes):
                changed = process(prompt, output, changed)
            return checked(changed, len(logits_V))

        return self._calls.call(work)


class RowProcessors:
    """The processors of a row, which are made at its first step. asked: as the request has them."""

    def __init__(self, asked: Sequence[Any]) -> None:
        self.asked = asked
        self._made: list[Processor] | None = None

    def made(self, classes: dict[str, type[Any]]) -> list[Processor]:
        if self._made is None:
            self._made = [_made(each, classes) for each in self.asked]
        return self._made


def _made(asked: Any, classes: dict[str, type[Any]]) -> Processor:
    function: Callable[..., torch.Tensor] = asked
    if not callable(asked):
        name, kwargs = processor_name(asked), {} if isinstance(asked, str) else asked.get("kwargs")
        if name not in classes:
            raise ProcessorError(f"this engine has no logits processor {name!r}.")
        function = classes[name](**(kwargs or {})).process
    if _takes_prompt(function):
        return function
    return lambda prompt, output, logits: function(output, logits)


def _takes_prompt(function: Callable[..., Any]) -> bool:
    """Tell whether it takes three arguments, as vLLM does."""
    return len(inspect.signature(function).parameters) == 3


def checked(changed: Any, vocab_size: int) -> torch.Tensor:
    """Return logits as float32. Raises ProcessorError for anything else."""
    if not isinstance(changed, torch.Tensor) or not changed.is_floating_point():
        raise ProcessorError(f"it must return a tensor of logits, not {type(changed).__name__}.")
    if changed.shape != (vocab_size,):
        raise ProcessorError(
            f"it must return logits of shape ({vocab_size},), not {tuple(changed.shape)}."
        )
    found: torch.Tensor = changed.detach().to("cpu", torch.float32).contiguous()
    if (found.isnan() | (found == torch.inf)).any():
        raise ProcessorError("it returned logits that are NaN or infinity.")
    return found


class BoundedCalls:
    """Calls functions on a thread of its own; one that takes too long is left to itself."""

    def __init__(self, limit_s: float, most_stuck: int) -> None:
        self._limit_s, self._most_stuck = limit_s, most_stuck
        self._worker: _Worker | None = None
        self._stuck: list[_Worker] = []

    def call(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what it returns. Raises ProcessorError for whatever goes wrong."""
        self._stuck = [worker for worker in self._stuck if worker.is_busy]
        if len(self._stuck) >= self._most_stuck:
            raise ProcessorError(f"{self._most_stuck} calls before it still have not ended.")
        worker = self._worker = self._worker or _Worker()
        try:
            found = worker.call(function, self._limit_s)
        except Empty:
            self._stuck.append(worker)
            self._worker = None
            raise ProcessorError(f"it took more than {self._limit_s:g} s.") from None
        if isinstance(found, ProcessorError):
            raise found
        if isinstance(found, BaseException):
            raise ProcessorError(f"it raised {type(found).__name__}: {str(found)[:200]}.")
        return found


class _Worker:
    """A thread, which ends when it was left: nobody waits for its answer any more."""

    def __init__(self) -> None:
        self.is_busy = False
        self._is_left = False
        self._jobs: SimpleQueue[Callable[[], torch.Tensor] | None] = SimpleQueue()
        self._answers: SimpleQueue[torch.Tensor | BaseException] = SimpleQueue()
        # A daemon: a function that never returns must not keep the process.
        threading.Thread(target=self._work, name="quire-processors", daemon=True).start()

    def call(
        self, function: Callable[[], torch.Tensor], limit_s: float
    ) -> torch.Tensor | BaseException:
        """Raises Empty if there is no answer in time; then the thread is of no use any more."""
        self.is_busy = True
        self._jobs.put(function)
        try:
            return self._answers.get(timeout=limit_s)
        except Empty:
            self._is_left = True
            raise

    def _work(self) -> None:
        while not self._is_left and (function := self._jobs.get()) is not None:
            try:
                answer: torch.Tensor | BaseException = function()
            except BaseException as error:
                answer = error
            self.is_busy = False
            self._answers.put(answer)
