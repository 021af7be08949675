"""Measure how long steps take on this machine, and fit a model of their duration.

    quire bench calibrate --model demo --output-json demo.json
    quire simulate demo --device cpu --fit demo.json

An engine runs random requests that produce many kinds of steps. Steps have few or many rows, short
or long contexts, and prompts alone or together with decoding rows. Requests arrive all at once or
one by one, with and without a pause before.
"""

import argparse
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from quire.base.events import Event, Planned, Stepped
from quire.base.messages import Request
from quire.runner.memory_plan import block_bytes_of
from quire.serve.python.llm import LLM
from quire.tools.bench.datasets import BenchRequest
from quire.tools.bench.throughput import greedy
from quire.tools.report import print_head
from quire.tools.step_fitting import Fitted, Measured, fit_steps, lines_of, write_fitted

MAX_OUTPUT = 24
MAX_TRAFFIC = 16  # half the maximum number of requests that arrive one by one
PAUSES = 0.3  # share of requests that follow a pause
PAUSE_S = (0.005, 0.04)
MIN_BATCHES = 6
LONGEST = 4096  # maximum tokens of a prompt
MOVED = "blocks moved"


@dataclass
class StepListener:
    """Records an engine's plans with their durations, in order, from its events."""

    plans: dict[int, Planned] = field(default_factory=dict)
    steps: list[Measured] = field(default_factory=list)
    _last: Planned | None = None
    _ended_s: float | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Planned):
            self.plans[event.step_id] = event
        elif isinstance(event, Stepped):
            planned = self.plans.pop(event.step_id, None)
            if planned is not None and planned.plan is not None:
                idle_s = 0.0 if self._ended_s is None else max(0.0, planned.at_s - self._ended_s)
                self.steps.append(Measured(planned.plan, event.duration_s, idle_s=idle_s))
                self._see_host(planned)
                self._ended_s = event.at_s

    def forget(self) -> None:
        """Drop the recorded steps of the warm-up."""
        self.steps.clear()
        self._last = self._ended_s = None

    def _see_host(self, planned: Planned) -> None:
        """Record the host's time between the previous plan and this one, if rows continue."""
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
    rng: np.random.Generator, max_rows: int, longest: int, vocab_size: int
) -> list[BenchRequest]:
    """Draw one call's requests. Their number and lengths are uniform over orders of magnitude."""
    num = round(2 ** rng.uniform(0, np.log2(2 * max_rows)))
    max_length = min(LONGEST, max(2, longest - MAX_OUTPUT - 1))
    lengths = np.exp2(rng.uniform(1, np.log2(max_length), num)).astype(int).tolist()
    return [
        BenchRequest(
            rng.integers(0, vocab_size, length).tolist(),
            length,
            int(rng.integers(2, min(MAX_OUTPUT, longest - length) + 1)),
        )
        for length in lengths
    ]


class Driver:
    """Makes an engine serve random requests."""

    def __init__(self, llm: LLM, seed: int) -> None:
        config = llm.engine.config
        self._llm, self._client = llm, llm.engine.client
        self._rng = np.random.default_rng(seed)
        self._max_rows = config.scheduler.max_num_seqs or 1
        self._longest = config.model.max_model_len or 2
        self._num_requests = 0

    def run_batch(self) -> None:
        """Serve requests that arrive together."""
        requests = self._draw(self._max_rows)
        params = [greedy(each.output_len) for each in requests]
        self._llm.generate([each.prompt for each in requests], params, use_tqdm=False)

    def run_traffic(self) -> None:
        """Serve requests that arrive one by one.

        Each arrives a few steps after the previous request, or in a pause after all have ended."""
        requests = self._draw(MAX_TRAFFIC)
        for each in requests:
            if self._rng.random() < PAUSES:
                self._advance(None)
                time.sleep(self._rng.uniform(*PAUSE_S))
            self._num_requests += 1
            params, name = greedy(each.output_len), f"calibrate-{self._num_requests}"
            assert isinstance(each.prompt, list), "tokens are drawn"
            self._client.add(Request(name, each.prompt, params, seed=0))
            self._advance(int(self._rng.integers(1, MAX_OUTPUT)))
        self._advance(None)

    def _draw(self, max_rows: int) -> list[BenchRequest]:
        vocab_size = self._llm.engine.spec.vocab_size
        return draw_batch(self._rng, max_rows, self._longest, vocab_size)

    def _advance(self, max_steps: int | None) -> None:
        """Serve until `max_steps` steps are done or all requests have ended."""
        num = 0
        while self._client.num_unfinished and (max_steps is None or num < max_steps):
            num += bool(self._client.advance())


def run_steps(llm: LLM, seconds: float, seed: int) -> list[Measured]:
    """Run batches and traffic for `seconds`. The first round is a warm-up and does not count."""
    driver, listener = Driver(llm, seed), StepListener()
    llm.engine.client.core.subscribe(listener)
    ends_s, num = time.monotonic() + seconds, 0
    while num <= MIN_BATCHES or time.monotonic() < ends_s:
        driver.run_batch()
        driver.run_traffic()
        if num == 0:
            listener.forget()
        num += 1
    return listener.steps


def calibrate(llm: LLM, model: str, seconds: float, seed: int) -> Fitted:
    """Measure and fit. If no step moved blocks, derive that time from the speed of copies."""
    engine = llm.engine
    steps = run_steps(llm, seconds, seed)
    copied = engine.client.core.executor.copy_bytes_per_s()
    if engine.config.scheduler.pipeline_depth != 1:  # the device does not wait for the host
        steps = [replace(each, host_s=None) for each in steps]
    fitted = fit_steps(steps, copied, model, engine.config.device)
    if not fitted.step[MOVED] and copied:
        move_s = sum(block_bytes_of(engine.config, engine.spec)) / copied
        fitted = replace(fitted, step=fitted.step | {MOVED: move_s})
    return fitted


def run(options: argparse.Namespace, given: dict[str, Any]) -> int:
    """Run the command with the engine's given settings; return the exit status."""
    model = given.get("model", "demo")
    print_head(f"{model}: how long steps take; {options.seconds:g} s")
    settings = {"model": model, "enable_prefix_caching": False} | given
    with LLM(**settings) as llm:
        fitted = calibrate(llm, model, options.seconds, given.get("seed", 0))
    print("\n".join(lines_of(fitted)))
    write_fitted(options.output_json, fitted)
    return 0
