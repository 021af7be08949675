"""The metrics of a simulated run: the metrics of `quire bench serve`, and the engine's own."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.tools.bench.metrics import ServingMetrics, Summary, block, json_keys
from quire.tools.bench.shown_metrics import ShownMetrics
from quire.tools.simulate.run import Run
from quire.tools.simulate.served import Float64, Served

MS = 1e3


@dataclass(frozen=True)
class Spent:
    """The mean time of a request by phase, in ms."""

    waiting: dict[str, float]  # before admission or after a preemption, by the missing resource
    prefill: float  # from admission to the first token
    decode: float  # the rest
    away: float  # without a row after a preemption; also part of `waiting`


@dataclass(frozen=True)
class EngineFacts:
    """The schedulers' statistics."""

    num_steps: int
    num_sequence_steps: int
    mean_rows: float
    used: float  # mean share of the pool in use, over steps
    most_used: float
    num_preemptions: int
    num_lost_tokens: int
    cached: float  # share of prompt tokens with prefix hits
    num_loaded_blocks: int
    per_replica: tuple[int, ...]  # requests of each replica


@dataclass(frozen=True)
class Results:
    """All metrics of a run."""

    serving: ServingMetrics
    engine: EngineFacts
    spent: Spent
    errors: tuple[str, ...]


def served_well(run: Run) -> list[Served]:
    """Return the requests that got an answer."""
    return [each for each in run.by_id.values() if not each.error and each.reason != "abort"]


def results_of(run: Run, shown_metrics: ShownMetrics) -> Results:
    """Compute all metrics of a run."""
    done = served_well(run)
    errors = tuple(each.error for each in run.by_id.values() if each.error)
    return Results(
        _serving(run, done, shown_metrics), _engine(run, done), _spent(run, done), errors
    )


def _serving(run: Run, done: list[Served], shown_metrics: ShownMetrics) -> ServingMetrics:
    times: dict[str, list[float] | Float64] = {
        "ttft": [each.wait_s for each in done],
        "tpot": [each.tpot_s for each in done if each.num_output > 1],
        "itl": run.gaps_s,
        "e2el": [each.latency_s for each in done],
    }
    tokens, num_open = by_second(run)
    good = sum(_is_good(each, shown_metrics.limits_ms) for each in done)
    return ServingMetrics(
        completed=len(done),
        failed=len(run.by_id) - len(done),
        duration_s=max(run.duration_s, 1e-9),
        total_input=sum(each.num_prompt for each in done),
        total_output=sum(each.num_output for each in done),
        num_good=good if shown_metrics.limits_ms else None,
        max_output_tokens_per_s=float(tokens.max(initial=0.0)),
        max_concurrent_requests=int(num_open.max(initial=0)),
        times={name: Summary.of(found, shown_metrics.percentiles) for name, found in times.items()},
    )


def _is_good(served: Served, limits_ms: dict[str, float]) -> bool:
    tpot_s = served.tpot_s if served.num_output > 1 else 0.0
    reached = {"ttft": served.wait_s, "tpot": tpot_s, "e2el": served.latency_s}
    return all(reached[name] * MS <= limit for name, limit in limits_ms.items())


def by_second(run: Run) -> tuple[Float64, npt.NDArray[np.int64]]:
    """Return the tokens that arrived, and the open requests, in each second of the run."""
    num = math.floor(run.duration_s) + 1
    tokens, num_open = np.zeros(num), np.zeros(num + 1, np.int64)
    for each in run.listeners:
        if each.tokens:
            at_s, counts = np.array(each.tokens).T
            np.add.at(tokens, at_s.astype(np.int64), counts)
    for served in served_well(run):
        num_open[int(served.arrived_s)] += 1
        num_open[int(served.finished_s) + 1] -= 1
    return tokens, np.cumsum(num_open)[:-1]


def _engine(run: Run, done: list[Served]) -> EngineFacts:
    prompts = sum(each.num_prompt for each in done)
    cached = sum(max(0, each.num_cached_tokens) for each in done)
    counts = np.bincount(
        [each.replica for each in run.by_id.values()], minlength=len(run.listeners)
    )
    return EngineFacts(
        num_steps=run.num_steps,
        num_sequence_steps=run.num_sequence_steps,
        mean_rows=run.num_sequence_steps / max(1, run.num_steps),
        used=run.used,
        most_used=max(max(each.series.used, default=0.0) for each in run.listeners),
        num_preemptions=run.num_preemptions,
        num_lost_tokens=run.num_lost_tokens,
        cached=cached / max(1, prompts),
        num_loaded_blocks=sum(each.num_loaded_blocks for each in run.listeners),
        per_replica=tuple(counts.tolist()),
    )


def _spent(run: Run, done: list[Served]) -> Spent:
    num = max(1, len(done))
    prefill = sum(each.first_token_s - each.admitted_s for each in done)
    decode = sum(each.finished_s - each.first_token_s - each.away_s for each in done)
    away = sum(each.away_s for each in done)
    waiting = {name: total * MS / num for name, total in run.waits.items()}
    return Spent(waiting, prefill * MS / num, decode * MS / num, away * MS / num)


# ---- output ----------------------------------------------------------------------------------


def text_of(results: Results, shown_metrics: ShownMetrics, rate_per_s: float) -> str:
    """Return the block that `quire bench serve` prints, followed by the engine's metrics."""
    facts, spent = results.engine, results.spent
    lines = [f"{'Engine':-^50}"]

    def add(name: str, value: str) -> None:
        lines.append(f"{name:<40} {value}")

    add("Steps:", f"{facts.num_steps:,}")
    add("Mean sequences per step:", f"{facts.mean_rows:.1f}")
    add("KV pool in use (mean, most):", f"{facts.used:.1%}, {facts.most_used:.1%}")
    add("Prompt tokens found in the cache:", f"{facts.cached:.1%}")
    if facts.num_loaded_blocks:
        add("Blocks back from host memory:", f"{facts.num_loaded_blocks:,}")
    add("Preemptions:", f"{facts.num_preemptions:,}")
    add("Tokens computed again:", f"{facts.num_lost_tokens:,}")
    if len(facts.per_replica) > 1:
        add("Requests per replica:", ", ".join(f"{num:,}" for num in facts.per_replica))
    lines.append(f"{'Time per Request':-^50}")
    for name, value in spent.waiting.items():
        add(f"Waited for {name} (ms):", f"{value:.2f}")
    add("Prompt computed (ms):", f"{spent.prefill:.2f}")
    add("Answer computed (ms):", f"{spent.decode:.2f}")
    if spent.away:
        add("Preempted (ms, waited above):", f"{spent.away:.2f}")
    return block(results.serving, shown_metrics.shown, None, rate_per_s, lines)


def as_data(results: Results) -> dict[str, Any]:
    """Return all metrics as JSON data; serving metrics have vLLM's keys."""
    return json_keys(results.serving) | {
        "engine": asdict(results.engine),
        "spent_ms": asdict(results.spent),
        "errors": list(dict.fromkeys(results.errors)),
    }
