"""Messages of a core, its ranks and their keepers: msgpack of these structs after their lengths.

    core    Begin  Least  Step ... Masks ... Order ... Idle ... (end of the stream: end)
    rank    Joined Loading* Least Loaded   Done ...  Guessed ... Idled  Beat ...    Failed

    core    StartRank ... Farewell            (end of the stream: kill the rank)
            Refused                           instead, and the stream ends
    keeper  Here ... Started ... Line ... Alive ... RankEnded

A plan is data, so it crosses as it is. Nothing is pickled. Arrays are bytes of int32 or float32;
those of more than one dimension come with their shape.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire.base.masks import TokenMasks
from quire.base.plan import DraftAnswer, DraftOrder, Int32, Plan, StepResult
from quire.base.settings.config import EngineConfig
from quire.base.settings.secrets import reveal_secret
from quire.engine.executors.loaded import LoadedElsewhere
from quire.engine.wire.wire import Codec
from quire.models.checkpoint.source import ModelSource

MAX_MESSAGE_BYTES = (1 << 32) - 1  # a step's candidates may be many
MAX_KEEPER_BYTES = 1 << 24


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Core to rank: load the model. rank: of num_ranks, stage by stage. num_local: ranks that share
    this machine's memory, of which free_bytes are free."""

    config: EngineConfig
    source: ModelSource
    rank: int
    num_local: int
    free_bytes: int


class Least(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: what it has. Core to ranks: the least of all."""

    values: tuple[int, ...]


class Step(msgspec.Struct, frozen=True, tag=True):
    """Core to rank: carry out a plan. number: counts what was handed over. is_first: all before it
    were answered. has_masks: `Masks` of this number follow."""

    number: int
    plan: Plan
    is_first: bool
    has_masks: bool


class Masks(msgspec.Struct, frozen=True, tag=True):
    """Core to rank: the masks of a step. words: [rows, num_positions, ...]."""

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
    """Core to rank: the model that guesses is to do this."""

    order: DraftOrder


class Idle(msgspec.Struct, frozen=True, tag=True):
    """Core to rank: do what is useful while no step is to be done (record graphs)."""


class Joined(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: here it is. facts: what must be the same everywhere, by name."""

    facts: dict[str, str]


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: so much of its part of the model is loaded."""

    done: int
    total: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: ready."""

    model: LoadedElsewhere


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: last words. kind: an error of base/errors.py."""

    kind: str
    message: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: a step is done. found: what the answering rank's step gave, with token_ids as
    [N * width]; None from the others."""

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
        return replace(self.found, token_ids=shaped)


class Guessed(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: what the model that guesses found; token_ids as [S * k]. error: why it could
    not."""

    token_ids: Int32
    num_rows: int
    duration_s: float
    error: str | None = None

    @classmethod
    def of(cls, answer: DraftAnswer) -> "Guessed":
        return cls(answer.token_ids, len(answer.token_ids), answer.duration_s)

    @property
    def answer(self) -> DraftAnswer:
        shape = self.num_rows, -1 if self.num_rows else 0
        return DraftAnswer(self.token_ids.reshape(shape), self.duration_s)


class Idled(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: done. has_more: there is more of it to do."""

    has_more: bool


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: a sign of life. number: of the step that it has begun last, -1 before the
    first. num_exchanges: how often it has met those that share its layers. where: in the code.
    expert_pairs: how often tokens were sent to its experts. starved_s: seconds in which it wanted a
    CPU and got none, since it loaded."""

    number: int
    num_exchanges: int
    where: str
    expert_pairs: int = 0
    starved_s: float = 0.0


ToRank = Begin | Least | Step | Masks | Order | Idle
FromRank = Joined | Loading | Least | Loaded | Failed | Done | Guessed | Idled | Beat


class Here(msgspec.Struct, frozen=True, tag=True):
    """Keeper to core: where it is. host: the address by which its machine reaches the core;
    machine: equal for keepers on one; free_bytes: of its memory; port: where the stage before
    can connect, 0 if there is none. settings: what it was told, as JSON."""

    host: str
    machine: str
    free_bytes: int
    port: int = 0
    settings: dict[str, str] = {}


class StartRank(msgspec.Struct, frozen=True, tag=True):
    """Core to keeper: start the rank. environment: variables to set; directory: to work in, if it
    exists; next_host, next_port: where the rank of the next stage waits; port 0: it is the last."""

    config: EngineConfig
    log_level: str
    environment: dict[str, str]
    directory: str
    next_host: str = ""
    next_port: int = 0


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Core to keeper: this rank is not taken. why: in words, for the operator."""

    why: str


class Farewell(msgspec.Struct, frozen=True, tag=True):
    """Core to keeper: it ends. why: in words; empty: in order."""

    why: str = ""


class Started(msgspec.Struct, frozen=True, tag=True):
    """Keeper to core: the rank runs."""

    pid: int


class Line(msgspec.Struct, frozen=True, tag=True):
    """Keeper to core: the rank has written it on stderr."""

    text: str


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Keeper to core: its machine works, and so does the network between them."""


class RankEnded(msgspec.Struct, frozen=True, tag=True):
    """Keeper to core: the rank has ended, or stands still. how: in words, which follow its name."""

    how: str


ToKeeper = StartRank | Refused | Farewell
FromKeeper = Here | Started | Line | Alive | RankEnded


def core_codec() -> Codec[FromRank]:
    """Return a core's codec for ranks."""
    return Codec(FromRank, _plain, _as_typed, MAX_MESSAGE_BYTES)


def rank_codec() -> Codec[ToRank]:
    """Return a rank's codec for its core."""
    return Codec(ToRank, _plain, _as_typed, MAX_MESSAGE_BYTES)


def core_side() -> Codec[FromKeeper]:
    """Return a core's codec for keepers."""
    return Codec(FromKeeper, _plain, _as_typed, MAX_KEEPER_BYTES)


def keeper_side() -> Codec[ToKeeper]:
    """Return a keeper's codec for its core."""
    return Codec(ToKeeper, _plain, _as_typed, MAX_KEEPER_BYTES)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        kind = np.float32 if value.dtype.kind == "f" else np.int32
        return value.astype(kind, copy=False).tobytes()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    return reveal_secret(value)  # the configuration of a rank


def _as_typed(kind: Any, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    return np.frombuffer(bytearray(value), np.int32 if kind == Int32 else np.float32)
