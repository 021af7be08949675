"""Beyond the papers: conversations on several replicas, sent where their beginnings are known."""

import numpy as np

from benchmarks.paper.bands import order
from benchmarks.paper.figure import BARS, Curve, Effort, Figure, Runs, run_each
from benchmarks.scheduler.policies import Turns
from benchmarks.virtual.dry_run import VOCAB_SIZE, dry_run
from benchmarks.virtual.step_times import LLAMA_8B
from quire.base.clock import FakeClock
from quire.base.settings.config import SchedulerConfig
from quire.tools.simulate.replica import Replica
from quire.tools.simulate.run import Routing, Run, run_all

NUM_REPLICAS, BLOCK_SIZE = 4, 16
BLOCKS_PER_TALK = 20  # on each replica: too few to keep all turns of all conversations
NUM_TALKS, FEW_TALKS = 600, 80
WAYS = {"by load alone": 0, "by known prefixes": BLOCK_SIZE}


def measure(block_size: int, num_talks: int) -> tuple[float, float, float]:
    """Serve conversations; returns hits, the mean and the 99th percentile of waits in seconds.
    block_size: of beginnings that the sender remembers; 0 is none."""
    clock, run = FakeClock(), Run()
    config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192)
    cores = []
    for number in range(NUM_REPLICAS):
        scheduler, _ = dry_run(BLOCKS_PER_TALK * num_talks, BLOCK_SIZE, config, 131_072, True)
        cores.append(Replica(scheduler, LLAMA_8B, clock, number, run.by_id, VOCAB_SIZE))
    turns = Turns(num_talks, seed=0)
    arrivals = sorted(turns.first, key=lambda each: each.at_s)
    run_all(cores, arrivals, clock, run, turns.then, routing=Routing(block_size))
    served = list(run.by_id.values())
    prompts = sum(each.num_prompt for each in served)
    hits = sum(max(0, each.num_cached_tokens) for each in served) / prompts
    waits = [each.wait_s for each in served]
    return hits, float(np.mean(waits)), float(np.quantile(waits, 0.99))


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make the figure."""
    num_talks = NUM_TALKS if effort.is_full else FEW_TALKS
    found = run_each(runs, measure, [(size, num_talks) for size in WAYS.values()])
    (load_hits, load_wait, _), (known_hits, known_wait, _) = found
    findings = [
        order(
            "hits, by load alone over by known prefixes", load_hits / known_hits, 0.15, 0.5, "",
            "about a quarter: one of four replicas has computed the last turn; half would be"
            " a choice by prefixes",
        ),
        order(
            "hits, by known prefixes", 100 * known_hits, 40, 100, "",
            "most of a prompt is the turns before it; the oldest are evicted", " %",
        ),
        order(
            "mean wait, known prefixes over load alone", known_wait / load_wait, 0, 0.95, "",
            "hits are computed at once; a twentieth is more than the noise of arrivals",
        ),
    ]  # fmt: skip
    bar_positions = [0.0, 1.0]
    text = (
        f"{num_talks} conversations of 8 turns on {NUM_REPLICAS} replicas of Llama-3.1-8B on H200s."
        " The code of `quire serve -dp` chooses the replica (`engine/wire/core_choice.py`)."
    )
    return [
        Figure(
            "replicas",
            "Conversations on four replicas",
            "beyond the papers",
            "",
            "milliseconds to the first token",
            [
                Curve("mean", bar_positions, [1e3 * each[1] for each in found]),
                Curve("99th percentile", bar_positions, [1e3 * each[2] for each in found]),
            ],
            findings,
            text,
            BARS,
            list(WAYS),
        )
    ]
