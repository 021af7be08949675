"""Measure the share of the slots in blocks in use that hold live tokens (P fig. 2: 96.3 % on
ShareGPT).

    python -m benchmarks.memory.live_slots

Requests with lengths as in P fig. 11 wait at all times, and the pool is full, so that sequences are
preempted now and then. A slot is live if its token's keys and values are in it after the step. The
total is all slots of blocks that running sequences use. No model and no prefix caching.
"""

from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.result_files import options_of, write
from benchmarks.virtual.dry_run import VOCAB_SIZE, dry_request, dry_run
from quire.base.events import Preempted
from quire.base.settings.config import SchedulerConfig
from quire.scheduler.scheduler import Scheduler
from quire.tools.report import benchmark_parser, print_head
from quire.tools.workloads import ALPACA, SHAREGPT, Workload

MAX_LEN = 2048
PAPER_SHARE = 0.963
AIM = 0.96


@dataclass(frozen=True)
class Measured:
    """Means over the steps."""

    workload: str
    block_size: int
    live_share: float
    pool_usage: float
    num_running: float
    num_preemptions: int
    num_steps: int


class Feed:
    """Keeps some requests waiting."""

    def __init__(self, scheduler: Scheduler, workload: Workload, seed: int) -> None:
        self._scheduler = scheduler
        inputs, outputs = workload.sample(100_000, seed)
        self._lengths = iter(zip(inputs.tolist(), outputs.tolist(), strict=True))
        self._tokens = np.random.default_rng(seed).integers(0, VOCAB_SIZE, MAX_LEN).tolist()
        self._count = 0

    def fill(self, num_waiting: int = 128) -> None:
        while self._scheduler.num_waiting < num_waiting:
            num_input, num_output = next(self._lengths)
            request = dry_request(str(self._count), self._tokens[:num_input], num_output)
            self._scheduler.add(request, 0.0)
            self._count += 1


def measure(workload: Workload, block_size: int, num_slots: int, num_steps: int) -> Measured:
    """Fill the pool, run until the first sequences have long ended, then measure."""
    config = SchedulerConfig(max_num_seqs=4096, max_num_batched_tokens=2048)
    scheduler, executor = dry_run(num_slots // block_size, block_size, config, MAX_LEN, False)
    feed = Feed(scheduler, workload, seed=0)
    pool = scheduler.memory.kv.pools[0]
    shares, usages, running, num_preemptions = [], [], [], 0
    warm_up = MAX_LEN
    for step in range(warm_up + num_steps):
        feed.fill()
        decisions = scheduler.schedule(0.0)
        plan = decisions.plan
        assert plan is not None
        if step >= warm_up:
            live = sum(sequence.num_computed_tokens for sequence in scheduler.rows.sequences())
            shares.append(live / (pool.num_used * block_size))
            usages.append(pool.num_used / pool.num_blocks)
            running.append(scheduler.num_running)
            num_preemptions += sum(isinstance(e, Preempted) for e in decisions.events)
        executor.submit(plan)
        scheduler.update(executor.next_result(), 0.0)
    mean_share, mean_usage = float(np.mean(shares)), float(np.mean(usages))
    return Measured(
        workload.name, block_size, mean_share, mean_usage, float(np.mean(running)),
        num_preemptions, num_steps,
    )  # fmt: skip


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--slots", type=int, default=65_536, help="tokens that the pool can hold")
    parser.add_argument("--steps", type=int, default=4000)
    options = parser.parse_args()
    print_head(f"live share of the slots in held blocks, pool of {options.slots:,} slots")
    print(f"  P: {PAPER_SHARE:.1%} (ShareGPT, OPT-13B, block size 16); aim: {AIM:.0%}")
    print("workload        block   live   pool used  running  preempted")
    results = []
    for workload in (SHAREGPT, ALPACA):
        for block_size in (8, 16, 32):
            got = measure(workload, block_size, options.slots, options.steps)
            results.append(asdict(got))
            print(
                f"{got.workload:15} {block_size:5} {got.live_share:7.2%} {got.pool_usage:9.2%}"
                f" {got.num_running:8.1f} {got.num_preemptions:9}",
                flush=True,
            )
    write(
        options.output_json,
        "memory.live_slots",
        results,
        options_of(options) | {"paper": PAPER_SHARE},
    )


if __name__ == "__main__":
    main()
