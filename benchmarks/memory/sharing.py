"""Measure the KV blocks that parallel samples and beams save by sharing them (P fig. 15).

    python -m benchmarks.memory.sharing [--model ""]

The paper's figure divides the blocks saved by sharing by the blocks without sharing. Both are
summed over the steps, which is their mean with many requests at once. Lengths are as in P fig. 11,
blocks have 16 tokens, and the pool is large enough to avoid preemption. The scheduler has no model;
all sequences of a request get the length drawn for it.

Samples share only the full blocks of the prompt, so their figure follows from the lengths. A
request runs for o steps, with o / 2 output tokens on average, so that long outputs weigh more:

    saved = (n - 1) / n * p / (p + r)    p: mean prompt length; r = E[o ** 2] / (2 E[o])

`means` is this; `blocks` is the same sum over whole blocks. The last block of a prompt is shared
only if it is full, or until a sequence writes into it. P's range is computed in the same way. Ours
differs by the spread of the lengths, which determines r. The spread is our choice
(tools/workloads.py), as P gives means only.

Beams share their common tokens, which depend on the model. `sure`: the chance that two draws from
its distribution agree. `is_equal`: the share of positions in which all beams of a request have the
same candidates (virtual/branching.py). `depth`: the number of tokens since the beams split; the
prompt and all earlier tokens are stored once. If beams choose independently of each other, one soon
wins, and the depth is small. If they continue in the same way, the surviving beams differ anywhere
in the output. A text has both, so P's figure lies between the columns.

Then the demo model, on held-out questions, copies and lists of its curriculum: each search until it
ends, and for 128 tokens. Its `sure` is measured along greedy answers.
"""

import random
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from benchmarks.result_files import options_of, write
from benchmarks.virtual.branching import BranchingExecutor, group_request
from benchmarks.virtual.dry_run import VOCAB_SIZE, dry_run
from demo_model import curriculum
from quire.base.events import Preempted
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.config import SchedulerConfig
from quire.scheduler.core.sequence import Sequence
from quire.scheduler.scheduler import Scheduler
from quire.serve.python.llm import LLM
from quire.tools.report import benchmark_parser, print_head
from quire.tools.workloads import ALPACA, SHAREGPT, Workload

MAX_LEN = 2048
BLOCK_SIZE = 16
NUMS = (2, 4, 6)
MODELS = (
    (0.4, 0.0),
    (0.8, 0.0),
    (0.9, 0.0),
    (0.8, 0.9),
    (0.8, 0.98),
    (0.8, 1.0),
)  # sure, `is_equal`
PAPER = {  # at 2 and at 6, as in the text; what its bars show at 4 is not said there
    ("samples", ALPACA.name): (0.061, 0.098),
    ("samples", SHAREGPT.name): (0.162, 0.305),
    ("beams", ALPACA.name): (0.376, 0.552),
    ("beams", SHAREGPT.name): (0.443, 0.663),
}
DEPTH_EVERY = 16  # steps
DEMO_KINDS = ("questions", "copying", "json")


@dataclass
class Meter:
    """Reads a scheduler after each plan. held: blocks if every sequence had its own."""

    num_used: int = 0
    num_unshared: int = 0
    depths: list[int] = field(default_factory=list)
    num_read: int = 0

    def read(self, scheduler: Scheduler) -> None:
        running = scheduler.rows.sequences()
        self.num_used += scheduler.memory.kv.pools[0].num_used
        self.num_unshared += sum(len(member.blocks.tables[0].live_blocks) for member in running)
        if self.num_read % DEPTH_EVERY == 0:
            self._read_depths(running)
        self.num_read += 1

    def _read_depths(self, running: list[Sequence]) -> None:
        groups: dict[str, list[Sequence]] = defaultdict(list)
        for sequence in running:
            groups[sequence.request.request_id].append(sequence)
        for members in groups.values():
            tokens = np.stack([member.known_tokens for member in members])
            differing = np.flatnonzero((tokens != tokens[0]).any(0))
            self.depths.append(tokens.shape[1] - int(differing[0]) if len(differing) else 0)

    @property
    def saved(self) -> float:
        return 1 - self.num_used / self.num_unshared

    @property
    def depth(self) -> float:
        return float(np.mean(self.depths))


@dataclass(frozen=True)
class Measured:
    """One line of the tables."""

    method: str
    workload: str
    num: int
    saved: float
    sureness: float | None = None
    is_equal: float | None = None
    depth: float | None = None
    from_means: float | None = None
    from_blocks: float | None = None
    paper: float | None = None


def dry_meter(
    workload: Workload, num: int, options: Any, num_requests: int, model: tuple[float, float] | None
) -> Meter:
    """Run requests to their ends. model: `sure` and `is_equal`; None for samples."""
    num_groups = min(num_requests, options.groups)
    rows = num_groups * num
    config = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=num_groups * MAX_LEN)
    num_blocks = rows * MAX_LEN // BLOCK_SIZE
    scheduler, executor = dry_run(num_blocks, BLOCK_SIZE, config, MAX_LEN, False)
    branching = BranchingExecutor(executor, *(model or (0.5, 0.0)))
    inputs, outputs = workload.sample(num_requests, seed=0)
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, MAX_LEN).tolist()
    for i, (num_input, num_output) in enumerate(
        zip(inputs.tolist(), outputs.tolist(), strict=True)
    ):
        request = group_request(str(i), tokens[:num_input], num_output, num, model is not None)
        scheduler.add(request, 0.0)
    meter = Meter()
    while (plan := (decisions := scheduler.schedule(0.0)).plan) is not None:
        meter.read(scheduler)
        branching.submit(plan)
        scheduler.update(branching.next_result(), 0.0)
        assert not any(isinstance(event, Preempted) for event in decisions.events)
    return meter


def share_from_means(inputs: Any, outputs: Any, num: int) -> float:
    """Return the docstring's formula, with the moments of these lengths [requests]."""
    weighted = np.square(outputs, dtype=np.float64).mean() / (2 * outputs.mean())
    return float((num - 1) / num * inputs.mean() / (inputs.mean() + weighted))


def share_from_blocks(inputs: Any, outputs: Any, num: int) -> float:
    """Return blocks saved, over blocks without sharing, both summed over the steps of these
    requests."""
    saved = unshared = 0
    for p, o in zip(inputs.tolist(), outputs.tolist(), strict=True):
        blocks = -(-(p + np.arange(1, o)) // BLOCK_SIZE)
        saved += (num - 1) * (-(-p // BLOCK_SIZE) + (o - 1) * (p // BLOCK_SIZE))
        unshared += num * (-(-p // BLOCK_SIZE) + int(blocks.sum()))
    return saved / unshared


def paper_share(method: str, workload: str, num: int) -> float | None:
    at_2, at_6 = PAPER[method, workload]
    return {2: at_2, 6: at_6}.get(num)


def percent(share: float | None) -> str:
    return f"{'':>7}" if share is None else f"{share:7.1%}"


def samples(options: Any) -> list[Measured]:
    """Measure parallel samples, on both workloads."""
    print("samples         n   saved   means  blocks       P")
    results = []
    for workload in (ALPACA, SHAREGPT):
        lengths = workload.sample(options.sample_requests, seed=0)
        for num in NUMS:
            meter = dry_meter(workload, num, options, options.sample_requests, None)
            got = Measured(
                "samples", workload.name, num, meter.saved,
                from_means=share_from_means(*lengths, num),
                from_blocks=share_from_blocks(*lengths, num),
                paper=paper_share("samples", workload.name, num),
            )  # fmt: skip
            results.append(got)
            shares = (got.saved, got.from_means, got.from_blocks, got.paper)
            print(f"{workload.name:15} {num} {' '.join(map(percent, shares))}", flush=True)
        print_arithmetic(*lengths)
    return results


def print_arithmetic(inputs: Any, outputs: Any) -> None:
    """Print the formula with its numbers."""
    p, half = inputs.mean(), outputs.mean() / 2
    r = np.square(outputs, dtype=np.float64).mean() / (2 * outputs.mean())
    print(
        f"  p {p:.1f}, r {r:.1f}: p / (p + r) = {p / (p + r):.3f}, in blocks"
        f" {2 * share_from_blocks(inputs, outputs, 2):.3f}; times 1/2, 3/4, 5/6.\n"
        f"  If all outputs were of one length, r would be {half:.1f} and p / (p + r)"
        f" {p / (p + half):.3f}."
    )


def beams(options: Any) -> list[Measured]:
    """Measure beam search, on both workloads, for several kinds of model."""
    heads = " ".join(f"{f'{sure:g} {is_equal:g}':>14}" for sure, is_equal in MODELS)
    print("beams             how sure and how alike; saved, and depth in tokens")
    print(f"                w {heads}       P")
    results = []
    for workload in (ALPACA, SHAREGPT):
        for num in NUMS:
            measure = partial(dry_meter, workload, num, options, options.beam_requests)
            with ProcessPoolExecutor(options.processes) as pool:
                meters = list(pool.map(measure, MODELS))
            name, paper = workload.name, paper_share("beams", workload.name, num)
            line = [
                Measured("beams", name, num, meter.saved, *model, meter.depth, paper=paper)
                for model, meter in zip(MODELS, meters, strict=True)
            ]
            cells = " ".join(f"{got.saved:7.1%} {got.depth:6.1f}" for got in line)
            print(f"{workload.name:15} {num} {cells} {percent(line[0].paper)}", flush=True)
            results += line
    return results


def demo_prompts(num_prompts: int) -> list[list[dict[str, str]]]:
    """Return held-out conversations without their answers."""
    rng = random.Random(0)
    kinds = [DEMO_KINDS[i % len(DEMO_KINDS)] for i in range(num_prompts)]
    return [curriculum.one(kind, rng, test=True).messages[:-1] for kind in kinds]


def search_all(llm: LLM, chats: list[Any], params: SamplingParams, num_groups: int) -> Meter:
    """Run all searches, `num_groups` at a time."""
    core, renderer, meter = llm.engine.client.core, llm.engine.renderer, Meter()
    waiting = [llm.engine.requests.make(renderer.render(chat), params) for chat in chats]
    while waiting or core.has_work:
        while waiting and len(core.scheduler.lifecycle.sequences) < num_groups:
            core.add(waiting.pop())
        core.plan()
        meter.read(core.scheduler)
        core.take()
        core.publish()
    return meter


def measured_sureness(llm: LLM, chats: list[Any], ignore_eos: bool, max_tokens: int) -> float:
    """Mean sum of squared probabilities, along greedy answers; the 20 best tokens are enough."""
    params = SamplingParams(
        temperature=0.0, logprobs=20, max_tokens=max_tokens, ignore_eos=ignore_eos
    )
    sums = [
        sum(np.exp(2 * entry.logprob) for entry in position.values())
        for output in llm.chat(chats, params, use_tqdm=False)
        for position in output.outputs[0].logprobs or ()
    ]
    return float(np.mean(sums))


def demo(options: Any) -> list[Measured]:
    """Measure beam search with a real model."""
    chats = demo_prompts(options.prompts)
    results = []
    rows = options.demo_groups * max(NUMS)
    settings = {"max_num_seqs": rows, "pipeline_depth": 1, "enable_prefix_caching": False}
    with LLM(options.model, disable_log_stats=True, max_model_len=1024, **settings) as llm:
        lengths = [len(llm.engine.renderer.render(chat).token_ids) for chat in chats]
        print(
            f"{options.model} model: {len(chats)} chats, {np.mean(lengths):.0f} tokens on average"
        )
        for ignore_eos, name in ((False, "until they end"), (True, "128 tokens")):
            sureness = measured_sureness(llm, chats, ignore_eos, 128)
            for num in NUMS:
                params = SamplingParams(
                    n=num, use_beam_search=True, max_tokens=128, ignore_eos=ignore_eos
                )
                meter = search_all(llm, chats, params, options.demo_groups)
                got = Measured("demo beams", name, num, meter.saved, sureness, depth=meter.depth)
                results.append(got)
                print(
                    f"{name:15} {num} {got.saved:8.1%} {meter.depth:6.1f}   sure {sureness:.2f}",
                    flush=True,
                )
    return results


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--sample-requests", type=int, default=1000)
    parser.add_argument("--beam-requests", type=int, default=128)
    parser.add_argument("--groups", type=int, default=128, help="requests that run at once")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--model", default="demo", help='for real beams; "" leaves them out')
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--demo-groups", type=int, default=8)
    options = parser.parse_args()
    print_head(f"blocks saved by sharing, of those without; blocks of {BLOCK_SIZE}")
    parts: list[Callable[[Any], list[Measured]]] = [samples, beams]
    if options.model:
        parts.append(demo)
    results: list[dict[str, Any]] = []
    for part in parts:
        results += [asdict(got) for got in part(options)]
        settings = options_of(options) | {"block_size": BLOCK_SIZE}
        write(options.output_json, "memory.sharing", results, settings)


if __name__ == "__main__":
    main()
