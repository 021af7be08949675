"""Handing a computed prompt from one engine to another: what a request, an answer and an engine's
settings say of it, in vLLM's words.

The first leg computes a prompt and gives its blocks to the stores as soon as they are computed; the
second one, in another engine, finds them there by their digests
(`scheduler/reuse/stores.py`). So nothing in these messages is needed to find a block. They say only
for which request it is worth to hurry, and for which it is worth to wait a little.
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
MOST_FIELDS = 64
MOST_HOST = 253  # characters of a name
DIGEST_BYTES = 32
PRODUCER, CONSUMER, BOTH = "kv_producer", "kv_consumer", "kv_both"
ROLES = (PRODUCER, CONSUMER, BOTH)
# What an engine gives to its stores: nothing, what leaves its pool, or all that it computes
NOTHING, EVICTED, COMPUTED = "nothing", "evicted", "computed"
BY_STORE = "quire moves blocks through a store; set --kv-store"
# vLLM's connectors whose place the stores of --kv-store take
FROM_ENGINES = (
    "NixlConnector", "P2pNcclConnector", "MooncakeConnector", "MooncakeStoreConnector",
    "MoRIIOConnector", "LMCacheConnectorV1", "LMCacheMPConnector",
)  # fmt: skip
TO_DIRECTORY = ("SharedStorageConnector", "ExampleConnector")  # the second is its newer name
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
    """What a request says. keeps: its blocks go to the stores as soon as they are computed.
    waits: they may still be on their way there. num_blocks, digest: of the full blocks that were
    handed over, how many there are, and the name of the last, if that is known. peer: HOST:PORT of
    the engine that has them, as the request names it. What an engine adds of its own settings:
    stores: those to look into, all if there are none here; address: HOST:PORT that the answer
    names."""

    keeps: bool = False
    waits: bool = False
    num_blocks: int = 0
    digest: bytes = b""
    peer: str = ""
    stores: tuple[int, ...] = ()
    address: str = ""


class HandedOver(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What an answer says: the full blocks of a prompt that go to the stores, and the last one's
    name. address: HOST:PORT where peers reach them, if there is one."""

    num_blocks: int
    digest: bytes
    address: str = ""


@dataclass(frozen=True)
class TransferConfig:
    """What an engine's settings say. stores: that the connector stands for, beside others."""

    role: str = BOTH
    stores: tuple[str, ...] = ()
    needs_store: bool = False


def transfer_of(params: Any) -> KVTransfer | None:
    """Read `kv_transfer_params`; None if it asks for nothing. What other engines and routers put
    there beside is ignored. Raises RequestError."""
    if not params:
        return None
    if not isinstance(params, Mapping) or len(params) > MOST_FIELDS:
        raise RequestError(
            f"{FIELD} must be an object of at most {MOST_FIELDS} fields, such as"
            ' {"do_remote_decode": true}; correct it, or remove it.',
            FIELD,
        )
    keeps, waits = (_flag(params, name) for name in ("do_remote_decode", "do_remote_prefill"))
    num, digest = _handed_over(params) if waits else (0, b"")
    if params.get("remote_block_ids") and not num:
        waits = False  # they are another kind of engine's
    peer = _peer(params) if waits else ""
    return KVTransfer(keeps, waits, num, digest, peer) if keeps or waits else None


def answer_params(told: HandedOver, engine_id: str = "") -> dict[str, Any]:
    """Make the `kv_transfer_params` of an answer, which the second leg's request is to bring."""
    host, _, port = told.address.rpartition(":")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_block_ids": [told.digest.hex()] if told.num_blocks else [],
        "remote_num_blocks": told.num_blocks,
        "remote_host": host or None,
        "remote_port": int(port) if host else None,
    }


def parse_transfer(given: str | None) -> TransferConfig:
    """Read `kv_transfer_config`, which is JSON. Raises ConfigError."""
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
    """Return the place that is named, if it can be one; it is only ever compared."""
    host, port = params.get("remote_host"), params.get("remote_port")
    if not isinstance(host, str) or len(host) > MOST_HOST or not isinstance(port, int | str):
        return ""
    return f"{host}:{port}" if host and str(port).isdecimal() and len(str(port)) <= 5 else ""


def _handed_over(params: Mapping[str, Any]) -> tuple[int, bytes]:
    """Return the blocks that the first leg told of; nothing for what is another engine's."""
    num, names = params.get("remote_num_blocks"), params.get("remote_block_ids")
    if not isinstance(num, int) or not isinstance(names, list) or len(names) != 1:
        return 0, b""
    try:
        digest = bytes.fromhex(names[0])
    except (TypeError, ValueError):
        return 0, b""
    return (num, digest) if 0 < num < 2**31 and len(digest) == DIGEST_BYTES else (0, b"")


def _stores_of(fields: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """Return the stores that a connector stands for, and whether it needs one of --kv-store."""
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
