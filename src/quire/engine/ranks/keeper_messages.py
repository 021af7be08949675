"""What a core and the keepers of its ranks tell each other; msgpack, each behind its length.

core    StartRank ... Farewell            (end of the stream: kill the rank)
        Refused                           instead, and the stream ends
keeper  Here ... Started ... Line ... Alive ... RankEnded
"""

from pathlib import Path
from typing import Any

import msgspec

from quire.base.config import EngineConfig
from quire.base.secrets import reveal_secret
from quire.engine.wire.wire import Codec, Frames

MOST_BYTES = 1 << 24


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


def core_side() -> Codec[FromKeeper]:
    """Return the codec of a core."""
    return Codec(FromKeeper, _plain, _as_typed, MOST_BYTES)


def keeper_side() -> Codec[ToKeeper]:
    """Return the codec of a keeper."""
    return Codec(ToKeeper, _plain, _as_typed, MOST_BYTES)


def keeper_frames() -> Frames:
    """Return what cuts the stream of either direction."""
    return Frames(MOST_BYTES)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return reveal_secret(value)  # the configuration of a rank


def _as_typed(kind: Any, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind} cannot be received")
