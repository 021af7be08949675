"""How long steps take on this machine: a real engine runs a spread of them, and a regression tells.

    quire bench calibrate --model demo --output-json demo.json
    quire simulate demo --device cpu --fit demo.json

Requests are drawn so that steps of all kinds come: few and many rows, short and long contexts,
prompts alone and beside others that are decoded.
"""

import argparse
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from quire.base.events import Event, Planned, Stepped
from quire.runner.memory_plan import block_bytes_of
from quire.serve.llm import LLM
from quire.tools.bench.datasets import BenchRequest
from quire.tools.bench.throughput import greedy
from quire.tools.report import print_head
from quire.tools.simulate.fitting import Fitted, Measured, fit_steps, lines_of, write_fitted

MOST_OUTPUT = 24
FEWEST_BATCHES = 6
LONGEST = 4096  # prompts
MOVED = "blocks moved"


@dataclass
class StepListener:
    """Listens to an engine: its plans with their durations, in their order."""

    plans: dict[int, Planned] = field(default_factory=dict)
    steps: list[Measured] = field(default_factory=list)
    _last: Planned | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Planned):
            self.plans[event.step_id] = event
        elif isinstance(event, Stepped):
            planned = self.plans.pop(event.step_id, None)
            if planned is not None and planned.plan is not None:
                self.steps.append(Measured(planned.plan, event.duration_s))
                self._see_host(planned)

    def _see_host(self, planned: Planned) -> None:
        """Note what passed between the plan before and this one beside the step, if rows go on."""
        last, plan = self._last, planned.plan
        self._last = planned
        if last is None or last.plan is None or plan is None or self.plans:
            return
        fresh = {start.row for start in plan.started}
        before = self.steps[-2]
        if set(last.plan.rows.tolist()) & set(plan.rows.tolist()) - fresh:
            host_s = planned.at_s - last.at_s - before.duration_s
            self.steps[-2] = replace(before, host_s=max(0.0, host_s))


def draw_batch(
    rng: np.random.Generator, most_rows: int, longest: int, vocab_size: int
) -> list[BenchRequest]:
    """Draw requests of one call: their number and each one's length evenly over the magnitudes."""
    num = round(2 ** rng.uniform(0, np.log2(2 * most_rows)))
    most = min(LONGEST, max(2, longest - MOST_OUTPUT - 1))
    lengths = np.exp2(rng.uniform(1, np.log2(most), num)).astype(int).tolist()
    return [
        BenchRequest(
            rng.integers(0, vocab_size, length).tolist(),
            length,
            int(rng.integers(2, min(MOST_OUTPUT, longest - length) + 1)),
        )
        for length in lengths
    ]


def run_batches(llm: LLM, seconds: float, seed: int) -> list[Measured]:
    """Run batches for so long; the first one warms up and does not count."""
    config, spec = llm.engine.config, llm.engine.spec
    rng, listener = np.random.default_rng(seed), StepListener()
    llm.engine.client.core.subscribe(listener)
    sizes = config.scheduler.max_num_seqs or 1, config.model.max_model_len or 2
    ends_s, num = time.monotonic() + seconds, 0
    while num <= FEWEST_BATCHES or time.monotonic() < ends_s:
        requests = draw_batch(rng, *sizes, spec.vocab_size)
        prompts = [each.prompt for each in requests]
        params = [greedy(each.output_len) for each in requests]
        llm.generate(prompts, params, use_tqdm=False)
        if num == 0:
            listener.steps.clear()
            listener._last = None
        num += 1
    return listener.steps


def calibrate(llm: LLM, model: str, seconds: float, seed: int) -> Fitted:
    """Measure and fit. What no step has moved is taken from how fast blocks are copied."""
    engine = llm.engine
    steps = run_batches(llm, seconds, seed)
    copied = engine.client.core.executor.copy_bytes_per_s()
    if engine.config.scheduler.pipeline_depth != 1:  # the device does not wait for the host
        steps = [replace(each, host_s=None) for each in steps]
    fitted = fit_steps(steps, copied, model, engine.config.device)
    if not fitted.step[MOVED] and copied:
        move_s = sum(block_bytes_of(engine.config, engine.spec)) / copied
        fitted = replace(fitted, step=fitted.step | {MOVED: move_s})
    return fitted


def run(options: argparse.Namespace, given: dict[str, Any]) -> int:
    """Run the command. given: the engine's settings that were given. Returns the exit status."""
    model = given.get("model", "demo")
    print_head(f"{model}: how long steps take; {options.seconds:g} s")
    settings = {"model": model, "enable_prefix_caching": False} | given
    with LLM(**settings) as llm:
        fitted = calibrate(llm, model, options.seconds, given.get("seed", 0))
    print("\n".join(lines_of(fitted)))
    write_fitted(options.output_json, fitted)
    return 0
