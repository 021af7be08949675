"""A store by its setting: `disk:/var/cache/kv`, or a name that another package brings."""

from typing import Any

from quire.base.errors import ConfigError, QuireError
from quire.base.plugins import CONNECTORS, all_names, load_plugin
from quire.engine.connectors.disk import DiskStore
from quire.engine.connectors.store import BlockStore

BUILT_IN: dict[str, type[Any]] = {"disk": DiskStore}


def make_store(setting: str, max_bytes: int) -> BlockStore:
    """Make a store. setting: NAME:ADDRESS, of which the store's class reads the address; max_bytes:
    that it may keep. Raises ConfigError if there is no such store, or it cannot be made."""
    name, colon, address = setting.partition(":")
    if not (name and colon and address):
        raise ConfigError(
            f"a KV store is a name, a colon and an address, such as disk:/var/cache/kv, got"
            f" {setting!r}; the names are {all_names(CONNECTORS, BUILT_IN)}."
        )
    kind = BUILT_IN.get(name) or load_plugin(CONNECTORS, name, BUILT_IN)
    try:
        store: BlockStore = kind(address, max_bytes)
    except QuireError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the KV store {setting!r} cannot be made: {type(error).__name__}: {error}. Correct the"
            " address, or take another store."
        ) from error
    return store
