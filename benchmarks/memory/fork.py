"""Measure a fork of a long retained request: the time until the engine has it, and its branches'
blocks.

    python -m benchmarks.memory.fork

A retained request of 32,768 tokens is forked at its last token, into one branch and into several,
repeatedly. The steps are not computed: random weights would take minutes for the prompt, and a fork
computes one token of it. All else is the engine's own. Measured are the call that makes the branch
(`add`), and that call with the plan that begins the branches (`add` + `schedule`). The same is
measured without a branch, where the index finds the prompt.

The limit of `add`: its tokens must be copied and compared, and each block of the request gets a
reference. Their time alone is measured as well. Blocks: one for each branch.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from benchmarks.result_files import keyed, options_of, write
from quire.base.clock import MonotonicClock
from quire.base.messages import Fork, Request
from quire.base.plan import Plan, StepResult
from quire.base.requests.sampling_params import SamplingParams
from quire.base.requests.validation import RequestLimits
from quire.base.settings.config import SchedulerConfig
from quire.engine.loop.core import EngineCore
from quire.kv.manager import KVManager
from quire.scheduler.core.memory import Memory
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup
from quire.tools.report import benchmark_parser, print_head

AIM_MS, BLOCK, VOCAB = 5.0, 16, 151_936
SOURCE = "source"


class Nothing:
    """An executor that computes nothing: every token is the same."""

    def __init__(self) -> None:
        self._plans: list[Plan] = []

    def start(self, on_result: Callable[[], None]) -> None: ...

    def copy_bytes_per_s(self) -> float:
        return 0.0

    def submit(self, plan: Plan, masks: object = None) -> None:
        self._plans.append(plan)

    def is_ready(self) -> bool:
        return bool(self._plans)

    def next_result(self) -> StepResult:
        plan = self._plans.pop(0)
        num = len(plan.sample_rows)
        return StepResult(plan.step_id, np.full((num, 1), 7, np.int32), np.ones(num, np.int32))

    def close(self) -> None: ...


def engine(num_tokens: int, num_branches: int) -> EngineCore:
    """Make a core whose pool has room for the request twice, and for its branches."""
    longest = num_tokens + 64
    config = SchedulerConfig(
        max_num_seqs=num_branches + 1, max_num_batched_tokens=8192, pipeline_depth=1
    )
    num_blocks = 2 * longest // BLOCK + 8 * num_branches
    kv = KVManager((CacheGroup("full", (0,), 1, 8),), (num_blocks,), BLOCK)
    scheduler = Scheduler(Memory(kv, 8192), config, longest)
    executor: Any = Nothing()
    limits = RequestLimits(VOCAB, longest, 0, num_branches + 1)
    return EngineCore(scheduler, executor, MonotonicClock(), limits)


def request(name: str, token_ids: list[int], num: int, **more: Any) -> Request:
    params = SamplingParams(temperature=1.0, max_tokens=4, n=num)
    return msgspec.structs.replace(Request(name, token_ids, params, seed=1), **more)


def finish(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def measured(core: EngineCore, forked: Request) -> tuple[float, float, int]:
    """Return the milliseconds of `add`, those with the first plan, and the blocks that the branches
    took, when each has written behind what they share."""
    free = core.view().num_free_blocks
    start = time.perf_counter()
    core.add(forked)
    added = time.perf_counter()
    core.plan()
    planned = time.perf_counter()
    core.take()
    core.step()
    num_blocks = free - core.view().num_free_blocks
    finish(core)
    return 1e3 * (added - start), 1e3 * (planned - start), num_blocks


def limit_ms(core: EngineCore, token_ids: list[int], rounds: int) -> float:
    """Return what copying the tokens once, and taking a reference to each block, take alone."""
    [held] = core.scheduler.retained.standing
    assert held.blocks is not None
    pool, blocks = core.scheduler.memory.kv.pools[0], held.blocks.tables[0].live_blocks
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        np.asarray(token_ids, np.int32)
        for block_id in blocks:
            pool.acquire(block_id)
        times.append(time.perf_counter() - start)
        for block_id in blocks:
            pool.release(block_id)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--num-tokens", type=int, default=32_768)
    parser.add_argument("--branches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    core = engine(options.num_tokens, options.branches)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCAB, options.num_tokens - 5).tolist()
    core.add(request(SOURCE, prompt, 1, keep_s=86_400.0))
    finish(core)
    [source] = core.held(SOURCE)
    tokens = source.token_ids
    fork = Fork(SOURCE, 0, len(tokens))
    sides = [
        (name, of, n)
        for n in (1, options.branches)
        for name, of in (("forked", fork), ("by name", None))
    ]
    runs: dict[str, list[tuple[float, float, int]]] = {}
    for round_ in range(options.rounds):
        for name, of, num in sides:
            forked = request(f"{name} {num} {round_}", tokens, num, fork=of)
            runs.setdefault(f"{name}, {num}", []).append(measured(core, forked))
    print_head("A fork of a long held request")
    limit = limit_ms(core, tokens, options.rounds)
    report: dict[str, Any] = {}
    for name, found in runs.items():
        add, plan, blocks = (statistics.median(column) for column in zip(*found, strict=True))
        report[name] = {"add_ms": add, "add_and_plan_ms": plan, "num_blocks": blocks}
        print(f"{name:17} add {add:6.2f} ms, with the plan {plan:6.2f} ms, {blocks:.0f} blocks")
    print(f"limit: tokens copied, blocks referenced {limit:.2f} ms; a block a branch")
    one, several = report["forked, 1"], report[f"forked, {options.branches}"]
    is_met = one["add_and_plan_ms"] < AIM_MS and several["num_blocks"] <= options.branches
    print(f"aim: < {AIM_MS:g} ms and at most a block a branch: {'met' if is_met else 'NOT met'}")
    settings = options_of(options) | {"num_tokens": len(tokens), "limit_ms": limit}
    write(options.output_json, "memory.fork", keyed("case", report), settings)


if __name__ == "__main__":
    main()
