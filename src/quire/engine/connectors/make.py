"""Open stores from their settings: `dir:/var/cache/kv`, `peer://10.0.0.2:7400`, or NAME:ADDRESS.

Other names are entry points of other packages, or of `quire.plugins` (Redis, S3).
"""

from collections.abc import Callable, Mapping
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from quire.base.errors import ConfigError, QuireError
from quire.base.kv_orders import Answer
from quire.base.plugins import CONNECTORS, TRANSFERS, all_names, load_plugin
from quire.base.settings.cache_config import SERVE, CacheConfig
from quire.base.settings.secrets import SecretUrl
from quire.engine.connectors.connections import Connections, Worker
from quire.engine.connectors.direct import DirectTransfer
from quire.engine.connectors.disk import DiskStore, shared_memory_store
from quire.engine.connectors.peer import PeerStore
from quire.engine.connectors.store import BlockStore
from quire.engine.connectors.worker import HostMemory, StoreWorker


class SharedHostMemory(HostMemory, Protocol):
    """Host memory that allocates pages ahead of their use on request."""

    def allocate_early(self) -> None: ...


SharedMemory = TypeVar("SharedMemory", bound=SharedHostMemory)
TakeAnswer = Callable[[Answer], None]  # called from any thread
Make = Callable[[str, int], Any]
VIA = "?via="


def make_transfer(name: str) -> DirectTransfer:
    """Create a transfer that a package provides. Raises ConfigError, and MissingDependency."""
    transfer: DirectTransfer = load_plugin(TRANSFERS, name, ())()
    return transfer


def split_via(address: str) -> tuple[str, DirectTransfer | None]:
    """Split HOST:PORT?via=NAME, and create the transfer. Raises ConfigError, and
    MissingDependency."""
    host_port, sign, name = address.partition(VIA)
    if not sign:
        return host_port, None
    return host_port, make_transfer(name)


def _peer(address: str, max_bytes: int) -> PeerStore:
    host_port, transfer = split_via(address.removeprefix("//"))
    return PeerStore(host_port, max_bytes, transfer)


BUILT_IN: Mapping[str, Make] = MappingProxyType(
    {"dir": DiskStore, "shm": shared_memory_store, "peer": _peer}
)
NAMES = (*BUILT_IN, "serve")  # `serve` is not a store of its own (`open_stores`)


def make_store(setting: str, max_bytes: int) -> BlockStore:
    """Create a store. setting: NAME:ADDRESS; the store parses the address. max_bytes: limit of the
    store. Raises ConfigError if the store is unknown or cannot be created, and MissingDependency if
    it needs a package."""
    shown = SecretUrl(setting)
    name, colon, address = setting.partition(":")
    if not (name and colon and address):
        raise ConfigError(
            f"a KV store is a name, a colon and an address, such as dir:/var/cache/kv, got"
            f" {shown!r}; the names are {all_names(CONNECTORS, NAMES)}."
        )
    kind: Make = BUILT_IN.get(name) or load_plugin(CONNECTORS, name, NAMES)
    try:
        store: BlockStore = kind(address, max_bytes)
    except QuireError as error:
        if shown.scrub(str(error)) == str(error):
            raise
        raise type(error)(shown.scrub(str(error))) from None
    except Exception as error:
        raise ConfigError(
            f"the KV store {shown!r} cannot be created: {type(error).__name__}:"
            f" {_reason(error, shown)}. Correct the address, or use another store."
        ) from (None if shown.has_secret else error)  # its text may hold parts of the address
    return store


def open_stores(
    cache: CacheConfig,
    fingerprint: bytes,
    memory: SharedMemory | None,
    backend_name: str,
    ring: Callable[[], None],
    serve: Callable[[str, SharedMemory, TakeAnswer], Worker] | None = None,
) -> Connections:
    """Open the configured stores. ring: called when an answer has arrived. serve: creates the
    worker of `serve:ADDRESS`. Raises ConfigError if the attention backend does not share its
    blocks, and like `make_store`."""
    if memory is None:
        raise ConfigError(
            f"the attention backend {backend_name} does not share its blocks, which"
            f" {SecretUrl(cache.stores[0])!r} needs; remove it, or use another attention_backend."
        )
    memory.allocate_early()
    answers: SimpleQueue[Answer] = SimpleQueue()
    max_bytes = int(cache.kv_disk_gb * 1e9)
    workers: list[Worker] = []
    for setting in cache.stores:
        if serve is not None and setting.startswith(SERVE):
            workers.append(serve(setting, memory, answers.put))
        else:
            store, scrub = make_store(setting, max_bytes), SecretUrl(setting).scrub
            workers.append(StoreWorker(store, fingerprint, memory, answers.put, ring, scrub=scrub))
    return Connections(workers, answers)


def _reason(error: Exception, setting: SecretUrl) -> str:
    """Return why a store cannot be created. A parser may quote any part of an address, even a part
    of the password. So nothing is quoted if the address has a secret."""
    return "its address is not valid" if setting.has_secret else setting.scrub(str(error))
