"""T 4.4.4: prompts in chunks alongside decoding rows: gaps between tokens, and first tokens."""

import numpy as np

from benchmarks.paper.bands import order
from benchmarks.paper.figure import Curve, Effort, Figure, Runs, run_each
from benchmarks.virtual.dry_run import dry_run
from benchmarks.virtual.step_times import LLAMA_8B
from quire.base.settings.config import SchedulerConfig
from quire.tools.simulate.arrivals import Arrival, simulated_request
from quire.tools.simulate.run import simulate
from quire.tools.workloads import token_ids_of

BUDGETS = (256, 512, 1024, 2048, 4096, 8192, 16_384)
FEW_BUDGETS = (512, 16_384)
LENGTH, NUM_OUTPUT, RATE = 16_000, 200, 0.9
MILLISECONDS = 1e3


def measure(budget: int, seconds: float) -> tuple[float, float]:
    """Serve long prompts in chunks of a step's remaining budget. Returns the 99th percentile of the
    gaps between two tokens, and the mean time to the first token, in ms."""
    rng = np.random.default_rng(0)
    times = np.sort(rng.uniform(0.0, seconds, max(8, int(RATE * seconds))))
    arrivals = []
    for number, at_s in enumerate(times.tolist()):
        prompt = token_ids_of([(number, LENGTH)], 1 << 16)
        arrivals.append(Arrival(at_s, simulated_request(str(number), prompt, None), NUM_OUTPUT))
    config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=budget)
    scheduler, _ = dry_run(60_000, 16, config, 32_768, False)
    run = simulate(scheduler, arrivals, LLAMA_8B)
    waits = [each.wait_s for each in run.by_id.values()]
    gap = float(np.quantile(run.gaps_s, 0.99))
    return MILLISECONDS * gap, MILLISECONDS * float(np.mean(waits))


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make the figure."""
    budgets = BUDGETS if effort.is_full else FEW_BUDGETS
    seconds = effort.seconds / 4
    found = run_each(runs, measure, [(budget, seconds) for budget in budgets])
    x = [float(budget) for budget in budgets]
    gaps, waits = ([each[index] for each in found] for index in (0, 1))
    whole, small = gaps[-1], gaps[budgets.index(512)]
    findings = [
        order("99th percentile of gaps, chunks of 512 over whole prompts", small / whole,
              512 / LENGTH, 0.2, "bounded latency of steps",
              "between the share of the chunk and a fifth"),
        order("mean wait, chunks of 512 over whole prompts",
              waits[budgets.index(512)] / waits[-1], 1.0, 2.0, "",
              "chunks cost first tokens time, but not twice as much"),
    ]  # fmt: skip
    text = (
        f"Prompts of {LENGTH:,} tokens arrive at {RATE:g} a second and get answers of"
        f" {NUM_OUTPUT} tokens; Llama-3.1-8B on an H200. With {budgets[-1]:,} tokens per step no"
        " prompt is split, and decoding rows wait for whole prompts. The thesis gives no"
        " numbers; it says that chunks bound the latency of steps."
    )
    return [
        Figure(
            "chunks",
            "Prompts in chunks",
            "T 4.4.4, table 4.1",
            "tokens per step",
            "ms",
            [
                Curve("gap between tokens, 99th percentile", x, gaps),
                Curve("time to the first token, mean", x, waits),
            ],
            findings,
            text,
            is_log_x=True,
            is_log_y=True,
            seconds=seconds,
        )
    ]
