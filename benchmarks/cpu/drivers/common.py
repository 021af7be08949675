"""Shared code of the drivers: the job, the timing of a workload, the printed lines.

A job is a JSON object on the command line: "model" (path), "workload" (name), "is_small",
"is_short" (optional), "threads", "seed" and "options" of the engine. Each printed line is one JSON
object: {"workload", "metrics", "others"}, and in the end {"memory"}.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.cpu.noise import AVX512_THREADS, Noise, avx512_threads
from benchmarks.cpu.workloads import Workload, chosen_workload, random_prompt

Prompts = list[list[int]]
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Job:
    """The work of one process."""

    model: Path
    workload: Workload
    threads: int
    seed: int
    options: dict[str, Any]

    @classmethod
    def of(cls, text: str) -> "Job":
        given = json.loads(text)
        is_short = given.get("is_short", False)
        workload = chosen_workload(given["workload"], given["is_small"], is_short)
        model, options = Path(given["model"]), given["options"]
        return cls(model, workload, given["threads"], given["seed"], options)


class Model(Protocol):
    """A loaded model; greedy, no end-of-sequence token ends a sequence."""

    kv_bytes: int | None

    def times_s(self, prompt: list[int], count: int) -> list[float]:
        """Continue one prompt; `time.perf_counter()` when each output token was there."""

    def batch(self, prompts: Prompts, count: int) -> int:
        """Continue all, return how many tokens came."""

    def shared(self, prefix: list[int], own: Prompts, count: int) -> int:
        """Continue prefix + each, return how many tokens came."""


def emit(workload: str, metrics: dict[str, float], others: float) -> None:
    print(json.dumps({"workload": workload, "metrics": metrics, "others": others}), flush=True)


class Prompter:
    """Prompts that no earlier call returned."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._vocab_size, self._seed = workload.shape.vocab_size, seed * 100_000

    def prompts(self, num: int, length: int) -> Prompts:
        self._seed += num
        return [random_prompt(length, self._vocab_size, self._seed + i) for i in range(num)]


def token_times_s(model: Model, prompt: list[int], count: int) -> list[float]:
    """Return the seconds from the call until each token arrived."""
    began = time.perf_counter()
    times = [time_s - began for time_s in model.times_s(prompt, count)]
    assert len(times) == count, f"{len(times)} tokens came, not {count}"
    return times


def measure_alone(model: Model, workload: Workload, new: Prompter) -> dict[str, float]:
    """Measure one request at a time."""
    (prompt,) = new.prompts(1, workload.own)
    times = token_times_s(model, prompt, workload.output_len)
    if workload.name == "prefill":
        return {"prefill_rate": workload.own / times[0]}
    decode_rate = (len(times) - 1) / (times[-1] - times[0])
    if workload.name in ("long", "latent"):
        return {"long_rate": workload.own / times[0], "deep_rate": decode_rate}
    return {"ttft_s": times[0], "decode_rate": decode_rate}


def measure_tiny(model: Model, workload: Workload, new: Prompter) -> dict[str, float]:
    runs = [measure_alone(model, workload, new) for _ in range(workload.repeats)]
    return {"tiny_ms": 1e3 / max(run["decode_rate"] for run in runs)}


def rate_of(generate: Callable[[], int], workload: Workload) -> float:
    """Output tokens per second."""
    began = time.perf_counter()
    count = generate()
    elapsed_s = time.perf_counter() - began
    expected = workload.num_requests * workload.output_len
    assert count == expected, f"{count} tokens came, not {expected}"
    return count / elapsed_s


def measure_batch(model: Model, workload: Workload, new: Prompter) -> dict[str, float]:
    prompts = new.prompts(workload.num_requests, workload.own)
    rate = rate_of(lambda: model.batch(prompts, workload.output_len), workload)
    return {f"{workload.name}_rate": rate}


def measure_shared(model: Model, workload: Workload, prompts: list[Any]) -> float:
    prefix, own = prompts
    return rate_of(lambda: model.shared(prefix, own, workload.output_len), workload)


def run_shared(model: Model, workload: Workload, new: Prompter) -> None:
    """Run the same prefix twice, with other endings; each is a run."""
    (prefix,) = new.prompts(1, workload.shared)
    for metric in ("cold_rate", "warm_rate"):
        own, noise = new.prompts(workload.num_requests, workload.own), Noise()
        rate = measure_shared(model, workload, [prefix, own])
        emit(workload.name, {metric: rate}, noise.others())


def warm_up(model: Model, workload: Workload, new: Prompter) -> None:
    """Warm up with short prompts, but the same number of requests."""
    length = min(WARM_UP_TOKENS, workload.max_len - 4)  # engines have room for max_len tokens
    if workload.num_requests == 1:
        model.times_s(new.prompts(1, length)[0], 4)
    else:
        model.batch(new.prompts(workload.num_requests, length), 2)


def run_workload(model: Model, workload: Workload, new: Prompter) -> None:
    warm_up(model, workload, new)
    if workload.name == "shared":
        run_shared(model, workload, new)
        return
    measures = {"batch": measure_batch, "rows": measure_batch, "tiny": measure_tiny}
    measure = measures.get(workload.name, measure_alone)
    for _ in range(1 if workload.name == "tiny" else workload.repeats):
        noise = Noise()
        metrics = measure(model, workload, new)
        emit(workload.name, metrics, noise.others())


def run_start(import_engine: Callable[[], object], load: Callable[[Job], Model], job: Job) -> None:
    """Run the start of an engine. The parent measures the whole time, until it reads this line."""
    noise, began = Noise(), time.perf_counter()
    import_engine()
    imported = time.perf_counter()
    model = load(job)
    loaded = time.perf_counter()
    (prompt,) = Prompter(job.workload, job.seed).prompts(1, job.workload.own)
    model.times_s(prompt, 1)
    first = time.perf_counter()
    parts = {
        "import_s": imported - began,
        "load_s": loaded - imported,
        "first_s": first - loaded,
        "uses_torch": float("torch" in sys.modules),
    }
    emit("start", parts, noise.others())


def peak_rss_bytes() -> int:
    (line,) = [li for li in Path("/proc/self/status").read_text().split("\n") if "VmHWM" in li]
    return int(line.split()[1]) * 1024


def drive(import_engine: Callable[[], object], load: Callable[[Job], Model]) -> None:
    """Run a driver's main function."""
    job = Job.of(sys.argv[1])
    if job.workload.name == "start":
        run_start(import_engine, load, job)
        return
    model = load(job)
    began = time.perf_counter()
    run_workload(model, job.workload, Prompter(job.workload, job.seed))
    num_wide = avx512_threads(time.perf_counter() - began)
    memory = {
        "peak_bytes": peak_rss_bytes(), "kv_bytes": model.kv_bytes, AVX512_THREADS: num_wide
    }  # fmt: skip
    print(json.dumps({"memory": memory}), flush=True)
