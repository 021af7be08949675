"""vLLM's logits processors, which change the logits of a whole batch, run by quire row by row.

quire calls a logits processor for one row, with the tokens and logits [V] of that row. So each
sequence has its own instance of a batch-level class, whose batch has this one row. The instance
sees the calls that vLLM makes. Before the first token, `update_state` has the added request; before
each further token, it has None. `apply` gets logits [1, V] for each token.

Shape legend: V vocabulary.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from importlib import import_module
from typing import Any

import torch

from quire.base.errors import ConfigError
from quire.vllm.configs import VllmConfig
from quire.vllm.params import SamplingParams

DEVICE = torch.device("cpu")  # where quire runs processors, for models on any device
MAX_ROWS = 1024  # sequences that one function follows at the same time
RequestLogitsProcessor = Callable[..., torch.Tensor]
NewState = Callable[[SamplingParams, list[int], list[int]], Any]


class MoveDirectionality(Enum):
    """Whether a row of a batch replaces another or changes places with it."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    """Changes of a batch, applied in this order: removed rows, added rows, moved rows."""

    batch_size: int
    removed: Sequence[int]
    # index, parameters, prompt tokens, output tokens (a list that grows)
    added: Sequence[tuple[int, SamplingParams, list[int], list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class LogitsProcessor(ABC):
    """vLLM's interface of a batch-level logits processor."""

    @classmethod  # noqa: B027  (subclasses need not define it)
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for parameters of a request that this class cannot use."""

    @abstractmethod
    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool
    ) -> None: ...

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the changed logits [num_rows, V] of the batch."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Return whether the most probable token always stays the same."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch before each step."""


class AdapterLogitsProcessor(LogitsProcessor):
    """Base of batch-level classes that call one function for each request."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, partial[torch.Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the function for a request; None if its logits stay as they are."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._bound)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, process in self.req_info.items():
            logits[index] = process(logits[index])
        return logits

    def _bound(
        self, params: SamplingParams, prompt: list[int], output: list[int]
    ) -> "partial[torch.Tensor] | None":
        process = self.new_req_logits_processor(params)
        if process is None:
            return None
        has_prompt = len(inspect.signature(process).parameters) == 3
        return partial(process, prompt, output) if has_prompt else partial(process, output)


def process_dict_updates(
    states: dict[int, Any], batch_update: BatchUpdate | None, new_state: NewState
) -> bool:
    """Follow a batch in a dictionary of states by row. Return whether the dictionary changed.

    new_state: makes the state of a request; None if it needs none."""
    if batch_update is None:
        return False
    before = dict(states)
    for index in batch_update.removed:
        states.pop(index, None)
    for index, params, prompt, output in batch_update.added:
        states.pop(index, None)
        if (state := new_state(params, prompt, output)) is not None:
            states[index] = state
    for source, target, direction in batch_update.moved:
        moved, replaced = states.pop(source, None), states.pop(target, None)
        if moved is not None:
            states[target] = moved
        if replaced is not None and direction is MoveDirectionality.SWAP:
            states[source] = replaced
    return states != before


def load_processors(given: Sequence[Any]) -> list[type[LogitsProcessor]]:
    """Return the classes, each given as a class or as `module:Class`. Raises ConfigError."""
    found = []
    for each in given:
        loaded = _imported(each) if isinstance(each, str) else each
        if not (isinstance(loaded, type) and issubclass(loaded, LogitsProcessor)):
            raise ConfigError(
                f"logits_processors has {each!r}; give subclasses of LogitsProcessor"
                " (vllm.v1.sample.logits_processor), or their names as `module:Class`."
            )
        found.append(loaded)
    return found


def _imported(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"logits_processors: {name!r} cannot be imported: {error}.") from error
    return found


@dataclass(eq=False)
class _Row:
    """One sequence. output: its output tokens, which the instance holds as well."""

    instance: LogitsProcessor
    prompt: list[int]
    output: list[int] = field(default_factory=list)


class RowProcessor:
    """A function for quire that runs a batch-level class on the sequences of one request. Requests
    of a call that share parameters share it.

    A sequence is recognised by its prompt and its output tokens, which grow by one token from call
    to call."""

    def __init__(
        self, kind: type[LogitsProcessor], config: VllmConfig, params: SamplingParams
    ) -> None:
        self._kind, self._config, self._params = kind, config, params
        self._rows: list[_Row] = []

    def __call__(self, prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Return the logits [V] of the next token."""
        instance = self._instance(prompt, output)
        if self._params.is_greedy and instance.is_argmax_invariant():
            return logits
        return instance.apply(logits.unsqueeze(0))[0]

    def _instance(self, prompt: list[int], output: list[int]) -> LogitsProcessor:
        before = output[:-1]
        for index, row in enumerate(self._rows):
            if output and row.output == before and row.prompt == prompt:
                self._rows.append(self._rows.pop(index))  # the least recently used row comes first
                row.output.append(output[-1])
                row.instance.update_state(None)
                return row.instance
        row = _Row(self._kind(self._config, DEVICE, False), prompt, list(output))
        if len(self._rows) == MAX_ROWS:
            del self._rows[0]
        self._rows.append(row)
        row.instance.update_state(BatchUpdate(1, (), [(0, self._params, prompt, row.output)], ()))
        return row.instance


def processors_for(
    kinds: Sequence[type[LogitsProcessor]], config: VllmConfig, params: SamplingParams
) -> list[RowProcessor]:
    """Return a request's functions. Raises ValueError for parameters that a class cannot use."""
    for kind in kinds:
        kind.validate_params(params)
    return [RowProcessor(kind, config, params) for kind in kinds if _concerns(kind, config, params)]


def _concerns(kind: type[LogitsProcessor], config: VllmConfig, params: SamplingParams) -> bool:
    """Return whether a class may change a request's logits. A class that makes a function for each
    request says so beforehand, so that the others cost nothing."""
    if not issubclass(kind, AdapterLogitsProcessor):
        return True
    return kind(config, DEVICE, False).new_req_logits_processor(params) is not None
