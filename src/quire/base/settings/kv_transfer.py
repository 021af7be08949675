"""Disaggregated prefill: the parameters with which one engine hands a computed prompt to another.

The names are vLLM's. The first leg computes a prompt and writes its blocks to stores at once. The
second leg, in another engine, finds the blocks by their digests (`scheduler/reuse/stores.py`). So
these parameters are not needed to find a block. They only mark requests whose blocks are urgent,
and requests for which a short wait is worthwhile.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from quire.base.errors import ConfigError, RequestError
from quire.base.settings.secrets import SecretJson

FIELD = "kv_transfer_params"
SETTING = "kv_transfer_config"
MAX_FIELDS = 64
MAX_HOST_CHARS = 253  # characters of a host name
DIGEST_BYTES = 32
PRODUCER, CONSUMER, BOTH = "kv_producer", "kv_consumer", "kv_both"
ROLES = (PRODUCER, CONSUMER, BOTH)
# Which blocks an engine writes to its stores: none, evicted ones, or all that it computes.
NOTHING, EVICTED, COMPUTED = "nothing", "evicted", "computed"
BY_STORE = "quire moves blocks through a store; set --kv-store"
# vLLM's connectors that the stores of --kv-store replace.
FROM_ENGINES = (
    "NixlConnector", "P2pNcclConnector", "MooncakeConnector", "MooncakeStoreConnector",
    "MoRIIOConnector", "LMCacheConnectorV1", "LMCacheMPConnector",
)  # fmt: skip
TO_DIRECTORY = ("SharedStorageConnector", "ExampleConnector")  # two names of one connector
SEVERAL = "MultiConnector"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "OffloadingConnector": "use --kv-host-gb for host memory, without a connector",
        "SimpleCPUOffloadConnector": "use --kv-host-gb for host memory, without a connector",
        "DecodeBenchConnector": "it fills the cache with random numbers",
        "FlexKVConnectorV1": BY_STORE,
        "HF3FSKVConnector": BY_STORE,
    }
)


class KVTransfer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The transfer parameters of a request. The engine adds `stores` and `address`."""

    keeps: bool = False  # whether its blocks go to stores as soon as they are computed
    waits: bool = False  # whether its blocks may still be on their way to a store
    num_blocks: int = 0  # full blocks that the first leg handed over
    digest: bytes = b""  # name of the last of these blocks; empty if unknown
    peer: str = ""  # HOST:PORT of the engine that has the blocks
    stores: tuple[int, ...] = ()  # indices of the stores to search; empty for all
    address: str = ""  # HOST:PORT to return to the client


class HandedOver(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The blocks that the first leg handed over, for its response."""

    num_blocks: int  # full blocks of the prompt
    digest: bytes  # name of the last block
    address: str = ""  # HOST:PORT where peers reach the blocks; may be empty


@dataclass(frozen=True)
class TransferConfig:
    """The engine's settings of disaggregated prefill."""

    role: str = BOTH
    stores: tuple[str, ...] = ()  # stores that replace the connector, in addition to --kv-store
    needs_store: bool = False  # whether --kv-store must be set


def transfer_of(params: Any) -> KVTransfer | None:
    """Read `kv_transfer_params`; None if they request nothing. Raises RequestError.

    Unknown fields, which other engines and routers add, are ignored."""
    if not params:
        return None
    if not isinstance(params, Mapping) or len(params) > MAX_FIELDS:
        raise RequestError(
            f"{FIELD} must be an object of at most {MAX_FIELDS} fields, such as"
            ' {"do_remote_decode": true}; correct it, or remove it.',
            FIELD,
        )
    keeps, waits = (_flag(params, name) for name in ("do_remote_decode", "do_remote_prefill"))
    num, digest = _handed_over(params) if waits else (0, b"")
    if params.get("remote_block_ids") and not num:
        waits = False  # the ids belong to an engine of another kind
    peer = _peer(params) if waits else ""
    return KVTransfer(keeps, waits, num, digest, peer) if keeps or waits else None


def answer_params(handed_over: HandedOver, engine_id: str = "") -> dict[str, Any]:
    """Return the `kv_transfer_params` of the first leg's response, for the second leg's request."""
    host, _, port = handed_over.address.rpartition(":")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_block_ids": [handed_over.digest.hex()] if handed_over.num_blocks else [],
        "remote_num_blocks": handed_over.num_blocks,
        "remote_host": host or None,
        "remote_port": int(port) if host else None,
    }


def parse_transfer(given: str | None) -> TransferConfig:
    """Read `kv_transfer_config`, a JSON text. Raises ConfigError."""
    if given is None:
        return TransferConfig()
    try:
        fields = json.loads(given)
    except (ValueError, RecursionError) as error:
        shown = SecretJson(given)
        raise ConfigError(f"{SETTING} must be JSON, got {shown!r} ({error}).") from None
    example = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
    if not isinstance(fields, dict):
        raise ConfigError(f"{SETTING} must be like {example}, got {SecretJson(given)!r}.")
    role = fields.get("kv_role", BOTH)
    if role not in ROLES:
        raise ConfigError(f"kv_role of {SETTING} must be one of {', '.join(ROLES)}, got {role!r}.")
    stores, needs_store = _stores_of(fields)
    return TransferConfig(role, stores, needs_store)


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name)
    if value not in (None, True, False):
        raise RequestError(f"{FIELD}.{name} must be true or false, got {str(value)[:80]!r}.", FIELD)
    return bool(value)


def _peer(params: Mapping[str, Any]) -> str:
    """Return the named HOST:PORT; empty if invalid. It is used for comparisons only."""
    host, port = params.get("remote_host"), params.get("remote_port")
    if not isinstance(host, str) or len(host) > MAX_HOST_CHARS or not isinstance(port, int | str):
        return ""
    return f"{host}:{port}" if host and str(port).isdecimal() and len(str(port)) <= 5 else ""


def _handed_over(params: Mapping[str, Any]) -> tuple[int, bytes]:
    """Return number and last digest of the first leg's blocks; 0 if another engine wrote them."""
    num, names = params.get("remote_num_blocks"), params.get("remote_block_ids")
    if not isinstance(num, int) or not isinstance(names, list) or len(names) != 1:
        return 0, b""
    try:
        digest = bytes.fromhex(names[0])
    except (TypeError, ValueError):
        return 0, b""
    return (num, digest) if 0 < num < 2**31 and len(digest) == DIGEST_BYTES else (0, b"")


def _stores_of(fields: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """Return the stores that replace a connector, and whether --kv-store must be set."""
    name = fields.get("kv_connector")
    extra = fields.get("kv_connector_extra_config") or {}
    if not isinstance(extra, Mapping):
        raise ConfigError(
            f"kv_connector_extra_config must be an object, got a {type(extra).__name__}."
        )
    if name is None or name in FROM_ENGINES:
        return (), name is not None
    if name in TO_DIRECTORY:
        path = extra.get("shared_storage_path")
        if not isinstance(path, str) or not path:
            raise ConfigError(
                f"{name} needs kv_connector_extra_config.shared_storage_path, a directory."
            )
        return (f"dir:{path}",), False
    if name == SEVERAL:
        parts = extra.get("connectors")
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
            raise ConfigError(f"{name} needs a list kv_connector_extra_config.connectors.")
        found = [_stores_of(part) for part in parts if part.get("kv_connector") != SEVERAL]
        return tuple(s for stores, _ in found for s in stores), any(needs for _, needs in found)
    reason = REFUSED.get(name, BY_STORE) if isinstance(name, str) else BY_STORE
    known = ", ".join((*FROM_ENGINES, *TO_DIRECTORY, SEVERAL))
    raise ConfigError(f"kv_connector={name!r} is not supported: {reason}. Known are {known}.")
