"""Pieces `llama-8b`, `qwen3-0.6b`, `qwen3-30b-a3b`, `quantised` and `modes`: whole models with
random weights.

Every line shows the least time that the model's bytes and operations allow. Its context is the mean
of the measured steps. Prompts differ, and no prefixes are cached. An aim is a share of the
limit that piece `limits` measured on this device. `predicted` is the model of time's prediction
with these limits.
"""

import importlib.util
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.gpu.context import Bench
from benchmarks.gpu.engine import (
    PROFILED_STEPS,
    best_decode,
    decode,
    engine,
    generate_tokens,
    known_settings,
)
from benchmarks.gpu.floors import H200, Cost, decode_cost, run_floor_s, step_cost
from benchmarks.gpu.idle import DeviceProfile, Idle, Interval, idle_of, largest_kernels
from benchmarks.gpu.report import Row, duration, timed_row
from benchmarks.gpu.time_model import CHANGES, EXPECTED, REPEATED, Machine, Model, Program, Step
from benchmarks.gpu.workload import (
    LONGEST,
    NUM_REQUESTS,
    SHORTEST,
    Request,
    num_output,
    random_requests,
)
from quire.ops.registry import record_ops
from quire.serve.python.llm import LLM
from quire.spec.model_spec import DTYPE_BYTES, ModelSpec

LLAMA, SMALL, MIXTURE = "shape:llama-3.1-8b", "shape:qwen3-0.6b", "shape:qwen3-30b-a3b"
PIECEWISE_RATIO = 1.05
ROUNDS = 2
PROMPTS = (1040, 2048, 8192)
MAX_LEN = 8704


@dataclass(frozen=True)
class Cases:
    """The lines of one engine. label: before their names, if there are several engines."""

    bench: Bench
    llm: LLM
    label: str = ""
    program: Program = EXPECTED  # whose predictions are printed

    def decode(
        self,
        batch: int,
        context: int,
        *,
        steps: int = 64,
        share: float | None = None,
        rounds: int = ROUNDS,
        widths: tuple[float, float] | None = None,
    ) -> None:
        """Measure a line of decoding. share: least share of the limit. widths: bytes of a weight
        and of a number of keys and values, if not the width of the model's dtype."""
        bench, name = self.bench, self._name(f"batch {batch}, context {context}")
        spec, memory = self.llm.engine.spec, self.llm.engine.memory
        if bench.is_tiny:
            batch, context, steps = min(batch, 2), 40, 4
        cost = stored_cost(spec, batch, context, widths)
        if cost.kv_bytes > memory.pool_bytes:
            sizes = f"{cost.kv_bytes / 2**30:.0f} of {memory.pool_bytes / 2**30:.0f} GiB"
            bench.report.skip(name, f"its keys and values need {sizes}")
            return

        def measure() -> None:
            times = best_decode(bench, self.llm, batch, context, steps, rounds)
            detail = times.detail | {"tokens/s": f"{batch / times.mean_s:,.0f}"}
            detail |= {} if widths else predicted(bench, spec, Step(batch, context), self.program)
            row = timed_row(
                name, times.mean_s, cost, bench.measured, min_share=share, detail=detail
            )
            bench.report.add(row)

        bench.attempt(name, measure)

    def prompt(self, length: int, share: float | None = None) -> None:
        """Measure the time from the request to its one token; the median of several prompts."""
        bench, name = self.bench, self._name(f"prompt of {length}")
        length = bench.pick(length, 40)

        def measure() -> None:
            spec = self.llm.engine.spec
            prompts = random_requests(spec.vocab_size, bench.pick(8, 3), length, length, seed=1)
            took = [timed_requests(self.llm, [Request(each.prompt, 1)]) for each in prompts]
            first, took = took[0], sorted(took[1:])
            detail = {"first": first, "fastest": took[0], "slowest": took[-1]}
            words = {key: duration(value) for key, value in detail.items()}
            row = timed_row(
                name,
                took[len(took) // 2],
                step_cost(spec, [(length, length)]),
                bench.measured,
                min_share=share,
                detail=words | predicted(bench, spec, Step(0, length)),
            )
            bench.report.add(row)

        bench.attempt(name, measure)

    def idle(self, batch: int, context: int, max_idle: float) -> None:
        """Measure the device's idle share over steady steps, and the largest gaps."""
        bench, name = self.bench, self._name(f"idle, {batch} rows, context {context}")
        if not bench.is_cuda:
            bench.report.skip(name, "there is no profile of a CPU's idle time")
            return

        def measure() -> None:
            profile = DeviceProfile()
            try:
                decode(bench, self.llm, batch, context, PROFILED_STEPS + 8, profile)
            finally:
                profile.close()
            unprofiled = self._name(f"batch {batch}, context {context}")
            steps_s = [row.seconds for row in bench.report.rows if row.case == unprofiled]
            step_s = steps_s[-1] if steps_s else None
            row = idle_row(name, idle_of(profile.intervals), max_idle, step_s)
            calls = {"calls into CUDA": f"{len(profile.calls) / PROFILED_STEPS:.1f}"}
            bench.report.add(replace(row, detail=row.detail | calls))
            bench.report.facts[name] = largest(profile.intervals, profile.calls)
            bench.report.write()

        bench.attempt(name, measure)

    def requests(self) -> None:
        """Measure the output tokens per second of requests of many lengths, all at once. The better
        of two runs counts."""
        bench = self.bench
        num, shortest, longest = (4, 5, 20) if bench.is_tiny else (NUM_REQUESTS, SHORTEST, LONGEST)
        name = self._name(f"{num} requests of {shortest}-{longest} + {shortest}-{longest}")

        def measure() -> None:
            spec = self.llm.engine.spec
            requests = random_requests(spec.vocab_size, num, shortest, longest)
            timed_requests(self.llm, [Request(each.prompt, 4) for each in requests[:32]])
            took = [timed_requests(self.llm, requests)]
            if took[0] < bench.left_s / 2:
                took.append(timed_requests(self.llm, requests))
            floor_s, measured_s = run_floors(bench, spec, [each.lengths for each in requests])
            count, best = num_output(requests), min(took)
            detail = {"output tokens": count, "seconds": [round(t, 3) for t in took]}
            figure = f"{count / best:,.0f} tokens/s"
            aim = "ahead of every peer"
            bench.report.add(Row(name, best, floor_s, measured_s, figure, aim, None, detail))

        bench.attempt(name, measure)

    def _name(self, case: str) -> str:
        return f"{self.label}: {case}" if self.label else case


def timed_requests(llm: LLM, requests: Sequence[Request]) -> float:
    """Return the seconds until all requests are answered. Raises ValueError if an output is too
    short."""
    began = time.perf_counter()
    tokens = generate_tokens(llm, requests)
    took = time.perf_counter() - began
    if [len(each) for each in tokens] != [request.output_len for request in requests]:
        raise ValueError("an output has another length than was asked for")
    return took


def run_floors(
    bench: Bench, spec: ModelSpec, lengths: Sequence[tuple[int, int]]
) -> tuple[float, float | None]:
    """Return the floors of requests, by the limits of the aims and by the measured ones."""
    measured = run_floor_s(spec, lengths, bench.measured) if bench.measured else None
    return run_floor_s(spec, lengths, H200), measured


def idle_row(name: str, found: Idle, max_idle: float, step_s: float | None) -> Row:
    """Return a row of idle time. step_s: time of a step without the profiler, which makes steps
    longer. The second figure is the busy time against step_s, and the smaller of the two counts."""
    busy_s = found.busy_s / PROFILED_STEPS
    detail = {
        "busy in a step": duration(busy_s),
        "step, profiled": duration(found.span_s / PROFILED_STEPS),
        "launches": f"{found.num_kernels / PROFILED_STEPS:.0f}",
        "largest gap": duration(found.gaps[0].seconds) if found.gaps else "none",
    }
    share = found.share
    if step_s:
        unprofiled = max(0.0, 1.0 - busy_s / step_s)
        detail["idle without the profiler"] = f"{unprofiled:.2%}"
        share = min(share, unprofiled)
    figure, aim = f"{found.share:.2%} idle", f"<= {max_idle:.0%}"
    return Row(name, figure=figure, aim=aim, is_reached=share <= max_idle, detail=detail)


def largest(
    intervals: Sequence[Interval], calls: Sequence[Interval]
) -> dict[str, list[tuple[str, ...]]]:
    """Return the largest gaps, and the kernels and calls into CUDA with the most time of a step,
    also printed."""
    gaps = [(duration(gap.seconds), gap.before, gap.after) for gap in idle_of(intervals).gaps]
    kernels = [
        (duration(seconds / PROFILED_STEPS), name) for name, seconds in largest_kernels(intervals)
    ]
    called = [(duration(took / PROFILED_STEPS), name) for name, took in largest_kernels(calls)]
    for took, before, after in gaps:
        print(f"    gap of {took} from {before[:60]} to {after[:60]}")
    for took, kernel in kernels + called:
        print(f"    {took} of a step: {kernel[:90]}", flush=True)
    return {"gaps": list(gaps), "kernels": list(kernels), "calls": list(called)}


def run_llama(bench: Bench) -> None:
    """Run piece `llama-8b`: the most informative lines first."""
    with engine(bench, LLAMA, max_model_len=MAX_LEN, max_num_seqs=256) as llm:
        cases = Cases(bench, llm)
        cases.decode(1, 512, steps=128, share=0.86)
        cases.decode(64, 512, share=0.80)
        for length in PROMPTS:
            cases.prompt(length, 0.84 if length == 2048 else None)
        cases.decode(256, 512, share=0.74)
        cases.idle(256, 512, 0.02)
        for batch in (32, 128):
            cases.decode(batch, 512, share=0.80)
        cases.decode(256, 2048, steps=32, share=0.80, rounds=1)
    bench.attempt("switched on", lambda: switched_cases(bench, LLAMA, (64, 1, 32)))


def run_small(bench: Bench) -> None:
    """Run piece `qwen3-0.6b`."""
    with engine(bench, SMALL, max_model_len=MAX_LEN, max_num_seqs=256) as llm:
        cases = Cases(bench, llm)
        cases.decode(1, 512, steps=256, share=0.47)
        cases.idle(1, 512, 0.10)
        for batch in (32, 128, 256):
            cases.decode(batch, 512)
        for length in PROMPTS:
            cases.prompt(length)
        cases.requests()
    bench.attempt("switched on", lambda: switched_cases(bench, SMALL, (1, 32)))


def switched_cases(bench: Bench, model: str, batches: Sequence[int]) -> None:
    """Measure decoding at 512 tokens with all code that is behind a switch until a GPU has run
    it."""
    with switches_on(), engine(bench, model, max_model_len=1024, max_num_seqs=64) as llm:
        cases = Cases(bench, llm, "switched on", CHANGES[REPEATED])
        for batch in batches:
            cases.decode(batch, 512)


@contextmanager
def switches_on() -> Iterator[None]:
    """Set the environment variables of SWITCHES for the block."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from quire.ops.kernels.launch import SWITCHES, overlaps, prepares

    before = {name: os.environ.get(name) for name in SWITCHES}
    os.environ.update(dict.fromkeys(SWITCHES, "1"))
    overlaps.cache_clear()
    prepares.cache_clear()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        overlaps.cache_clear()
        prepares.cache_clear()


# Settings, and bytes of a weight and of a number of keys and values.
QUANTISED: dict[str, tuple[dict[str, Any], tuple[float, float]]] = {
    "w4a16": ({"quantization": "int4"}, (0.5 + 4 / 32, 2)),
    "fp8": ({"quantization": "fp8"}, (1, 2)),
    "int8": ({"quantization": "int8"}, (1, 2)),
    "fp8 KV": ({"kv_cache_dtype": "fp8"}, (2, 1)),
    "int8 KV": ({"kv_cache_dtype": "int8"}, (2, 1 + 4 / 128)),
}


def run_quantised(bench: Bench) -> None:
    """Run piece `quantised`: Llama-3.1-8B with weights, keys and values of 4 and 8 bits."""
    for name, (settings, widths) in QUANTISED.items():
        if bench.is_tiny and "fp8" in name:
            continue  # Triton's interpreter is slow with it

        def measure(n: str = name, s: dict[str, Any] = settings, w: Any = widths) -> None:
            with engine(bench, LLAMA, max_model_len=2304, max_num_seqs=64, **s) as llm:
                cases = Cases(bench, llm, n)
                cases.decode(1, 512, widths=w)
                cases.decode(32, 2048, steps=32, rounds=1, widths=w)

        bench.attempt(name, measure)


def stored_cost(
    spec: ModelSpec, batch: int, context: int, widths: tuple[float, float] | None
) -> Cost:
    """Return the cost of a decoding step, as if the head were as narrow as the other weights."""
    cost = decode_cost(spec, batch, context)
    if widths is None:
        return cost
    weight, kv = (width / DTYPE_BYTES[spec.dtype] for width in widths)
    return replace(cost, num_bytes=cost.num_bytes * weight, kv_bytes=cost.kv_bytes * kv)


def predicted(
    bench: Bench, spec: ModelSpec, step: Step, program: Program = EXPECTED
) -> dict[str, str]:
    """Return the model's prediction of a dense decoder's step, for the details of a row."""
    if bench.measured is None or spec.experts is not None:
        return {}
    model = Model(spec, Machine(bench.measured, bench.num_cores), program)
    return {"predicted": duration(model.step_ms(step) / 1e3)}


def run_mixture(bench: Bench) -> None:
    """Run piece `qwen3-30b-a3b`."""
    with engine(bench, MIXTURE, max_model_len=2304, max_num_seqs=64) as llm:
        cases = Cases(bench, llm)
        cases.decode(32, 512, share=0.75)
        cases.decode(1, 512)
        bench.attempt("experts that are hit", lambda: count_experts(bench, llm))
        cases.prompt(2048)


def count_experts(bench: Bench, llm: LLM) -> None:
    """Count the experts that 32 tokens of one step choose. The floor assumes an even choice, which
    random weights need not make. Work outside of this thread is not seen."""
    requests = random_requests(llm.engine.spec.vocab_size, bench.pick(32, 3), 1, 1, seed=3)
    with record_ops(keeps_values=True) as record:
        generate_tokens(llm, [Request(request.prompt, 1) for request in requests])
    hits = [len(call.result[0].unique()) for call in record.calls if call.name == "moe_route"]
    if not hits:
        bench.report.skip("experts that are hit", "no routing was seen in this thread")
        return
    mean = sum(hits) / len(hits)
    bench.report.add(Row("experts hit by 32 tokens", figure=f"{mean:.1f} of a layer"))


MODES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("full", {"compilation": "full"}),
    ("piecewise", {"compilation": "piecewise"}),
    ("eager", {"enforce_eager": True}),
    ("deterministic", {"deterministic": True}),
)


def run_modes(bench: Bench) -> None:
    """Run piece `modes`: Llama-3.1-8B, one request of 4000 + 50 tokens, in each mode of a step (T
    fig. 4.6)."""
    found: dict[str, float] = {}
    for name, settings in MODES:
        missing = settings.keys() - known_settings()
        if missing:
            bench.report.skip(name, f"this version has no settings {sorted(missing)}")
            continue
        if "deterministic" in settings and not bench.is_cuda:
            bench.report.skip(name, "a CPU has no such mode")
            continue
        bench.attempt(name, lambda n=name, s=settings: mode_case(bench, n, s, found))


def mode_case(bench: Bench, name: str, settings: dict[str, Any], found: dict[str, float]) -> None:
    """Measure one line; found: the times of the earlier modes."""
    prompt, output = (40, 6) if bench.is_tiny else (4000, 50)
    with engine(bench, LLAMA, max_model_len=4096, max_num_seqs=8, **settings) as llm:
        spec = llm.engine.spec
        requests = [
            Request(each.prompt, output)
            for each in random_requests(spec.vocab_size, 4, prompt, prompt, seed=2)
        ]
        timed_requests(llm, requests[:1])
        took = sorted(timed_requests(llm, [request]) for request in requests[1:])
    seconds = found[name] = took[len(took) // 2]
    row = Row(f"4000 + 50, {name}", seconds, *run_floors(bench, spec, [(prompt, output)]))
    if "full" in found and name != "full":
        ratio = seconds / found["full"]
        row = replace(row, detail={"of full": f"{ratio:.3f} x"})
        if name == "piecewise":
            is_reached = ratio <= PIECEWISE_RATIO
            row = replace(row, aim=f"<= {PIECEWISE_RATIO} x full", is_reached=is_reached)
    bench.report.add(row)
