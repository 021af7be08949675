"""Messages between API processes and the supervisor about several models.

An API process requests a lease on a model before it sends a request to the model's core. It returns
the lease when the last of these requests ends, so no model is unloaded under a request. The API
process numbers its leases. All requests that wait for the same lease share it.

    RequestLease -->               request a lease; the model is loaded if necessary
    GiveBack     -->               return a lease, or withdraw the request
                 <--  Grant        the model is loaded
                 <--  UnloadModel  begin no more requests under this lease: its memory is needed
                 <--  Deny         the model cannot be loaded; why
                 <--  States       of all models, after each change
"""

import msgspec

from quire.engine.wire.wire import Codec

MAX_WIRE_BYTES = 1 << 20

UNLOADED, LOADING, LOADED, UNLOADING, FAILED, DEAD = (
    "unloaded", "loading", "loaded", "unloading", "failed", "dead",
)  # fmt: skip


class ModelState(msgspec.Struct, frozen=True):
    """The state of one model."""

    name: str
    state: str  # see docs/operate/several-models.md
    why: str = ""  # error of a failed or dead model, until it is loaded again
    since_s: float = 0.0  # unix time of the last change
    num_loads: int = 0  # number of times that the model was loaded


class RequestLease(msgspec.Struct, frozen=True, tag=True):
    model: str
    lease: int


class GiveBack(msgspec.Struct, frozen=True, tag=True):
    model: str
    lease: int


class Grant(msgspec.Struct, frozen=True, tag=True):
    model: str
    lease: int


class UnloadModel(msgspec.Struct, frozen=True, tag=True):
    model: str


class Deny(msgspec.Struct, frozen=True, tag=True):
    model: str
    lease: int
    why: str


class States(msgspec.Struct, frozen=True, tag=True):
    models: list[ModelState]


ToManager = RequestLease | GiveBack
FromManager = Grant | UnloadModel | Deny | States


def manager_codec() -> Codec[ToManager]:
    """Return the codec of the supervisor."""
    return Codec(ToManager, _refuse, _refuse, MAX_WIRE_BYTES)


def link_codec() -> Codec[FromManager]:
    """Return the codec of an API process."""
    return Codec(FromManager, _refuse, _refuse, MAX_WIRE_BYTES)


def _refuse(*_: object) -> object:
    raise NotImplementedError("no message has such a value")
