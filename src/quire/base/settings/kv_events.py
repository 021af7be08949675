"""Publication of the prefix cache's blocks: `kv_events_config`, in vLLM's words."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from quire.base.errors import ConfigError
from quire.base.settings.fields import json_object

NAME = "kv_events_config"
NULL, ZMQ = "null", "zmq"
MAX_MESSAGES = 10_000_000  # limit for numbers of messages
TCP = re.compile(r"tcp://(?P<host>[^/]+):(?P<port>\d{1,5})")
OTHERS = re.compile(r"(ipc|inproc)://.+")
ON_THIS_MACHINE = re.compile(r"localhost|127(\.\d{1,3}){3}|\[::1\]")


@dataclass(frozen=True)
class KVEventsConfig:
    """The fields of vLLM's --kv-events-config, and `token_ids`.

    An endpoint that is a wildcard (`*`, `[::]`), an address of this machine, ipc or inproc is
    bound. To any other host the publisher connects, and the subscriber binds.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://127.0.0.1:5557"  # endpoint of the events
    replay_endpoint: str | None = None  # endpoint where subscribers request missed messages
    buffer_steps: int = 10_000  # messages kept for replay
    hwm: int = 100_000  # messages queued for one slow subscriber
    max_queue_size: int = 100_000  # messages queued for the publisher
    topic: str = ""  # topic of every message
    token_ids: bool = False  # whether events reveal tokens, adapters and salts

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher in (None, ZMQ)


def parse_kv_events(given: str | None) -> KVEventsConfig:
    """Read the setting. Raises ConfigError for unknown fields and invalid values."""
    found = json_object(NAME, given)
    known = {field.name: field.type for field in fields(KVEventsConfig)}
    if unknown := sorted(set(found) - set(known)):
        raise ConfigError(f"{NAME} has no {', '.join(unknown)}; it has: {', '.join(known)}.")
    _check(found)
    return KVEventsConfig(**found)


def shifted(endpoint: str, core_id: int) -> str:
    """Return the endpoint of one core: as in vLLM, the port increases with the core's number."""
    if core_id == 0:
        return endpoint
    tcp = TCP.fullmatch(endpoint)
    if tcp is None:
        return f"{endpoint}_dp{core_id}"
    port = int(tcp["port"])
    return f"tcp://{tcp['host']}:{port + core_id if port else 0}"


def is_bound(endpoint: str) -> bool:
    """Return whether the publisher binds an endpoint instead of connecting to it."""
    tcp = TCP.fullmatch(endpoint)
    if tcp is None:
        return True
    host = tcp["host"]
    return host == "*" or "::" in host or bool(ON_THIS_MACHINE.fullmatch(host))


def _check(found: Mapping[str, Any]) -> None:
    for name in ("enable_kv_cache_events", "token_ids"):
        if not isinstance(found.get(name, False), bool):
            raise _error(name, found, "true or false")
    publisher = found.get("publisher")
    if publisher not in (None, NULL, ZMQ):
        raise _error("publisher", found, f"{NULL} or {ZMQ}")
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        value = found.get(name, 1)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not is_number or not 1 <= value <= MAX_MESSAGES:
            raise _error(name, found, f"a whole number from 1 to {MAX_MESSAGES}")
    if not isinstance(found.get("topic", ""), str):
        raise _error("topic", found, "a text")
    for name in ("endpoint", "replay_endpoint"):
        value = found.get(name)
        if name not in found or (value is None and name == "replay_endpoint"):
            continue
        if not isinstance(value, str) or not _is_endpoint(value):
            raise _error(name, found, "like tcp://127.0.0.1:5557, tcp://*:5557 or ipc:///run/kv")
    replay = found.get("replay_endpoint")
    if replay is not None and not is_bound(replay):
        raise _error("replay_endpoint", found, "an address to listen on, such as tcp://*:5558")


def _is_endpoint(value: str) -> bool:
    tcp = TCP.fullmatch(value)
    return int(tcp["port"]) < 1 << 16 if tcp is not None else bool(OTHERS.fullmatch(value))


def _error(name: str, found: Mapping[str, Any], rule: str) -> ConfigError:
    return ConfigError(f"{NAME}'s {name} must be {rule}, got {found[name]!r}.")
