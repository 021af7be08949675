"""Measure a model's throughput on this machine, as a share of the machine's limits.

    quire bench throughput --model shape:qwen3-0.6b --num-prompts 16 --input-len 128

All requests arrive at once, and none ends before its last token. The printed totals and the JSON
keys are the same as in `vllm bench throughput`.
"""

import argparse
import statistics
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from quire.base.events import Event, Planned
from quire.base.requests.sampling_params import SamplingParams
from quire.engine.start.build import Engine
from quire.models.checkpoint.formats import weight_formats
from quire.serve.python.llm import LLM
from quire.tools.bench.datasets import BenchRequest, make_requests
from quire.tools.bench.tokens import LocalTokens
from quire.tools.limits import Limits, StepCost, measure_limits, step_cost
from quire.tools.report import print_head, write_report

MIB = 1 << 20
MAX_ROWS = 64  # up to this number of requests, all run at the same time


@dataclass(frozen=True)
class Step:
    """One step of the engine: its rows, tokens and duration."""

    num_rows: int
    num_tokens: int
    duration_s: float

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_rows


@dataclass
class StepTimes:
    """Records plans from an engine's events. A step lasts until the next plan, or the end."""

    plans: list[Planned] = field(default_factory=list)

    @classmethod
    def of(cls, llm: LLM) -> "StepTimes":
        times = cls()
        llm.engine.client.core.subscribe(times)
        return times

    def __call__(self, event: Event) -> None:
        if isinstance(event, Planned):
            self.plans.append(event)

    def steps(self, end_s: float) -> list[Step]:
        times = [plan.at_s for plan in self.plans] + [end_s]
        return [
            Step(plan.num_rows, plan.num_tokens, after - before)
            for plan, before, after in zip(self.plans, times, times[1:], strict=False)
        ]


@dataclass(frozen=True)
class Run:
    """One measured run."""

    elapsed_s: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    steps: list[Step]
    token_ids: list[list[int]]
    num_cached_tokens: list[int]

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


def greedy(output_len: int) -> SamplingParams:
    """Return parameters for exactly `output_len` tokens with greedy sampling."""
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)


def run_once(
    llm: LLM, times: StepTimes, prompts: list[list[int]], output_len: int, resets: bool = True
) -> Run:
    """Run `run_requests` with outputs of one length."""
    requests = [BenchRequest(prompt, len(prompt), output_len) for prompt in prompts]
    return run_requests(llm, times, requests, resets)


def run_requests(
    llm: LLM, times: StepTimes, requests: list[BenchRequest], resets: bool = True
) -> Run:
    """Run requests and measure them. `times` must listen to this LLM.

    resets: whether to empty the prefix cache first."""
    if resets:
        llm.reset_prefix_cache()
    times.plans.clear()
    began = time.monotonic()  # the engine's clock
    outputs = llm.generate(
        [request.prompt for request in requests],
        [greedy(request.output_len) for request in requests],
        use_tqdm=False,
    )
    ended = time.monotonic()
    token_ids = [list(output.outputs[0].token_ids) for output in outputs]
    return Run(
        elapsed_s=ended - began,
        num_requests=len(requests),
        num_prompt_tokens=sum(request.prompt_len for request in requests),
        num_output_tokens=sum(map(len, token_ids)),
        steps=times.steps(ended),
        token_ids=token_ids,
        num_cached_tokens=[output.num_cached_tokens or 0 for output in outputs],
    )


@dataclass(frozen=True)
class Share:
    """A run's share of the machine's limits. `of_limit` compares each step with its own limit."""

    flops_per_s: float
    of_flops: float
    decode_step_s: float
    decode_bytes_per_s: float
    of_bytes: float
    of_limit: float


def share_of_limits(run: Run, cost: StepCost, limits: Limits) -> Share:
    """Compare a run with the limits. The decode step is the median of steps at maximum rows."""
    decode = [step for step in run.steps if step.is_decode]
    max_rows = max((step.num_rows for step in decode), default=0)
    full = [step.duration_s for step in decode if step.num_rows == max_rows]
    decode_s = statistics.median(full) if full else float("nan")
    # A prompt's chunk samples only at its end; counting all its rows as sampling is close enough.
    flops = sum(cost.flops(step.num_tokens, step.num_rows) for step in run.steps)
    limit_s = sum(cost.min_s(step.num_tokens, step.num_rows, limits) for step in run.steps)
    return Share(
        flops_per_s=flops / run.elapsed_s,
        of_flops=flops / run.elapsed_s / limits.flops_per_s,
        decode_step_s=decode_s,
        decode_bytes_per_s=cost.weight_bytes / decode_s,
        of_bytes=cost.weight_bytes / decode_s / limits.bytes_per_s,
        of_limit=limit_s / run.elapsed_s,
    )


def print_run(run: Run) -> None:
    """Print vLLM's lines, and the mean lengths of requests."""
    print(
        f"Throughput: {run.num_requests / run.elapsed_s:.2f} requests/s, "
        f"{run.num_tokens / run.elapsed_s:.2f} total tokens/s, "
        f"{run.num_output_tokens / run.elapsed_s:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {run.num_prompt_tokens}")
    print(f"Total num output tokens:  {run.num_output_tokens}")
    print(
        f"Mean tokens per request:  {run.num_prompt_tokens / run.num_requests:.1f} prompt,"
        f" {run.num_output_tokens / run.num_requests:.1f} output",
        flush=True,
    )


def print_share(share: Share, cost: StepCost, limits: Limits) -> None:
    """Print the results as shares of the limits."""
    print(
        f"Arithmetic: {share.flops_per_s / 1e9:,.1f} GFLOP/s, {share.of_flops:.0%} of the"
        f" {limits.flops_per_s / 1e9:,.1f} of a large matrix product"
    )
    print(
        f"Decode step: {share.decode_step_s * 1e3:.1f} ms for {cost.weight_bytes / MIB:,.0f} MiB of"
        f" weights, {share.decode_bytes_per_s / 1e9:.1f} GB/s, {share.of_bytes:.0%} of the"
        f" {limits.bytes_per_s / 1e9:.1f} of a long read"
    )
    print(f"Share of the limit: {share.of_limit:.0%} (of the tighter limit in each step)")


def results(
    model: str, runs: list[Run], cost: StepCost, limits: Limits, engine: Engine
) -> dict[str, Any]:
    """Return the keys of `vllm bench throughput` for the median run, and quire's own keys."""
    run = median_run(runs)
    return {
        "model_id": model,
        "elapsed_time": run.elapsed_s,
        "num_requests": run.num_requests,
        "total_num_tokens": run.num_tokens,
        "requests_per_second": run.num_requests / run.elapsed_s,
        "tokens_per_second": run.num_tokens / run.elapsed_s,
        "output_tokens_per_second": run.num_output_tokens / run.elapsed_s,
        "elapsed_times": [each.elapsed_s for each in runs],
        "dtype": engine.config.model.dtype,
        "share_of_limits": asdict(share_of_limits(run, cost, limits)),
        "limits": asdict(limits),
        "steps": [asdict(step) for step in run.steps],
    }


def median_run(runs: list[Run]) -> Run:
    """Return the median run; of an even number the slower one of the middle."""
    return sorted(runs, key=lambda run: run.elapsed_s)[len(runs) // 2]


def settings_for(requests: list[BenchRequest], given: dict[str, Any]) -> dict[str, Any]:
    """Return the given engine settings, with defaults that are large enough for the requests."""
    longest = max(request.prompt_len + request.output_len for request in requests)
    settings = {"model": "demo", "max_model_len": longest} | given
    if len(requests) <= MAX_ROWS:
        settings.setdefault("max_num_seqs", len(requests))
    return settings


def described(requests: list[BenchRequest]) -> str:
    """Return a text about the lengths of prompts and outputs, and their totals."""
    prompts = [request.prompt_len for request in requests]
    outputs = [request.output_len for request in requests]
    return (
        f"each with {_range(prompts)} prompt tokens and {_range(outputs)} output tokens;"
        f" {sum(prompts):,} prompt tokens and {sum(outputs):,} output tokens in all"
    )


def _range(lengths: list[int]) -> str:
    shortest, longest = min(lengths), max(lengths)
    return f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"


def measure_rounds(
    llm: LLM, requests: list[BenchRequest], options: argparse.Namespace
) -> list[Run]:
    """Run the warm-ups, then return the measured runs."""
    times = StepTimes.of(llm)
    for _ in range(options.num_warmups):
        run_requests(llm, times, [replace(request, output_len=4) for request in requests])
    return [run_requests(llm, times, requests) for _ in range(options.rounds)]


def run(options: argparse.Namespace, given: dict[str, Any]) -> int:
    """Run the command with the engine's given settings; return the exit status."""
    model, revision = given.get("model", "demo"), given.get("revision")
    tokens = LocalTokens(model, given.get("tokenizer"), revision)
    requests = make_requests(options, tokens, given.get("seed", 0))
    print_head(f"{model}: {len(requests)} requests ({options.dataset_name}), {described(requests)}")
    with LLM(**settings_for(requests, given)) as llm:
        engine = llm.engine
        dtype = getattr(torch, engine.config.model.dtype)
        device = torch.device(engine.config.device)
        formats = weight_formats(engine.config.model)
        limits = measure_limits(dtype, device, formats.layers)
        runs = measure_rounds(llm, requests, options)
        limits = limits.better(measure_limits(dtype, device, formats.layers))
        cost = step_cost(engine.spec, dtype, formats)
        print_run(median_run(runs))
        print_share(share_of_limits(median_run(runs), cost, limits), cost, limits)
        write_report(options.output_json, results(model, runs, cost, limits, engine))
    return 0
