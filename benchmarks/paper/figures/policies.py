"""T 4.5: waits for the first token under FIFO, SRTF and two-level scheduling; and what
several tenants get.

Two loads. A queue of short and long prompts beyond the rate that is served shows the mean waits.
A stream of short prompts below that rate, with two long ones near its beginning, shows starvation.
Under SRTF the long ones wait for the end of the stream.
"""

import numpy as np

from benchmarks.paper.bands import ANY, order
from benchmarks.paper.figure import BARS, Curve, Effort, Figure, Runs, run_each
from benchmarks.scheduler.policies import (
    LONG,
    POLICIES,
    SHORT,
    light_waits,
    load_of,
    long_and_short,
)
from benchmarks.scheduler.policies import scheduler_of as make_scheduler
from benchmarks.virtual.dry_run import VOCAB_SIZE
from benchmarks.virtual.step_times import LLAMA_8B
from quire.tools.simulate.arrivals import Arrival, simulated_request
from quire.tools.simulate.run import simulate
from quire.tools.workloads import token_ids_of

NUM, FEW = 1000, 200
SHARE, RATE = 0.02, 18.0  # of long prompts; requests per second: more than can be served
QUEUES = ("one queue", "fair", "alone")
STREAM_RATE, STREAM_TOKENS, LONG_AT_S = 74.0, 400, (1.0, 5.0)  # a load of 0.97
STREAMS_S = (30.0, 60.0)
FULL_STEP_S = 0.27  # of 8,192 tokens, with a long context


def waits(policy: str, num: int) -> tuple[list[float], list[float]]:
    """Serve prompts of 100 tokens and a few of 100,000; returns waits of the short and the long."""
    arrivals = long_and_short(num, SHARE, RATE, seed=0)
    run = simulate(make_scheduler(policy, 60_000), arrivals, LLAMA_8B)
    served = [run.by_id[arrival.request.request_id] for arrival in arrivals]
    short = [each.wait_s for each in served if each.num_prompt == SHORT]
    return short, [each.wait_s for each in served if each.num_prompt == LONG]


def longest_wait(policy: str, seconds: float) -> float:
    """Serve a stream of short prompts and two of 100,000 tokens; return the longest wait."""
    rng = np.random.default_rng(0)
    times = np.sort(rng.uniform(0.0, seconds, int(STREAM_RATE * seconds))).tolist()
    prompts = sorted([(at, STREAM_TOKENS) for at in times] + [(at, LONG) for at in LONG_AT_S])
    arrivals = [
        Arrival(at_s, simulated_request(str(i), token_ids_of([(i, length)], VOCAB_SIZE), None), 1)
        for i, (at_s, length) in enumerate(prompts)
    ]
    run = simulate(make_scheduler(policy, 60_000), arrivals, LLAMA_8B)
    return max(each.wait_s for each in run.by_id.values())


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make the bars of policies, and of tenants."""
    num = NUM if effort.is_full else FEW
    found = run_each(runs, waits, [(policy, num) for policy in POLICIES])
    cases = [(policy, seconds) for seconds in STREAMS_S for policy in POLICIES]
    longest = run_each(runs, longest_wait, cases)
    return [_policies(found, num), _stream(longest), _tenants(effort, runs)]


def _policies(found: list[tuple[list[float], list[float]]], num: int) -> Figure:
    bar_positions = [float(index) for index in range(len(POLICIES))]
    short = [float(np.mean(mine)) for mine, _ in found]
    long = [float(np.mean(mine)) for _, mine in found]
    fifo, srtf, two = range(3)
    findings = [
        order("mean wait of short prompts, SRTF over FIFO", short[srtf] / short[fifo], 0, 0.3,
              "short prefills first", "a third at most: else the order has no effect"),
        order("mean wait of short prompts, two-level over FIFO", short[two] / short[fifo], 0, 0.5,
              "preserved benefits", "half at most, since FIFO fills the staging queue"),
        order("mean wait of short prompts, SRTF over two-level", short[srtf] / short[two], 0, 1.0,
              "SRTF is optimal", "no policy has a shorter mean wait"),
    ]  # fmt: skip
    load = load_of(long_and_short(num, SHARE, RATE, seed=0))
    text = (
        f"{num:,} prompts: {SHARE:.0%} have {LONG:,} tokens, the others {SHORT}. Llama-3.1-8B on an"
        f" H200, load {load:.2f}. The thesis describes the policies and gives no measurements. It"
        " claims that SRTF has the shortest mean wait, and that two levels keep it."
        " `benchmarks/scheduler/policies.py` simulates more loads, conversations and hits."
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
        ],
        findings,
        text,
        BARS,
        list(POLICIES),
        is_log_y=True,
    )


def _stream(longest: list[float]) -> Figure:
    """Make the bars of longest waits. longest: of each policy, in each stream."""
    num, bar_positions = len(POLICIES), [float(index) for index in range(len(POLICIES))]
    by_stream = [longest[index : index + num] for index in range(0, len(longest), num)]
    _, srtf, two = range(3)
    short, whole = by_stream
    twice = STREAMS_S[1] / STREAMS_S[0]
    findings = [
        order("longest wait in a stream, SRTF over two-level", short[srtf] / short[two], 2.0,
              ANY, "starvation prevention", "twice at least"),
        order("longest wait under SRTF, stream of 60 s over 30 s", whole[srtf] / short[srtf],
              0.9 * twice, 1.1 * twice, "may wait indefinitely",
              "a tenth to either side: it grows with the stream"),
        order("longest wait under two-level, stream of 60 s over 30 s", whole[two] / short[two],
              1 / 1.1, 1.1, "bounded", "a tenth to either side: it does not grow"),
    ]  # fmt: skip
    text = (
        f"{STREAM_RATE:g} prompts of {STREAM_TOKENS} tokens arrive per second, for"
        f" {' or '.join(f'{each:g} s' for each in STREAMS_S)}, and two of {LONG:,} tokens after"
        f" {LONG_AT_S[0]:g} and {LONG_AT_S[1]:g} s. All answers have one token; Llama-3.1-8B on an"
        " H200. Under SRTF the long prompts wait until the stream has ended. The thesis says that"
        " they may wait forever, and that two levels bound the wait."
    )
    return Figure(
        "starvation",
        "The longest wait in a stream of short prompts",
        "T 4.5.2, 4.5.3",
        "",
        "seconds to the first token",
        [
            Curve(f"stream of {seconds:g} s", bar_positions, mine)
            for seconds, mine in zip(STREAMS_S, by_stream, strict=True)
        ],
        findings,
        text,
        BARS,
        list(POLICIES),
    )


def _tenants(effort: Effort, runs: Runs) -> Figure:
    num_heavy = 2000 if effort.is_full else 400
    found = run_each(runs, light_waits, [("fifo", queue, num_heavy) for queue in QUEUES])
    means = [float(np.mean(each)) for each in found]
    one, fair, alone = means
    findings = [
        order("mean wait during a flood, alone", alone, 0.0, FULL_STEP_S, "",
              "less than a full step", " s"),
        order("mean wait during a flood, fair", fair, 0.0, 2 * FULL_STEP_S, "",
              "at most two full steps", " s"),
        order("mean wait during a flood, one queue over fair", one / fair, 10.0, ANY, "",
              "ten times at least: the flood comes first"),
    ]  # fmt: skip
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
