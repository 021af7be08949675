"""The metrics of a serving benchmark, with vLLM's definitions, names and layout.

TTFT: from sending to the first chunk. ITL: the gaps between chunks, over all requests; a chunk may
hold several tokens. TPOT: (latency - TTFT) / (output tokens - 1), for requests with more than one.
E2EL: from sending to the last chunk. Goodput: requests per second that meet all limits (a TPOT of
one token is 0). The server's `usage` counts tokens. The peak of tokens per second spreads a
request's tokens evenly over its chunks; with one token per chunk it equals vLLM's count of chunks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

HEADERS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


@dataclass
class RequestResult:
    """The outcome of one request. Times are in seconds; `start_s` is on the benchmark's clock.

    prompt_ids, token_ids: as the server reports them, if the body requests that. cached_by_tier,
    miss: where the cached tokens were, and the reason why the rest was not cached, if the server
    reports them.
    """

    start_s: float
    prompt_len: int
    latency_s: float = 0.0
    ttft_s: float = 0.0
    itls_s: list[float] = field(default_factory=list)
    output_len: int = 0
    text: str = ""
    error: str = ""
    cached_len: int = 0
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    miss: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return not self.error

    @property
    def tpot_s(self) -> float:
        if self.output_len <= 1:
            return 0.0
        return (self.latency_s - self.ttft_s) / (self.output_len - 1)


@dataclass(frozen=True)
class Summary:
    """Statistics of one kind of time, in milliseconds; all zero without samples."""

    mean: float
    median: float
    std: float
    percentiles: tuple[tuple[float, float], ...]

    @classmethod
    def of(
        cls, times_s: Sequence[float] | npt.NDArray[np.float64], percentiles: tuple[float, ...]
    ) -> "Summary":
        times_ms = np.asarray(times_s if len(times_s) else [0.0]) * 1e3
        return cls(
            float(times_ms.mean()),
            float(np.median(times_ms)),
            float(times_ms.std()),
            tuple((p, float(np.percentile(times_ms, p))) for p in percentiles),
        )


@dataclass(frozen=True)
class ServingMetrics:
    """All metrics of a run. `goodput` is None without limits."""

    completed: int
    failed: int
    duration_s: float
    total_input: int
    total_output: int
    num_good: int | None
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    times: dict[str, Summary]

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration_s

    @property
    def goodput(self) -> float | None:
        return None if self.num_good is None else self.num_good / self.duration_s

    @property
    def output_throughput(self) -> float:
        return self.total_output / self.duration_s

    @property
    def total_token_throughput(self) -> float:
        return (self.total_input + self.total_output) / self.duration_s


def measure(
    results: list[RequestResult],
    duration_s: float,
    percentiles: tuple[float, ...],
    limits_ms: dict[str, float],
) -> ServingMetrics:
    """Compute the metrics of a run. limits_ms: limits of goodput by metric; empty for none."""
    done = [result for result in results if result.is_ok]
    tokens_per_s, open_per_s = _by_second(done)
    times = {
        "ttft": [result.ttft_s for result in done],
        "tpot": [result.tpot_s for result in done if result.output_len > 1],
        "itl": [gap for result in done for gap in result.itls_s],
        "e2el": [result.latency_s for result in done],
    }
    return ServingMetrics(
        completed=len(done),
        failed=len(results) - len(done),
        duration_s=duration_s,
        total_input=sum(result.prompt_len for result in done),
        total_output=sum(result.output_len for result in done),
        num_good=sum(_is_good(result, limits_ms) for result in done) if limits_ms else None,
        max_output_tokens_per_s=float(tokens_per_s.max(initial=0.0)),
        max_concurrent_requests=int(open_per_s.max(initial=0)),
        times={name: Summary.of(values, percentiles) for name, values in times.items()},
    )


def _is_good(result: RequestResult, limits_ms: dict[str, float]) -> bool:
    reached = {"ttft": result.ttft_s, "tpot": result.tpot_s, "e2el": result.latency_s}
    return all(reached[name] * 1e3 <= limit for name, limit in limits_ms.items())


def _by_second(done: list[RequestResult]) -> tuple[Any, Any]:
    """Return the tokens that arrived, and the open requests, in each second of the run."""
    if not done:
        return np.zeros(0), np.zeros(0, np.int64)
    began = min(result.start_s for result in done)
    ended = max(result.start_s + result.latency_s for result in done)
    num = math.ceil(ended - began) + 1
    tokens, num_open = np.zeros(num), np.zeros(num, np.int64)
    for result in done:
        start = result.start_s - began
        chunks = start + result.ttft_s + np.cumsum([0.0, *result.itls_s])
        seconds = np.minimum(chunks.astype(np.int64), num - 1)
        np.add.at(tokens, seconds, result.output_len / len(chunks))
        num_open[int(start) : int(start + result.latency_s) + 1] += 1
    return tokens, num_open


def block(
    metrics: ServingMetrics,
    shown: tuple[str, ...],
    max_concurrency: int | None,
    request_rate: float,
    more: Sequence[str] = (),
) -> str:
    """Return vLLM's printed block. shown: metrics whose times are printed. more: lines to add."""
    lines = [f"{' Serving Benchmark Result ':=^50}"]

    def add(name: str, value: object, form: str = "") -> None:
        lines.append(f"{name:<40} {value:<10{form}}")

    add("Successful requests:", metrics.completed)
    add("Failed requests:", metrics.failed)
    if max_concurrency is not None:
        add("Maximum request concurrency:", max_concurrency)
    if request_rate != math.inf:
        add("Request rate configured (RPS):", request_rate, ".2f")
    add("Benchmark duration (s):", metrics.duration_s, ".2f")
    add("Total input tokens:", metrics.total_input)
    add("Total generated tokens:", metrics.total_output)
    add("Request throughput (req/s):", metrics.request_throughput, ".2f")
    if metrics.goodput is not None:
        add("Request goodput (req/s):", metrics.goodput, ".2f")
    add("Output token throughput (tok/s):", metrics.output_throughput, ".2f")
    add("Peak output token throughput (tok/s):", metrics.max_output_tokens_per_s, ".2f")
    add("Peak concurrent requests:", float(metrics.max_concurrent_requests), ".2f")
    add("Total token throughput (tok/s):", metrics.total_token_throughput, ".2f")
    for name in (name for name in HEADERS if name in shown):
        lines.append(f"{HEADERS[name]:-^50}")
        times = metrics.times[name]
        add(f"Mean {name.upper()} (ms):", times.mean, ".2f")
        add(f"Median {name.upper()} (ms):", times.median, ".2f")
        for percentile, value in times.percentiles:
            add(f"P{percentile:g} {name.upper()} (ms):", value, ".2f")
    return "\n".join([*lines, *more, "=" * 50])


def json_keys(metrics: ServingMetrics) -> dict[str, Any]:
    """Return the metrics under the keys of vLLM's result files."""
    found: dict[str, Any] = {
        "duration": metrics.duration_s,
        "completed": metrics.completed,
        "failed": metrics.failed,
        "total_input_tokens": metrics.total_input,
        "total_output_tokens": metrics.total_output,
        "request_throughput": metrics.request_throughput,
        "request_goodput": metrics.goodput,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_token_throughput,
        "max_output_tokens_per_s": metrics.max_output_tokens_per_s,
        "max_concurrent_requests": metrics.max_concurrent_requests,
    }
    for name, times in metrics.times.items():
        found[f"mean_{name}_ms"] = times.mean
        found[f"median_{name}_ms"] = times.median
        found[f"std_{name}_ms"] = times.std
        found |= {f"p{percentile:g}_{name}_ms": value for percentile, value in times.percentiles}
    return found


def json_details(results: list[RequestResult]) -> dict[str, Any]:
    """Return lists with one entry per request, in the order of the requests."""
    return {
        "input_lens": [result.prompt_len for result in results],
        "output_lens": [result.output_len for result in results],
        "ttfts": [result.ttft_s for result in results],
        "itls": [result.itls_s for result in results],
        "latencies": [result.latency_s for result in results],
        "start_times": [result.start_s for result in results],
        "generated_texts": [result.text for result in results],
        "errors": [result.error for result in results],
    }
