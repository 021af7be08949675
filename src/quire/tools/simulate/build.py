"""Build simulated cores: the engine's own memory plan, sizes and scheduler, with step times instead
of a model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.base.clock import FakeClock
from quire.base.errors import ConfigError
from quire.base.settings.config import EngineConfig, public_settings
from quire.base.settings.kv_transfer import EVICTED
from quire.base.settings.speculation import parse_speculation
from quire.engine.attachments.queue_limit import QueueLimit
from quire.engine.attachments.recorder import Recorder, check_recordable
from quire.kv.digest import BlockHash
from quire.kv.manager import KVManager
from quire.ops.host.threads import num_threads
from quire.runner.memory_plan import block_bytes_of, host_tier_limits
from quire.runner.setup.step_size import StepBudget, first_budget
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.names import Digester
from quire.scheduler.policy.policies import make_block_hash, make_eviction, make_policy
from quire.scheduler.scheduler import Scheduler
from quire.spec.model_spec import ModelSpec
from quire.tools.devices import CPU
from quire.tools.simulate.disk import Contents, VirtualDisk
from quire.tools.simulate.replica import Replica, VirtualStores
from quire.tools.simulate.run import Run
from quire.tools.sizing.fit import Fit
from quire.tools.step_times import StepTimes

AMPLE_BYTES = 1 << 50  # host memory next to a GPU: enough for any setting


@dataclass(frozen=True)
class Engines:
    """The parts of the simulated engines."""

    config: EngineConfig  # with all derived values
    spec: ModelSpec  # of one rank
    num_blocks: tuple[int, ...]
    host_limits: tuple[int, ...] | None
    follows_time: bool  # whether the step budget adapts to step times, as by default on a CPU

    @classmethod
    def of(cls, found: Fit, given: EngineConfig) -> "Engines":
        """Build from the memory plan and the given settings. Raises ConfigError for a setting that
        cannot be simulated."""
        check_settings(given)
        num_ranks = given.parallel.tensor_parallel_size
        own = found.spec.of_ranks(num_ranks)
        limits = host_tier_limits(found.config, own, found.memory, AMPLE_BYTES, num_ranks)
        is_open = given.scheduler.max_num_batched_tokens is None
        return cls(
            found.config,
            own,
            found.memory.num_blocks,
            limits,
            found.device.kind == CPU and is_open,
        )

    @property
    def block_size(self) -> int:
        """Tokens per cacheable block; 0 if the prefix cache is disabled."""
        cache = self.config.cache
        return cache.block_size if cache.enable_prefix_caching else 0

    @property
    def block_hash(self) -> BlockHash:
        return make_block_hash(self.config.cache.prefix_caching_hash_algo)

    @property
    def block_bytes(self) -> list[int]:
        """Bytes of a block, by cache group."""
        return list(block_bytes_of(self.config, self.spec))

    def check_stores(self) -> None:
        """Raise ConfigError if replicas could not take each other's blocks, or have a disk."""
        if self.config.cache.stores:
            raise ConfigError(
                "prefill and decode replicas are simulated without a disk; remove kv_disk_dir, or"
                " use --replicas."
            )
        if self.host_limits is None:
            raise ConfigError(
                "replicas share computed blocks through host memory and the prefix cache; set"
                " kv_host_gb, and keep enable_prefix_caching on."
            )

    def disk(self, bytes_per_s: float, clock: FakeClock) -> Callable[[int], VirtualStores | None]:
        """Return the store of each replica, by its number: the directory of the settings. Raises
        ConfigError if no host memory leads to it."""
        cache = self.config.cache
        if not cache.stores:
            return lambda number: None
        if self.host_limits is None:
            raise ConfigError(
                "blocks reach kv_disk_dir through host memory and the prefix cache; keep"
                " enable_prefix_caching on, or remove kv_disk_dir."
            )
        contents = Contents(self.block_bytes, cache.kv_disk_gb * 1e9)
        return lambda number: VirtualDisk(contents, bytes_per_s, clock)

    def replicas(
        self,
        num: int,
        times: StepTimes,
        clock: FakeClock,
        run: Run,
        stores: Callable[[int], VirtualStores | None] = lambda number: None,
    ) -> list[Replica]:
        """Return the cores of one run. stores: returns a core's store, given its number."""
        made = []
        for number in range(num):
            store = stores(number)
            budget = None
            if self.follows_time:
                budget = StepBudget(first_budget(self.config, self.spec, num_threads()))
            scheduler = self._scheduler(store)
            replica = Replica(
                scheduler, times, clock, number, run.by_id, self.spec.vocab_size, budget
            )
            if store is not None:
                replica.connect(store)
            if (limit := self.config.scheduler.max_num_queued_reqs) is not None:
                replica.core.attach(QueueLimit(scheduler, limit))
            self._record(replica, number if num > 1 else None)
            made.append(replica)
        return made

    def _scheduler(self, store: VirtualStores | None) -> Scheduler:
        config, cache = self.config, self.config.cache
        kv = KVManager(
            self.spec.cache_groups,
            self.num_blocks,
            cache.block_size,
            cache.enable_prefix_caching,
            block_bytes=block_bytes_of(config, self.spec),
            host_limits=self.host_limits,
            make_eviction=make_eviction(cache.eviction_policy),
        )
        max_tokens = config.scheduler.max_num_batched_tokens or 0
        policy = make_policy(config.scheduler.scheduling_policy)
        memory = Memory(kv, max_tokens, cache.watermark, digester=Digester(self.block_hash))
        length, num_stores = config.model.row_capacity, 0 if store is None else 1
        kept = cache.kept if cache.stores else EVICTED
        return Scheduler(memory, config.scheduler, length, policy, num_stores, kept=kept)

    def _record(self, replica: Replica, number: int | None) -> None:
        """Attach a recorder if the settings ask for a recording."""
        config = self.config
        if config.record is None:
            return
        path = Path(config.record) if number is None else Path(config.record) / str(number)
        core, limit = replica.core, config.record_max_mb * 1_000_000
        core.attach(
            Recorder(
                core.scheduler, path, limit, config.record_tokens, public_settings(config), 0.0
            )
        )


def check_settings(given: EngineConfig) -> None:
    """Raise ConfigError for a setting that cannot be simulated."""
    if given.cache.kv_store or given.cache.transfer.stores:
        raise ConfigError("kv_store is not simulated; remove it, or use kv_disk_dir.")
    parallel = given.parallel
    if (parallel.pipeline_parallel_size, parallel.decode_context_parallel_size) != (1, 1):
        raise ConfigError(
            "only tensor_parallel_size and replicas are simulated for several devices; remove"
            " pipeline_parallel_size and decode_context_parallel_size."
        )
    speculation = parse_speculation(given.speculative_config)
    if speculation is not None and speculation.num_tokens:
        raise ConfigError(
            "speculative_config is not simulated, because only a real run shows how many draft"
            " tokens are accepted. Remove it."
        )
    if given.record is not None:
        check_recordable(given)
