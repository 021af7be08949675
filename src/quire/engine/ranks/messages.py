"""Messages between a core, its ranks and their node agents: length-prefixed msgpack of structs.

    core    Begin  PoolMinimum  Step ... Masks ... Order ... Idle ... LoadAdapter ...
            StoreOrders ... CloseStores  (stream ends: end)
    rank    Joined Loading* PoolMinimum Loaded   Done ...  Drafted ... Idled  AdapterLoaded
            StoreAnswers ... StoresClosed  Beat  Failed

    core    StartRank ... Farewell            (end of the stream: kill the rank)
            Refused                           instead, and the stream ends
    agent   Here ... Started ... Line ... Alive ... RankEnded

A plan is plain data and is sent as a struct. Nothing is pickled. Arrays are bytes of int32 or
float32; fields next to an array of several dimensions give its shape.
"""

import socket
import threading
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from quire.base import kv_orders
from quire.base.masks import TokenMasks
from quire.base.plan import DraftAnswer, DraftOrder, Int32, Plan, StepResult
from quire.base.settings.config import EngineConfig
from quire.base.settings.secrets import reveal_secret
from quire.engine.executors.loaded import LoadedElsewhere
from quire.engine.wire.wire import READ_BYTES, Codec
from quire.models.checkpoint.source import ModelSource

MAX_MESSAGE_BYTES = (1 << 32) - 1  # a step can have many candidates
MAX_AGENT_BYTES = 1 << 24

T = TypeVar("T")


class CoreDisconnected(Exception):
    """The core has closed its end of a rank's socket."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Core to rank: load the model. rank: number of the rank, counted stage by stage. num_local:
    ranks that share the machine's memory. free_bytes: free part of that memory."""

    config: EngineConfig
    source: ModelSource
    rank: int
    num_local: int
    free_bytes: int


class PoolMinimum(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: limits, such as numbers of blocks. Core to ranks: minimum of each limit."""

    values: tuple[int, ...]


class Step(msgspec.Struct, frozen=True, tag=True):
    """Core to rank: run a plan. number: running number of submitted plans. is_first: whether no
    other plan is outstanding. has_masks: whether `Masks` with this number follow."""

    number: int
    plan: Plan
    is_first: bool
    has_masks: bool


class Masks(msgspec.Struct, frozen=True, tag=True):
    """Core to rank: masks of a step. words: [num_rows, num_positions, num_words], int32, flat."""

    number: int
    rows: Int32
    words: Int32
    num_positions: int
    errors: dict[int, str]

    @classmethod
    def of(cls, number: int, masks: TokenMasks) -> "Masks":
        return cls(number, masks.rows, masks.words, masks.words.shape[1], masks.errors)

    @property
    def masks(self) -> TokenMasks:
        shape = len(self.rows), self.num_positions, -1
        return TokenMasks(self.rows, self.words.reshape(shape), self.errors)


class Order(msgspec.Struct, frozen=True, tag=True):
    """Core to rank: run this order with the draft model."""

    order: DraftOrder


class Idle(msgspec.Struct, frozen=True, tag=True):
    """Core to rank: use an idle moment, for example to record graphs."""


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Core to rank: load its part of an adapter into a slot, while it runs steps."""

    slot: int
    adapter_id: str
    path: str


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: the adapter is loaded, or why it cannot be."""

    error: str | None = None


class StoreOrders(msgspec.Struct, frozen=True, tag=True):
    """Core to rank: carry out these orders with its parts of the blocks."""

    orders: list[kv_orders.Order]


class StoreAnswers(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: the results of its orders."""

    answers: list[kv_orders.Answer]


class CloseStores(msgspec.Struct, frozen=True, tag=True):
    """Core to rank: finish the waiting orders within `timeout_s`, then close the stores."""

    timeout_s: float


class StoresClosed(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: its stores are closed."""


class Joined(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: the rank is connected. facts: digests by name that all ranks must share."""

    facts: dict[str, str]


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: progress of loading its part of the model."""

    done: int
    total: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: the model is loaded and the rank is ready."""

    model: LoadedElsewhere


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: the error that ends the rank. kind: name of a class in base/errors.py."""

    kind: str
    message: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: a step has ended. found: result of the answering rank, with flat token_ids
    [num_rows * width]; None from other ranks."""

    number: int
    duration_s: float
    error: str | None = None
    lost_swaps: bool = False
    found: StepResult | None = None

    @classmethod
    def of(cls, number: int, found: StepResult, *, answers: bool) -> "Done":
        lost, own = found.lost_swaps, found if answers else None
        return cls(number, found.duration_s, found.error, lost, own)

    @property
    def result(self) -> StepResult:
        assert self.found is not None
        num = len(self.found.num_accepted)
        shaped = self.found.token_ids.reshape(num, -1 if num else 1)
        return self.found.replace(token_ids=shaped)


class Drafted(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: draft tokens of the draft model, flat [num_rows * num_draft_tokens]. error: why
    drafting failed."""

    token_ids: Int32
    num_rows: int
    duration_s: float
    error: str | None = None

    @classmethod
    def of(cls, answer: DraftAnswer) -> "Drafted":
        return cls(answer.token_ids, len(answer.token_ids), answer.duration_s)

    @property
    def answer(self) -> DraftAnswer:
        shape = self.num_rows, -1 if self.num_rows else 0
        return DraftAnswer(self.token_ids.reshape(shape), self.duration_s)


class Idled(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: the idle moment was used. has_more: whether there is more to do when idle."""

    has_more: bool


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: a heartbeat. number: last step that the rank began, -1 before the first.
    num_exchanges: exchanges with the ranks that share its layers. where: its threads' positions in
    the code. expert_pairs: token-expert pairs computed. starved_s: seconds that the rank waited for
    a CPU since it loaded."""

    number: int
    num_exchanges: int
    where: str
    expert_pairs: int = 0
    starved_s: float = 0.0


ToRank = Begin | PoolMinimum | Step | Masks | Order | Idle | LoadAdapter | StoreOrders | CloseStores
FromRank = (
    Joined | Loading | PoolMinimum | Loaded | Failed | Done | Drafted | Idled | Beat
    | AdapterLoaded | StoreAnswers | StoresClosed
)  # fmt: skip


class Endpoint(msgspec.Struct, frozen=True, tag=True):
    """Agent to core: the agent is connected. host: its machine's address on the connection to the
    core. machine: name that agents on one machine share. free_bytes: free memory of the machine.
    port: port for the previous stage, 0 without one. settings: given settings as JSON."""

    host: str
    machine: str
    free_bytes: int
    port: int = 0
    settings: dict[str, str] = {}


class StartRank(msgspec.Struct, frozen=True, tag=True):
    """Core to agent: start the rank. environment: variables to set. directory: working directory,
    if it exists. next_host, next_port: address of the next stage's rank; port 0: last stage."""

    config: EngineConfig
    log_level: str
    environment: dict[str, str]
    directory: str
    next_host: str = ""
    next_port: int = 0


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Core to agent: the core refuses this rank. why: reason for the operator."""

    why: str


class Farewell(msgspec.Struct, frozen=True, tag=True):
    """Core to agent: the core ends. why: reason; empty for an orderly end."""

    why: str = ""


class Started(msgspec.Struct, frozen=True, tag=True):
    """Agent to core: the rank's process runs."""

    pid: int


class Line(msgspec.Struct, frozen=True, tag=True):
    """Agent to core: a line that the rank wrote to stderr."""

    text: str


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Agent to core: a heartbeat of the agent's machine and of the network to it."""


class RankEnded(msgspec.Struct, frozen=True, tag=True):
    """Agent to core: the rank has ended or is stopped. end_text: text that follows the rank's
    name."""

    end_text: str


ToAgent = StartRank | Refused | Farewell
FromAgent = Endpoint | Started | Line | Alive | RankEnded


def core_codec() -> Codec[FromRank]:
    """Return the codec with which a core talks to ranks."""
    return Codec(FromRank, _plain, _as_typed, MAX_MESSAGE_BYTES)


def rank_codec() -> Codec[ToRank]:
    """Return the codec with which a rank talks to its core."""
    return Codec(ToRank, _plain, _as_typed, MAX_MESSAGE_BYTES)


def core_agent_codec() -> Codec[FromAgent]:
    """Return the codec with which a core talks to node agents."""
    return Codec(FromAgent, _plain, _as_typed, MAX_AGENT_BYTES)


def agent_codec() -> Codec[ToAgent]:
    """Return the codec with which a node agent talks to its core."""
    return Codec(ToAgent, _plain, _as_typed, MAX_AGENT_BYTES)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        kind = np.float32 if value.dtype.kind == "f" else np.int32
        return value.astype(kind, copy=False).tobytes()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    return reveal_secret(value)  # a rank's configuration has secrets


def _as_typed(kind: Any, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    return np.frombuffer(bytearray(value), np.int32 if kind == Int32 else np.float32)


class Stream(Generic[T]):
    """Blocking connection. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket, codec: Codec[T]) -> None:
        self.socket = sock
        self._codec = codec
        self._frames = codec.frames()
        self._sending = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, waiting for room. Raises OSError if the connection has ended."""
        data = self._codec.encode(message)
        with self._sending:
            self.socket.sendall(data)

    def receive(self) -> list[T] | None:
        """Wait for bytes, and return the messages that they complete; None at the stream's end."""
        try:
            data = self.socket.recv(READ_BYTES)
        except OSError:
            data = b""
        if not data:
            return None
        return [self._codec.decode(body) for body in self._frames.feed(data)]
