"""P fig. 17: a chatbot, whose prompts are the last 1,024 tokens of a conversation."""

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.paper.bands import missed, order
from benchmarks.paper.capacity import Capacity, gain
from benchmarks.paper.figure import Effort, Figure, Finding, Runs, run_each
from benchmarks.paper.settings import OPT_13B, Load
from benchmarks.paper.sweep import PLOTTED_S, sweep
from benchmarks.paper.systems import ORCA_MAX, ORCA_ORACLE, ORCA_POW2, QUIRE
from quire.tools.workloads import SHAREGPT, Int64, Workload

SYSTEMS = (QUIRE, ORCA_ORACLE, ORCA_POW2, ORCA_MAX)
MAX_TOKENS = 1024
MEAN_TURNS = 6.0
NEAR = 1.2  # of a simulation and the formula of the same system
FIRST_RATE = 0.75
LONGER = 2  # traces, since there are few requests per second


@dataclass(frozen=True)
class Chat(Workload):
    """The turns of conversations: what was said before them and the question, cut to MOST tokens.

    The number of turns before is geometric, with a mean of MEAN_TURNS: ours, as the paper says only
    that most prompts reach the cut.
    """

    def sample(self, num: int, seed: int) -> tuple[Int64, Int64]:
        rng = np.random.default_rng(seed)
        before = rng.geometric(1 / (1 + MEAN_TURNS), num) - 1
        total = int(before.sum())
        text_lengths = self.inputs.sample(total, rng) + self.outputs.sample(total, rng)
        ends = np.cumsum(before)
        sums = np.concatenate([[0], np.cumsum(text_lengths)])
        history = sums[ends] - sums[ends - before]
        prompts = np.minimum(history + self.inputs.sample(num, rng), MAX_TOKENS)
        return prompts, np.minimum(self.outputs.sample(num, rng), MAX_TOKENS)


CHAT = Chat("chatbot", SHAREGPT.inputs, SHAREGPT.outputs)


def _over(other: str, ratio: float) -> Finding:
    """Compare the rate with another system's. The formula has no Orca (Pow2), which lies between
    the others."""
    ours = Capacity(QUIRE, OPT_13B, CHAT)
    known = ORCA_MAX if other == ORCA_POW2 else other
    low = gain(ours, ORCA_ORACLE if other == ORCA_POW2 else other) / NEAR
    high = ours.num_sequences / replace(ours, system=known).num_sequences
    why = (
        f"between the formula less a sixth, and the ratio of requests at once, {high:.2f}: steps"
        " take no less time with more requests"
    )
    return missed(f"sustained rate, quire over {other}", ratio, low, high, "2", why)


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make the figure."""
    load, longer = Load(CHAT, FIRST_RATE, 0.0), replace(effort, seconds=LONGER * effort.seconds)
    found = run_each(runs, sweep, [(system, OPT_13B, load, longer) for system in SYSTEMS])
    sweeps = {each.system: each for each in found}
    sustained = {name: each.sustained for name, each in sweeps.items()}
    lengths = np.array(
        [num for _, num, _ in replace(load, rate_per_s=10.0, seconds=100.0).lengths()]
    )
    at_cut = 100 * float((lengths == MAX_TOKENS).mean())
    findings = [_over(other, sustained[QUIRE] / sustained[other]) for other in SYSTEMS[1:]]
    of_others = [sustained[each] for each in SYSTEMS[1:]]
    spread = max(of_others) / min(of_others)
    findings.append(
        order("fastest Orca over the slowest", spread, 1.0, 1.15, "behave similarly",
              "15 %: a third of the prompts is shorter than the cut")
    )  # fmt: skip
    text = (
        f"{at_cut:.0f} % of the prompts have {MAX_TOKENS} tokens. The buddy allocator gives each"
        " of them"
        " 2,048 slots for an answer of any length, so it matters little what Orca knows of the"
        " answers. The ratio is below the paper's for two reasons. quire's larger batches read"
        " more keys and values in each step, by slower kernels. And prompts, a sixth of the time,"
        " are as long for all systems. As in the paper, nothing is cached between turns."
        " [Chat turns](kv-cache.md#chat-turns) shows what caching gains."
    )
    return [
        Figure(
            "fig_17",
            "A chatbot: OPT-13B, ShareGPT-like conversations",
            "P fig. 17, 6.5",
            "requests per second",
            "normalized latency (s per token)",
            [each.curve for each in found],
            findings,
            text,
            y_limit=PLOTTED_S,
            seconds=longer.seconds,
            rates=[each.rates for each in found],
        )
    ]
