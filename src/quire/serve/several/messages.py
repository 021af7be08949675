"""What API processes and the supervisor tell each other about several models.

An API process asks for a lease on a model before it sends a request to its core, and gives it back
when the last of these requests is over, so that no model is unloaded under a request. Leases have
numbers, which the API process counts. All that wait for the same one share it.

    Ask      -->            a lease is wanted; the model is loaded if it is not
    GiveBack -->            a lease is not needed any more, or not wanted any more
             <--  Grant     the model is loaded
             <--  GiveWay   begin nothing more under these leases: another model waits for the place
             <--  Deny      the model cannot be loaded; why
             <--  States    of all models, whenever one has changed
"""

import msgspec

from quire.engine.wire.wire import Codec

MAX_WIRE_BYTES = 1 << 20

UNLOADED, LOADING, LOADED, UNLOADING, FAILED, DEAD = (
    "unloaded", "loading", "loaded", "unloading", "failed", "dead",
)  # fmt: skip


class ModelState(msgspec.Struct, frozen=True):
    """state: see docs/operate/several-models.md. why: the last words of a model that has failed or
    died, until it is loaded again. since_s: unix time of the last change. num_loads: how often it
    was loaded."""

    name: str
    state: str
    why: str = ""
    since_s: float = 0.0
    num_loads: int = 0


class Ask(msgspec.Struct, frozen=True, tag=True):
    model: str
    lease: int


class GiveBack(msgspec.Struct, frozen=True, tag=True):
    model: str
    lease: int


class Grant(msgspec.Struct, frozen=True, tag=True):
    model: str
    lease: int


class GiveWay(msgspec.Struct, frozen=True, tag=True):
    model: str


class Deny(msgspec.Struct, frozen=True, tag=True):
    model: str
    lease: int
    why: str


class States(msgspec.Struct, frozen=True, tag=True):
    models: list[ModelState]


ToKeeper = Ask | GiveBack
FromKeeper = Grant | GiveWay | Deny | States


def keeper_codec() -> Codec[ToKeeper]:
    """Return the codec of the supervisor."""
    return Codec(ToKeeper, _refuse, _refuse, MAX_WIRE_BYTES)


def link_codec() -> Codec[FromKeeper]:
    """Return the codec of an API process."""
    return Codec(FromKeeper, _refuse, _refuse, MAX_WIRE_BYTES)


def _refuse(*_: object) -> object:
    raise NotImplementedError("no message has such a value")
