"""Serving under overload: admission that slows down, against a fixed number of rows.

    python benchmarks/overload.py

Requests arrive faster than they can be served, so that with unlimited memory those in work would
need about three times the pool (`needs`, from a run with a pool that is never full). Lengths as in
P fig. 11; the scheduler does not know when an output will end. Virtual time: the steps take what a
formula says for OPT-13B on an A100 (tools/simulate.py), P's first setting, whose cache has room for
about 15,700 tokens.

`fixed`: a limit on the rows, as an operator sets it by trial (max_num_seqs); the best of those that
never preempt is what to compare with. `open`: 2,048 rows, so that memory alone limits them, with
the admission that slows down when preemption is frequent (scheduler/admission.py), and without it.
"""

import itertools
from dataclasses import asdict, dataclass

import numpy as np

from quire.base.config import SchedulerConfig
from quire.scheduler import admission
from quire.tools.dry_run import dry_run
from quire.tools.report import benchmark_parser, print_head, write_report
from quire.tools.simulate import OPT_13B, Arrival, Run, simulate, simulated_request
from quire.tools.workloads import SHAREGPT, Workload

MAX_LEN = 2048
MOST_OUTPUT = 1024
OPEN_ROWS = 2048
BLOCK_SIZE = 16
AIM_SHARE = 0.9
AIM_PREEMPTIONS = 3


@dataclass(frozen=True)
class Measured:
    """One run. lost: share of the tokens that were computed again; longest_s: from arrival to
    end."""

    name: str
    tokens_per_s: float
    used: float
    preempted: int
    most: int
    lost: float
    longest_s: float


def trace(workload: Workload, num: int, per_s: float, seed: int) -> list[Arrival]:
    """Poisson arrivals."""
    inputs, outputs = workload.sample(num, seed)
    times = np.random.default_rng(seed + 1).exponential(1 / per_s, num).cumsum()
    tokens = list(range(2, 2 + int(inputs.max())))
    return [
        Arrival(at_s, simulated_request(str(i), tokens[:num_input], MOST_OUTPUT), num_output)
        for i, (at_s, num_input, num_output) in enumerate(
            zip(times.tolist(), inputs.tolist(), outputs.tolist(), strict=True)
        )
    ]


def serve(arrivals: list[Arrival], num_blocks: int, num_rows: int, mode: str) -> Run:
    config = SchedulerConfig(
        max_num_seqs=num_rows, max_num_batched_tokens=2048, preemption_mode=mode
    )
    scheduler, _ = dry_run(num_blocks, BLOCK_SIZE, config, MAX_LEN, False)
    return simulate(scheduler, arrivals, OPT_13B)


def measured(name: str, run: Run, arrivals: list[Arrival]) -> Measured:
    served = run.by_id.values()
    assert all(s.finished_s >= 0 for s in served), "a request starved"
    assert [run.by_id[a.request.request_id].num_output for a in arrivals] == [
        a.num_output for a in arrivals
    ]
    num_tokens = run.num_output + sum(len(a.request.prompt_token_ids) for a in arrivals)
    return Measured(
        name,
        run.tokens_per_s,
        run.used,
        run.num_preemptions,
        max(s.num_preemptions for s in served),
        run.num_lost_tokens / num_tokens,
        max(s.finished_s - s.arrived_s for s in served),
    )


def sweep(arrivals: list[Arrival], num_blocks: int) -> list[Measured]:
    """Fixed limits, up to the first with which somebody is preempted, and three further ones."""
    results: list[Measured] = []
    for num_rows in itertools.count(8, 2):
        run = serve(arrivals, num_blocks, num_rows, "recompute")
        results.append(measured(f"fixed {num_rows}", run, arrivals))
        show(results[-1])
        if sum(result.preempted > 0 for result in results) == 4:
            return results


def without_headroom(arrivals: list[Arrival], num_blocks: int) -> Measured:
    """The watermark alone."""
    step, most = admission.STEP_UP, admission.MOST_PREEMPTIONS
    admission.STEP_UP, admission.MOST_PREEMPTIONS = 0.0, 1 << 30
    try:
        run = serve(arrivals, num_blocks, OPEN_ROWS, "recompute")
    finally:
        admission.STEP_UP, admission.MOST_PREEMPTIONS = step, most
    return measured("open, watermark only", run, arrivals)


def show(got: Measured) -> None:
    print(
        f"{got.name:22} {got.tokens_per_s:8.0f} {got.used:9.1%} {got.preempted:9} {got.most:8}"
        f" {got.lost:7.1%} {got.longest_s:9.0f} s",
        flush=True,
    )


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--num-requests", type=int, default=1500)
    parser.add_argument("--per-s", type=float, default=7.4, help="requests per second")
    parser.add_argument("--blocks", type=int, default=983, help="pool, in blocks of 16 tokens")
    options = parser.parse_args()
    arrivals = trace(SHAREGPT, options.num_requests, options.per_s, seed=0)
    unlimited = serve(arrivals, 200_000, OPEN_ROWS, "recompute")
    needs = unlimited.used * 200_000 / options.blocks
    print_head(f"{SHAREGPT.name}, {options.per_s} requests/s, pool of {options.blocks} blocks")
    print(f"  needs {needs:.1f} x the pool, and with it {unlimited.tokens_per_s:.0f} tokens/s")
    print("admission               tokens/s pool used  preempted  most times  again  longest")
    fixed = sweep(arrivals, options.blocks)
    best = max((r for r in fixed if not r.preempted), key=lambda r: r.tokens_per_s)
    results = [without_headroom(arrivals, options.blocks)]
    show(results[0])
    for mode in ("recompute", "swap"):
        run = serve(arrivals, options.blocks, OPEN_ROWS, mode)
        results.append(measured(f"open, {mode}", run, arrivals))
        show(results[-1])
    for result in results:
        print(f"{result.name}: {result.tokens_per_s / best.tokens_per_s:.1%} of {best.name}")
    print(f"aim: {AIM_SHARE:.0%}, nobody preempted more than {AIM_PREEMPTIONS} times")
    found = [asdict(result) for result in (*fixed, *results)]
    report = {"needs": needs, "best_fixed": best.name, "per_s": options.per_s, "results": found}
    write_report(options.output_json, report)


if __name__ == "__main__":
    main()
