"""From settings to stores that a core uses."""

from queue import SimpleQueue

from quire.base.errors import ConfigError
from quire.base.kv_orders import Answer
from quire.engine.connectors.connections import Connections
from quire.engine.connectors.make import make_store
from quire.engine.connectors.worker import StoreWorker
from quire.engine.core import EngineCore
from quire.runner.build import BuiltRunner


def connect_stores(core: EngineCore, built: BuiltRunner) -> None:
    """Open the stores and let the core use them. Raises ConfigError for one that cannot be opened,
    and for an attention backend whose blocks cannot be read."""
    cache = built.config.cache
    settings = cache.stores
    if not settings:
        return
    if core.scheduler.stores is None:
        raise ConfigError(
            f"{settings[0]} is of no use without prefix caching; leave it out, or set"
            " enable_prefix_caching."
        )
    memory = built.runner.backend.host_blocks
    if memory is None:
        raise ConfigError(
            f"the attention backend {built.backend_name} keeps its blocks to itself, so there is no"
            f" use of {settings[0]}; leave it out, or take another attention_backend."
        )
    answers: SimpleQueue[Answer] = SimpleQueue()
    stores = [make_store(setting, int(cache.kv_disk_gb * 1e9)) for setting in settings]
    fingerprint = core.scheduler.memory.names.fingerprint
    core.connect(
        Connections(
            [
                StoreWorker(store, fingerprint, memory, answers.put, core.bell.ring)
                for store in stores
            ],
            answers,
        )
    )
