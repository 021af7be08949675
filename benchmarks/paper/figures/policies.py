"""T 4.5: waits for the first token under FIFO, SRTF and two-level scheduling; and what
several tenants get."""

import numpy as np

from benchmarks.paper.bands import order
from benchmarks.paper.figure import BARS, Curve, Effort, Figure, Finding, Runs, run_each
from benchmarks.scheduler.policies import (
    LONG,
    POLICIES,
    SHORT,
    light_waits,
    load_of,
    long_and_short,
)
from benchmarks.scheduler.policies import scheduler_of as make_scheduler
from benchmarks.virtual.step_times import LLAMA_8B
from quire.tools.simulate.run import simulate

NUM, FEW = 1000, 200
SHARE, RATE = 0.02, 18.0  # of long prompts; requests per second: more than can be served
QUEUES = ("one queue", "fair", "alone")


def waits(policy: str, num: int) -> tuple[list[float], list[float]]:
    """Serve prompts of 100 tokens and a few of 100,000; returns waits of the short and the long."""
    arrivals = long_and_short(num, SHARE, RATE, seed=0)
    run = simulate(make_scheduler(policy, 60_000), arrivals, LLAMA_8B)
    served = [run.by_id[arrival.request.request_id] for arrival in arrivals]
    short = [each.wait_s for each in served if each.num_prompt == SHORT]
    return short, [each.wait_s for each in served if each.num_prompt == LONG]


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make the bars of policies, and of tenants."""
    num = NUM if effort.is_full else FEW
    found = run_each(runs, waits, [(policy, num) for policy in POLICIES])
    return [_policies(found, num), _tenants(effort, runs)]


def _policies(found: list[tuple[list[float], list[float]]], num: int) -> Figure:
    bar_positions = [float(index) for index in range(len(POLICIES))]
    short = [float(np.mean(mine)) for mine, _ in found]
    long = [float(np.mean(mine)) for _, mine in found]
    worst = [max(*mine, *others) for mine, others in found]
    fifo, srtf, two = range(3)
    findings = [
        order("mean wait of short prompts, SRTF over FIFO", short[srtf] / short[fifo], 0, 0.3,
              "short prefills first", "a third at most: else the order has no effect"),
        order("mean wait of short prompts, two-level over FIFO", short[two] / short[fifo], 0, 0.5,
              "preserved benefits", "half at most, since FIFO fills the staging queue"),
        order("mean wait of short prompts, SRTF over two-level", short[srtf] / short[two], 0, 1.0,
              "SRTF is optimal", "no policy has a shorter mean wait"),
        order("longest wait, SRTF over FIFO", worst[srtf] / worst[fifo], 0.97, 20,
              "starvation", "not shorter, but for 3 %: long prompts go last"),
        order("longest wait, two-level over FIFO", worst[two] / worst[fifo], 0.5, 1.25,
              "bounded", "a quarter more at most: one staging queue of eight requests"),
    ]  # fmt: skip
    load = load_of(long_and_short(num, SHARE, RATE, seed=0))
    text = (
        f"{num:,} prompts: {SHARE:.0%} have {LONG:,} tokens, the others {SHORT}. Llama-3.1-8B on an"
        f" H200, load {load:.2f}. The thesis describes the policies and gives no measurements. It"
        " claims that SRTF has the shortest mean wait and starves long prompts, and that two levels"
        " keep the former and bound the latter. `benchmarks/scheduler/policies.py` simulates more"
        " loads, conversations and hits."
    )
    return Figure(
        "policies",
        "Waits for the first token by policy",
        "T 4.5, algorithms 1 and 2, fig. 4.2",
        "",
        "seconds",
        [
            Curve("short prompts, mean", bar_positions, short),
            Curve("long prompts, mean", bar_positions, long),
            Curve("longest wait", bar_positions, worst),
        ],
        findings,
        text,
        BARS,
        list(POLICIES),
        is_log_y=True,
    )


def _tenants(effort: Effort, runs: Runs) -> Figure:
    num_heavy = 2000 if effort.is_full else 400
    found = run_each(runs, light_waits, [("fifo", queue, num_heavy) for queue in QUEUES])
    means = [float(np.mean(each)) for each in found]
    one, fair, alone = means
    findings = [
        Finding("mean wait during a flood, alone", alone, 0.0, 0.2, "", " s"),
        Finding("mean wait during a flood, fair", fair, 0.0, 1.0, "", " s"),
        Finding("mean wait during a flood, one queue over fair", one / fair, 2.0, 10_000.0),
    ]
    text = (
        f"One tenant sends {num_heavy:,} prompts at once, another tenant one per second. With a"
        " counter for each tenant, the second tenant waits for a step or two and not for the flood."
    )
    return Figure(
        "tenants",
        "One tenant during a flood by another",
        "beyond the papers; T 4.5.1 names the problem",
        "",
        "seconds to the first token, mean",
        [Curve("the light tenant", [0.0, 1.0, 2.0], means)],
        findings,
        text,
        BARS,
        list(QUEUES),
        is_log_y=True,
    )
