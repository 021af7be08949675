"""The five systems of the paper's comparison (P 6.1), on one clock, workload and step times.

Beams are simulated for quire alone. `capacity.py` has a formula of Orca's beams, whose replaced
ones are copied, and FasterTransformer's are in no figure.
"""

from dataclasses import dataclass, replace

from benchmarks.paper.baselines.core import BaselineCore, Batches
from benchmarks.paper.baselines.faster_transformer import FasterTransformerCore
from benchmarks.paper.baselines.orca import OrcaCore, Reserve, longest, oracle, pow2
from benchmarks.paper.settings import (
    BLOCK_SIZE,
    DEFAULT,
    MAX_LEN,
    MAX_SEQS,
    MAX_STEP_TOKENS,
    Assumptions,
    Load,
    Method,
    Setting,
)
from benchmarks.virtual.branching import BranchingExecutor
from quire.base.clock import FakeClock
from quire.base.events import Event, Planned, Preempted, Stepped
from quire.base.masks import MaskPromise
from quire.base.plan import Plan
from quire.base.settings.config import SchedulerConfig
from quire.engine.executors.executor import Executor
from quire.kv.manager import KVManager
from quire.scheduler.core.memory import Memory as SchedulerMemory
from quire.scheduler.core.queue import Fifo
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup
from quire.tools.simulate.replica import Replica, SimulatedCore
from quire.tools.simulate.run import Run, run_all

QUIRE = "quire"
ORCA_ORACLE, ORCA_POW2, ORCA_MAX = "Orca (Oracle)", "Orca (Pow2)", "Orca (Max)"
FASTER_TRANSFORMER = "FasterTransformer"
SYSTEMS = (QUIRE, ORCA_ORACLE, ORCA_POW2, ORCA_MAX, FASTER_TRANSFORMER)
RESERVES: dict[str, Reserve] = {ORCA_ORACLE: oracle, ORCA_POW2: pow2, ORCA_MAX: longest}
VOCAB_SIZE = 1 << 16
SATURATED = 0.75  # of the offered tokens: halves of a trace with few requests differ by less
# Share of the beams that a search of quire replaces in a step, by width, on Alpaca-like lengths.
# `CountedBeams` counts it in the runs of fig. 15, which check these numbers.
REPLACED = {2: 0.041, 4: 0.064, 6: 0.071}


@dataclass(frozen=True)
class Served:
    """The results of a run.

    latency_s: normalized, the mean over requests of seconds per output token.
    batched: requests in a step, the mean over time.
    memory: shares of its uses while a request waited.
    saved: share of the blocks without sharing; 0 without several sequences.
    replaced: share of the beams that a search drops and forks in a step.
    num_swapped: sequences that preemption copied to host memory.
    num_computed: tokens of all steps.
    hits: share of the prompts' tokens.
    throughput: requests per second, by tokens, from the middle of the arrivals to the last
        admission. A saturated system is full all this time.
    offered: requests per second of all arrivals, likewise.
    """

    system: str
    rate_per_s: float
    latency_s: float
    batched: float
    tokens_per_s: float
    memory: dict[str, float]
    num_preemptions: int = 0
    saved: float = 0.0
    hits: float = 0.0
    throughput: float = 0.0
    offered: float = 0.0
    replaced: float = 0.0
    num_swapped: int = 0
    num_computed: int = 0

    @property
    def is_saturated(self) -> bool:
        """Whether the system serves much less than what arrives, so that its queue grows."""
        return self.throughput < SATURATED * self.offered


@dataclass(frozen=True)
class Options:
    """Assumptions of all systems, and options of quire alone.

    caches: whether prefixes are found again.
    mode: how it preempts.
    copy_s: to move one block to or from host memory.
    """

    block_size: int = BLOCK_SIZE
    caches: bool = False
    mode: str = "recompute"
    copy_s: float | None = None
    assumed: Assumptions = DEFAULT


PLAIN = Options()


class PagedMeter:
    """Reads quire's memory with each plan, for as long as its step takes. is_shared: requests have
    several sequences, which share blocks."""

    def __init__(self, scheduler: Scheduler, block_size: int, is_shared: bool) -> None:
        self.batches = Batches()
        self.num_used = self.num_unshared = 0
        self.num_swapped = self.num_computed = 0
        self._num_forked = self._num_row_steps = 0  # a row step: a row that got a token in a step
        self._scheduler, self._block_size, self._is_shared = scheduler, block_size, is_shared
        self._pool = scheduler.memory.kv.pools[0]
        self._since_s = 0.0
        self._num_requests = self._live = self._used = 0
        self._is_short = False  # a request waited

    def __call__(self, event: Event) -> None:
        if isinstance(event, Planned):
            self._open(event.at_s)
        elif isinstance(event, Stepped):
            self._close(event.at_s)
            self.num_computed += event.num_tokens
            self._num_row_steps += len(event.rows)
        elif isinstance(event, Preempted):
            self.num_swapped += event.swapped

    @property
    def saved(self) -> float:
        """Share of the blocks that sequences share."""
        return 1 - self.num_used / self.num_unshared if self.num_unshared else 0.0

    def count_forks(self, num: int) -> None:
        self._num_forked += num

    def replaced(self, num_first: int) -> float:
        """Return the share of the beams that are replaced in a step. num_first: forks of prompts,
        which replace no beam."""
        return max(0, self._num_forked - num_first) / max(1, self._num_row_steps)

    def _open(self, now: float) -> None:
        rows, num_used = self._scheduler.rows, self._pool.num_used
        self._since_s = now
        self._num_requests = rows.num_running
        self._used = num_used * self._block_size
        self._is_short = self._scheduler.num_waiting > 0
        if self._is_short:
            self._live = int(rows.table.computed[rows.running].sum())
        if self._is_shared:
            running = rows.sequences()
            self._num_requests = len({each.request.request_id for each in running})
            self.num_unshared += sum(len(each.blocks.tables[0].live_blocks) for each in running)
            self.num_used += num_used

    def _close(self, now: float) -> None:
        """Count the time of a step, in the state that its plan left."""
        lasts_s = now - self._since_s
        self.batches.busy_s += lasts_s
        self.batches.requests_s += lasts_s * self._num_requests
        if self._is_short:
            live = min(self._live, self._used)
            slots = self._pool.num_blocks * self._block_size
            self.batches.memory.add(live, live, self._used, slots, lasts_s)


class CountedBeams(BranchingExecutor):
    """Candidates of beams, and a count of the forks for a meter."""

    def __init__(self, executor: Executor, assumed: Assumptions, meter: PagedMeter) -> None:
        super().__init__(executor, assumed.sureness, assumed.same_share)
        self._meter = meter

    def submit(self, plan: Plan, masks: MaskPromise | None = None) -> None:
        self._meter.count_forks(len(plan.forked))
        super().submit(plan, masks)


def throughput(run: Run, load: Load) -> float:
    """Return new tokens per second, as requests of mean length. They count from the middle of the
    arrivals to their end, or to the last admission if that is later."""
    first_s = load.seconds / 2
    last_s = max(load.seconds, *(each.admitted_s for each in run.by_id.values()))
    num = sum(num for at_s, num in run.listeners[0].tokens if first_s < at_s <= last_s)
    of_request = load.workload.outputs.mean * load.method.num
    return num / (last_s - first_s) / of_request


def serve(system: str, setting: Setting, load: Load, options: Options = PLAIN) -> Served:
    """Serve a load by a system, on the setting's machine."""
    clock, run = FakeClock(), Run()
    arrivals = load.arrivals()
    if system == QUIRE:
        core, meter = _quire(setting, clock, run, load.method, options)
        batches, made = meter.batches, core
    else:
        made = _baseline(system, setting, clock, run, load.method, options.assumed)
        batches, meter = made.batches, None
    cores: list[SimulatedCore] = [made]
    run_all(cores, arrivals, clock, run)
    done = [each for each in run.by_id.values() if not each.error]
    outputs = {arrival.request.request_id: arrival.num_output for arrival in arrivals}
    latencies = [
        each.latency_s / outputs[name] for name, each in run.by_id.items() if not each.error
    ]
    prompts = sum(each.num_prompt for each in done)
    served = Served(
        system,
        load.rate_per_s,
        sum(latencies) / max(1, len(latencies)),
        batches.mean,
        sum(outputs.values()) * load.method.num / run.duration_s,
        batches.memory.shares,
        run.num_preemptions,
        hits=sum(max(0, each.num_cached_tokens) for each in done) / max(1, prompts),
        throughput=throughput(run, load),
        offered=sum(outputs.values()) / load.seconds / load.workload.outputs.mean,
    )
    if meter is None:
        return served
    return replace(
        served,
        saved=meter.saved,
        replaced=meter.replaced((load.method.num - 1) * len(done)),
        num_swapped=meter.num_swapped,
        num_computed=meter.num_computed,
    )


def _baseline(
    system: str,
    setting: Setting,
    clock: FakeClock,
    run: Run,
    method: Method,
    assumed: Assumptions,
) -> BaselineCore:
    if method.is_beams:
        raise ValueError(
            f"{system} would search {method.num} beams without the copies of replaced ones:"
            " use the formula of capacity.py"
        )
    if system == FASTER_TRANSFORMER and assumed != DEFAULT:
        raise ValueError(f"{system} has the device's times alone, not {assumed}: use DEFAULT")
    common = (clock, run.by_id, setting.num_slots, MAX_LEN)
    if system == FASTER_TRANSFORMER:
        return FasterTransformerCore(setting.device_times, *common)
    return OrcaCore(
        setting.times(False, method.num, assumed),
        *common,
        reserve=RESERVES[system],
        max_num_seqs=MAX_SEQS,
        max_num_tokens=MAX_STEP_TOKENS,
    )


def _quire(
    setting: Setting, clock: FakeClock, run: Run, method: Method, options: Options
) -> tuple[Replica, PagedMeter]:
    size = options.block_size
    num_blocks = setting.num_slots // size
    config = SchedulerConfig(
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_STEP_TOKENS,
        preemption_mode=options.mode,
    )
    group = CacheGroup("full", (0,), num_kv_heads=1, head_dim=1)
    hosts = (num_blocks,) if options.mode == "swap" else None
    kv = KVManager((group,), (num_blocks,), size, options.caches, host_limits=hosts)
    scheduler = Scheduler(SchedulerMemory(kv, MAX_STEP_TOKENS), config, MAX_LEN, Fifo)
    times = setting.times(True, method.num, options.assumed)
    if options.copy_s is not None:
        times = replace(times, copy_s=options.copy_s)

    meter = PagedMeter(scheduler, size, method.num > 1)

    def wrap(executor: Executor) -> Executor:
        return CountedBeams(executor, options.assumed, meter) if method.is_beams else executor

    core = Replica(scheduler, times, clock, 0, run.by_id, VOCAB_SIZE, wrap=wrap)
    core.core.subscribe(meter)
    return core, meter
