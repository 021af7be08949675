"""From settings to stores that a core uses."""

from queue import SimpleQueue
from typing import TYPE_CHECKING

from quire.base.cache_config import SERVE, CacheConfig
from quire.base.clock import Clock
from quire.base.errors import ConfigError
from quire.base.kv_orders import Answer
from quire.base.secrets import SecretUrl
from quire.engine.attachments.stores import StoresAttachment
from quire.engine.connectors.connections import Connections, Worker
from quire.engine.connectors.direct import DirectSource
from quire.engine.connectors.host_index import HostIndex
from quire.engine.connectors.make import make_store, split_via
from quire.engine.connectors.served import ServedBlocks
from quire.engine.connectors.worker import StoreWorker
from quire.engine.loop.core import EngineCore

if TYPE_CHECKING:  # a core with ranks elsewhere imports no torch
    from quire.ops.attention.host_blocks import HostBlocks


def connect_stores(
    core: EngineCore,
    cache: CacheConfig,
    memory: "HostBlocks | None",
    backend_name: str,
    clock: Clock,
) -> None:
    """Open the stores and attach them. memory: from which they take blocks. Raises
    ConfigError for one that cannot be opened, and for an attention backend whose blocks cannot be
    read."""
    settings = cache.stores
    if not settings:
        return
    if core.scheduler.stores is None:
        raise ConfigError(
            f"{settings[0]} has no effect without prefix caching; remove it, or set"
            " enable_prefix_caching."
        )
    if memory is None:
        raise ConfigError(
            f"the attention backend {backend_name} does not share its blocks, which {settings[0]}"
            " needs; remove it, or use another attention_backend."
        )
    memory.keep_ready()
    answers: SimpleQueue[Answer] = SimpleQueue()
    most_bytes, fingerprint = int(cache.kv_disk_gb * 1e9), core.scheduler.memory.names.fingerprint
    workers: list[Worker] = []
    for setting in settings:
        if setting.startswith(SERVE):
            index = HostIndex(fingerprint, memory, core.scheduler.memory.kv.host_pools)
            address, transfer = split_via(setting.removeprefix(SERVE).removeprefix("//"))
            direct = None if transfer is None else DirectSource(transfer, memory)
            workers.append(ServedBlocks(address, index, answers.put, core.bell.ring, direct))
        else:
            store = make_store(setting, most_bytes)
            scrub = SecretUrl(setting).scrub
            workers.append(
                StoreWorker(store, fingerprint, memory, answers.put, core.bell.ring, scrub=scrub)
            )
    core.attach(StoresAttachment(Connections(workers, answers), clock, settings))
