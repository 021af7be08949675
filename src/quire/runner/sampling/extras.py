"""Rare sampling features without a kernel: DRY, XTC and logits processors.

A step with such a row is not recorded. DRY and processors work on the host, between the halves of a
step. The tokens of these rows (and logits, for processors) are copied to the host, and the changes
are copied back. XTC works on the device. A step without such a row pays nothing.

Processors are functions of requests or plug-ins. They can harm only their own request: each runs on
a thread of its own, for a bounded time, and what it returns is checked.

Shape legend: N sampling rows, H of them that the host inspects, P with processors, V vocabulary.
"""

import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.base.plan import RowStart
from quire.base.plugins import LOGITS_PROCESSORS, load_plugin, short_name
from quire.base.requests.sampling_params import SamplingParams, processor_name
from quire.ops.host.host_memory import to_device
from quire.ops.rows.row_state import RowTensors
from quire.ops.rows.step_inputs import SampleInputs
from quire.ops.sampling.choice import Filters, Streams
from quire.ops.sampling.dry import Dry, dry_penalties
from quire.ops.sampling.xtc import Xtc, choose_with_xtc
from quire.runner.attachment import SamplingFeature, SamplingPart
from quire.runner.step_ops import Needs, Sampling, SamplingRequests
from quire.runner.torch_ops import wide

Int32 = npt.NDArray[np.int32]
LIMIT_S = 1.0  # of all processors of a row in a step
MAX_STUCK = 8  # abandoned threads

Tokens = list[int]
Processor = Callable[[Tokens, Tokens, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Extra:
    """Requested extras of a row."""

    row: int
    params: SamplingParams
    dry: Dry | None
    processors: "RowProcessors | None"


class Extras(SamplingFeature):
    """Sampling feature for DRY, XTC and logits processors: the rows that request them."""

    def __init__(self, state: RowTensors, processors: "LogitsProcessors") -> None:
        self._state, self._processors = state, processors
        self._rows: dict[int, Extra] = {}

    def start(self, start: RowStart) -> None:
        """See SamplingFeature."""
        params = start.params
        if params.has_dry or params.has_xtc or params.logits_processors:
            requested = params.logits_processors
            processors = RowProcessors(requested) if requested else None
            self._rows[start.row] = Extra(start.row, params, dry_of(params), processors)

    def copy(self, parent: int, child: int) -> None:
        """See SamplingFeature."""
        if (extra := self._rows.get(parent)) is not None:
            requested = (
                None if extra.processors is None else RowProcessors(extra.processors.requested)
            )
            self._rows[child] = Extra(child, extra.params, extra.dry, requested)

    def release(self, row: int) -> None:
        """See SamplingFeature."""
        self._rows.pop(row, None)

    def part_of(self, needs: Needs, requested: SamplingRequests | None) -> "StepExtras | None":
        """See SamplingFeature."""
        rows = [] if requested is None else requested.rows.tolist()
        found = {n: self._rows[row] for n, row in enumerate(rows) if row in self._rows}
        return StepExtras(self._state, self._processors, found) if found else None


def dry_of(params: SamplingParams) -> Dry | None:
    if not params.has_dry:
        return None
    return Dry(
        params.dry_multiplier,
        params.dry_base,
        params.dry_allowed_length,
        params.dry_penalty_last_n,
        np.array(params.dry_breaker_token_ids or [], np.int32),
    )


class StepExtras(SamplingPart):
    """Extras of a step's rows, by position among the sampling rows, and the host's results."""

    def __init__(
        self, state: RowTensors, processors: "LogitsProcessors", extras: dict[int, Extra]
    ) -> None:
        self.state, self.processors, self.extras = state, processors, extras
        self.errors: dict[int, str] = {}
        self.new_logits: dict[int, npt.NDArray[np.float32]] = {}
        self.penalties: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]] = {}
        self.hosted = [n for n, each in extras.items() if each.dry or each.processors]
        self.processed = [n for n, extra in extras.items() if extra.processors is not None]

    def seen(self, logits_NV: torch.Tensor, longest: int) -> list[torch.Tensor]:
        """Return what the host inspects: tokens [H, longest], and processors' rows of logits [N,
        V]."""
        if not self.hosted:
            return []
        rows = np.array([self.extras[n].row for n in self.hosted], np.int64)
        tokens_HM = self.state.tokens_RM[to_device(rows, self.state.device), :longest]
        index = to_device(np.array(self.processed, np.int64), logits_NV.device)
        return [tokens_HM, logits_NV.index_select(0, index).float()]

    def take(self, seen: list[torch.Tensor], sampling: Sampling) -> None:
        """See SamplingPart."""
        tokens_HM, logits_PV = seen[0].numpy(), seen[1]
        positions = self.processed
        for tokens_M, n in zip(tokens_HM, self.hosted, strict=True):
            extra, text = self.extras[n], tokens_M[: sampling.lengths[n]]
            if extra.dry is not None:
                self.penalties[n] = dry_penalties(text, extra.dry)
            if extra.processors is not None:
                prompt = int(sampling.prompt_lens[n])
                self._process(n, extra, text, prompt, logits_PV[positions.index(n)])

    def _process(
        self, n: int, extra: Extra, text: Int32, prompt_len: int, logits_V: torch.Tensor
    ) -> None:
        assert extra.processors is not None
        if logits_V.isnan().any():
            return  # malformed logits: the model's fault, not the processor's
        prompt, output = text[:prompt_len].tolist(), text[prompt_len:].tolist()
        try:
            found = self.processors.run(extra.processors, prompt, output, logits_V)
        except ProcessorError as error:
            self.errors[extra.row] = f"A logits processor of this request failed: {error}"
            found = torch.full_like(logits_V, -torch.inf)
        self.new_logits[n] = found.numpy()

    def before(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] in float32, including the processors' results."""
        logits_NV = logits_NV.float()
        if self.new_logits:
            index = to_device(np.array(list(self.new_logits), np.int64), logits_NV.device)
            new_PV = to_device(np.stack(list(self.new_logits.values())), logits_NV.device)
            logits_NV.index_copy_(0, index, new_PV)
        return logits_NV

    def edited(self, logits_NV: torch.Tensor) -> None:
        """Subtract DRY's penalties from the logits [N, V], in place."""
        for n, (ids, values) in self.penalties.items():
            if len(ids):
                device = logits_NV.device
                logits_NV[n].index_add_(0, to_device(ids, device), to_device(-values, device))

    def chosen(
        self, logits_NV: torch.Tensor, ids_N: torch.Tensor, samples: SampleInputs
    ) -> torch.Tensor:
        """Choose tokens for the rows with XTC; return all rows' tokens [N]."""
        for has_filters in (False, True):
            positions = [
                n
                for n, extra in self.extras.items()
                if extra.params.has_xtc and extra.params.has_filters == has_filters
            ]
            if positions:
                index = to_device(np.array(positions, np.int64), ids_N.device)
                chosen = self._choose_some(logits_NV, samples, positions, index)
                ids_N = ids_N.index_copy(0, index, chosen)
        return ids_N

    def _choose_some(
        self,
        logits_NV: torch.Tensor,
        samples: SampleInputs,
        positions: list[int],
        index: torch.Tensor,
    ) -> torch.Tensor:
        params, device = [self.extras[n].params for n in positions], logits_NV.device

        def column(name: str, dtype: type[np.generic]) -> torch.Tensor:
            return to_device(np.array([getattr(each, name) for each in params], dtype), device)

        rows = samples.rows[index]
        seeds, sample_index = (wide(self.state, name)[rows] for name in ("seed", "sample_index"))
        streams = Streams(seeds, sample_index, samples.lengths[index])
        min_threshold = min(each.xtc_threshold for each in params)
        xtc = Xtc(
            column("xtc_probability", np.float64),
            column("xtc_threshold", np.float64),
            min_threshold,
        )
        filters = None
        if params[0].has_filters:
            top_p, min_p = column("top_p", np.float32), column("min_p", np.float32)
            filters = Filters(column("top_k", np.int64), top_p, min_p)
        temperatures = column("temperature", np.float32)
        return choose_with_xtc(logits_NV[index].float(), temperatures, streams, xtc, filters)


# ---- logits processors ---------------------------------------------------------------------------


class ProcessorError(Exception):
    """Failure of a processor; the message is for its request."""


class LogitsProcessors:
    """Logits processors of plug-ins. names: classes that requests may name, imported now. Raises
    ConfigError for a class that cannot be used."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._classes = {short_name(n): load_plugin(LOGITS_PROCESSORS, n, ()) for n in names}
        self._calls = BoundedCalls(LIMIT_S, MAX_STUCK)

    def run(
        self, processors: "RowProcessors", prompt: Tokens, output: Tokens, logits_V: torch.Tensor
    ) -> torch.Tensor:
        """Return a row's logits [V] after its processors, float32. Raises ProcessorError."""

        def work() -> torch.Tensor:
            # A copy that is not an inference tensor, so a processor may write to it.
            changed = torch.from_numpy(logits_V.numpy().copy())
            for process in processors.made(self._classes):
                changed = process(prompt, output, changed)
            return checked(changed, len(logits_V))

        return self._calls.call(work)


class RowProcessors:
    """Processors of a row, constructed at its first step. requested: as the request names them."""

    def __init__(self, requested: Sequence[Any]) -> None:
        self.requested = requested
        self._made: list[Processor] | None = None

    def made(self, classes: dict[str, type[Any]]) -> list[Processor]:
        if self._made is None:
            self._made = [_made(each, classes) for each in self.requested]
        return self._made


def _made(requested: Any, classes: dict[str, type[Any]]) -> Processor:
    function: Callable[..., torch.Tensor] = requested
    if not callable(requested):
        name, kwargs = (
            processor_name(requested),
            {} if isinstance(requested, str) else requested.get("kwargs"),
        )
        if name not in classes:
            raise ProcessorError(f"this engine has no logits processor {name!r}.")
        function = classes[name](**(kwargs or {})).process
    if len(inspect.signature(function).parameters) == 3:  # vLLM's signature with the prompt
        return function
    return lambda prompt, output, logits: function(output, logits)


def checked(changed: Any, vocab_size: int) -> torch.Tensor:
    """Return the logits [V] as float32. Raises ProcessorError for any other value."""
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
    """Runner of functions on a thread of its own; a call that exceeds its limit is abandoned."""

    def __init__(self, limit_s: float, max_stuck: int) -> None:
        self._limit_s, self._max_stuck = limit_s, max_stuck
        self._worker: _Worker | None = None
        self._stuck: list[_Worker] = []

    def call(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Call a function and return its result.
        Raises ProcessorError for any failure or timeout."""
        self._stuck = [worker for worker in self._stuck if worker.is_busy]
        if len(self._stuck) >= self._max_stuck:
            raise ProcessorError(f"{self._max_stuck} calls before it still have not ended.")
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
    """Thread for calls. After a timeout it is abandoned, and it ends when its call returns."""

    def __init__(self) -> None:
        self.is_busy = False
        self._is_left = False
        self._jobs: SimpleQueue[Callable[[], torch.Tensor] | None] = SimpleQueue()
        self._answers: SimpleQueue[torch.Tensor | BaseException] = SimpleQueue()
        # A daemon: a function that never returns must not keep the process alive.
        threading.Thread(target=self._work, name="quire-processors", daemon=True).start()

    def call(
        self, function: Callable[[], torch.Tensor], limit_s: float
    ) -> torch.Tensor | BaseException:
        """Run the function on the thread and return its result or error. Raises Empty on a timeout,
        after which the thread must not be used."""
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
