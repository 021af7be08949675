"""Pieces `llama-8b`, `qwen3-0.6b`, `qwen3-30b-a3b` and `modes`: whole models with random weights.

Every line shows the least time that the model's bytes and operations allow. Its context is the mean
of the measured steps. Prompts differ, and no prefixes are cached.
"""

import time
from collections.abc import Sequence
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
from benchmarks.gpu.floors import H200, decode_cost, run_floor_s, step_cost
from benchmarks.gpu.idle import DeviceProfile, Idle, Interval, idle_of, largest_kernels
from benchmarks.gpu.report import Row, duration, timed_row
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
from quire.spec.model_spec import ModelSpec

LLAMA, SMALL, MIXTURE = "shape:llama-3.1-8b", "shape:qwen3-0.6b", "shape:qwen3-30b-a3b"
BEST_PUBLISHED_S = 1.67e-3  # of a token of Qwen3-0.6B, batch 1
PIECEWISE_RATIO = 1.05
ROUNDS = 2
DEPTH_TWO = "two plans in flight"  # measured as well, where one is the default


@dataclass(frozen=True)
class Cases:
    """The lines of one engine. label: before their names, if there are several engines."""

    bench: Bench
    llm: LLM
    label: str = ""

    def decode(
        self,
        batch: int,
        context: int,
        *,
        steps: int = 64,
        aim_s: float | None = None,
        factor: float | None = None,
        aim: str = "",
        rounds: int = ROUNDS,
    ) -> None:
        """Measure a line of decoding. aim_s, or factor times the floor: the maximum time of a step;
        aim: the same in words."""
        bench, name = self.bench, self._name(f"batch {batch}, context {context}")
        if bench.is_tiny:
            batch, context, steps = min(batch, 2), 40, 4

        def measure() -> None:
            cost = decode_cost(self.llm.engine.spec, batch, context)
            max_s = factor * cost.lower_bound_s(H200) if factor is not None else aim_s
            times = best_decode(bench, self.llm, batch, context, steps, rounds)
            detail = times.detail | {"tokens/s": f"{batch / times.mean_s:,.0f}"}
            row = timed_row(name, times.mean_s, cost, bench.measured, aim_s=max_s, detail=detail)
            words = aim or (f"<= {factor} x floor" if factor is not None else row.aim)
            bench.report.add(replace(row, aim=words))

        bench.attempt(name, measure)

    def prompt(self, length: int, aim_s: float | None = None, aim: str = "") -> None:
        """Measure the time from the request to its one token; the median of several prompts."""
        bench, name = self.bench, self._name(f"prompt of {length}")
        length = bench.pick(length, 40)

        def measure() -> None:
            spec = self.llm.engine.spec
            prompts = random_requests(spec.vocab_size, bench.pick(8, 3), length, length, seed=1)
            took = [timed_requests(self.llm, [Request(each.prompt, 1)]) for each in prompts]
            first, took = took[0], sorted(took[1:])
            detail = {"first": first, "fastest": took[0], "slowest": took[-1]}
            row = timed_row(
                name,
                took[len(took) // 2],
                step_cost(spec, [(length, length)]),
                bench.measured,
                aim_s=aim_s,
                detail={key: duration(value) for key, value in detail.items()},
            )
            bench.report.add(replace(row, aim=aim))

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
            bench.report.add(idle_row(name, idle_of(profile.intervals), max_idle, step_s))
            bench.report.facts[name] = largest(profile.intervals)
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


def largest(intervals: Sequence[Interval]) -> dict[str, list[tuple[str, ...]]]:
    """Return the largest gaps and the kernels with the most time of a step, also printed."""
    gaps = [(duration(gap.seconds), gap.before, gap.after) for gap in idle_of(intervals).gaps]
    kernels = [
        (duration(seconds / PROFILED_STEPS), name) for name, seconds in largest_kernels(intervals)
    ]
    for took, before, after in gaps:
        print(f"    gap of {took} from {before[:60]} to {after[:60]}")
    for took, kernel in kernels:
        print(f"    {took} of a step: {kernel[:90]}", flush=True)
    return {"gaps": list(gaps), "kernels": list(kernels)}


def run_llama(bench: Bench) -> None:
    """Run piece `llama-8b`: the aims of the table, the most informative lines first."""
    with engine(bench, LLAMA, max_model_len=2304, max_num_seqs=256) as llm:
        cases = Cases(bench, llm)
        cases.decode(1, 512, steps=128, aim_s=4.0e-3)
        cases.prompt(2048, 55e-3, "<= 55 ms, then 50 ms")
        cases.decode(256, 512, factor=1.35)
        cases.idle(256, 512, 0.02)
        cases.decode(32, 512, factor=1.25)
        cases.decode(128, 512, factor=1.25)
        cases.decode(256, 2048, steps=32, factor=1.25, rounds=1)
        depth = llm.engine.config.scheduler.pipeline_depth
    if depth == 1:
        with engine(bench, LLAMA, pipeline_depth=2, max_model_len=2304, max_num_seqs=256) as llm:
            cases = Cases(bench, llm, DEPTH_TWO)
            cases.decode(1, 512, steps=128, aim_s=4.0e-3)
            cases.decode(256, 512, factor=1.35)
            cases.idle(256, 512, 0.02)


def run_small(bench: Bench) -> None:
    """Run piece `qwen3-0.6b`; with two plans in flight as well, if one is the default."""
    settings = {"max_model_len": 2304, "max_num_seqs": 256}
    with engine(bench, SMALL, **settings) as llm:
        depth = llm.engine.config.scheduler.pipeline_depth
        _small_cases(Cases(bench, llm))
    if depth == 1:
        with engine(bench, SMALL, pipeline_depth=2, **settings) as llm:
            _small_cases(Cases(bench, llm, DEPTH_TWO))


def _small_cases(cases: Cases) -> None:
    best = duration(BEST_PUBLISHED_S)
    aim = f"<= 0.9 ms, then 0.7 ms (best published {best})"
    cases.decode(1, 512, steps=256, aim_s=0.9e-3, aim=aim)
    cases.decode(256, 512)
    cases.idle(256, 512, 0.10)
    cases.requests()


def run_mixture(bench: Bench) -> None:
    """Run piece `qwen3-30b-a3b`."""
    with engine(bench, MIXTURE, max_model_len=2304, max_num_seqs=64) as llm:
        cases = Cases(bench, llm)
        cases.decode(32, 512, aim_s=17e-3, aim="<= 17 ms, then 15 ms")
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
    """Run piece `modes`: Llama-3.1-8B, one request of 4000 + 50 tokens, in each mode of a step."""
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
