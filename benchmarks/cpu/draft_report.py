"""The tables of the drafting benchmark: the gain of each method within its own engine, and the
fastest engine."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.cpu.drivers.drafting import PLAIN
from benchmarks.cpu.engines import Engine
from benchmarks.cpu.noise import MAX_OTHERS
from benchmarks.cpu.requests import Task

CATEGORIES = ("16-bit", "8-bit")


@dataclass(frozen=True)
class Answered:
    """One request by one variant of an engine. metrics: as drivers print them."""

    engine: str
    task: str
    round: int
    variant: str
    request: int
    metrics: dict[str, float]
    token_ids: list[int]
    others: float

    @property
    def is_quiet(self) -> bool:
        return self.others <= MAX_OTHERS


def draft_length(variant: str) -> int:
    """Return the maximum number of draft tokens in a step, from the end of the variant's name."""
    return 0 if variant == PLAIN else int(variant.split()[-1])


def summary(
    answered: Iterable[Answered], engines: list[Engine], tasks: list[Task]
) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Return the results by task, engine and variant; see `_summarised`. Disturbed rounds do not
    count, unless all are disturbed."""
    listed = list(answered)
    found: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for task in tasks:
        found[task.name] = {}
        for engine in engines:
            own = [a for a in listed if (a.task, a.engine) == (task.name, engine.name)]
            own = [a for a in own if a.is_quiet] or own
            variants = dict.fromkeys(a.variant for a in own)
            if own:
                plain = [a for a in own if a.variant == PLAIN]
                found[task.name][engine.name] = {
                    name: _summarised([a for a in own if a.variant == name], plain)
                    for name in sorted(variants, key=lambda name: (name != PLAIN, name))
                }
    return found


def _summarised(own: list[Answered], plain: list[Answered]) -> dict[str, Any]:
    """Return a variant's results.

    rate: tokens per second, the median of the rounds.
    ratio: the rate divided by the plain rate of the same round, also the median.
    limit: the limit of the ratio.
    num_same: answers equal to the plain ones.
    """
    rates, plain_rates = _rates(own), _rates(plain)
    answers = {(a.round, a.request): a.token_ids for a in plain}
    drafted = sum(a.metrics["num_tried"] for a in own)
    right = sum(a.metrics["num_right"] for a in own)
    return {
        "rate": statistics.median(rates.values()),
        "ratio": statistics.median(rates[i] / plain_rates[i] for i in rates),
        "limit": 1 + draft_length(own[0].variant),
        "num_tried": drafted,
        "num_right": right,
        "num_answers": len(own),
        "num_same": sum(a.token_ids == answers[a.round, a.request] for a in own),
        "mean_tokens": statistics.mean(len(a.token_ids) for a in own),
        "num_rounds": len(rates),
        "is_quiet": all(a.is_quiet for a in own),
    }


def _rates(own: list[Answered]) -> dict[int, float]:
    """Return tokens per second by round, without the first token of each answer."""
    found = {}
    for number in sorted({a.round for a in own}):
        metrics = [a.metrics for a in own if a.round == number]
        found[number] = sum(m["num_timed"] for m in metrics) / sum(m["seconds"] for m in metrics)
    return found


def table(
    summaries: dict[str, dict[str, dict[str, dict[str, Any]]]],
    engines: list[Engine],
    tasks: list[Task],
) -> list[str]:
    lines = []
    for task in tasks:
        for category, aim in zip(CATEGORIES, task.aim, strict=True):
            own = {e.name: e for e in engines if e.category == category}
            found = {
                name: summaries[task.name][name] for name in own if name in summaries[task.name]
            }
            if found:
                lines.append(
                    f"{task.name + ', ' + category:24s}{'':20s}{'tokens/s':>9s}{'ratio':>7s}"
                    f"{'limit':>6s}{'tokens/s':>9s}{'right/tried':>14s}{'same':>8s}{'tokens':>8s}"
                )
                for name, variants in found.items():
                    lines += _rows(name, variants, aim if own[name].is_ours else None)
                lines += [*_against_peers(found, own), ""]
    return lines


def _rows(name: str, variants: dict[str, dict[str, Any]], aim: float | None) -> list[str]:
    lines = []
    for variant, found in variants.items():
        limit, is_known = found["limit"], found["num_tried"] >= found["num_right"]
        drafted = f"{found['num_tried']:.0f}" if is_known else "?"
        line = (
            f"{name:24s}{variant:20s}{found['rate']:9.1f}{found['ratio']:7.2f}{limit:6d}"
            f"{limit * variants[PLAIN]['rate']:9.0f}"
            f"{found['num_right']:7.0f}/{drafted:6s}"
            f"{found['num_same']:4d}/{found['num_answers']:<3d}{found['mean_tokens']:8.1f}"
        )
        if aim is not None and variant != PLAIN:
            line += f"  aim {aim}: " + ("met" if found["ratio"] >= aim else "short")
        lines.append(line + ("" if found["is_quiet"] else " ~"))
    return lines


def fastest(variants: dict[str, dict[str, Any]]) -> tuple[str, float]:
    """Return the fastest variant and its rate; a variant that changes answers does not count."""
    right = {n: v["rate"] for n, v in variants.items() if v["num_same"] == v["num_answers"]}
    name = max(right, key=lambda name: right[name])
    return name, right[name]


def _against_peers(
    found: dict[str, dict[str, dict[str, Any]]], engines: dict[str, Engine]
) -> list[str]:
    """Return lines that compare every engine's fastest variant."""
    lines = []
    peers = {name: fastest(found[name]) for name in found if not engines[name].is_ours}
    for name in [name for name in found if engines[name].is_ours and peers]:
        variant, rate = fastest(found[name])
        best = max(peers, key=lambda peer: peers[peer][1])
        lines.append(
            f"  {name} ({variant}) / best peer ({best}, {peers[best][0]}): "
            f"{rate / peers[best][1]:.2f}x"
        )
    return lines


LEGEND = [
    "tokens/s     of one row, behind its first token; median of the rounds",
    "ratio        to the same engine without guesses, in the same round",
    "limit        k guesses that are all right bring 1 + k tokens in a step, which takes at least",
    "             what a step of one token does: of the ratio, and of the tokens per second",
    "right/tried  guesses; OpenVINO does not say how many it tried",
    "same         answers that are those of the same engine without guesses, token by token",
    "~            in all rounds other processes took more than 0.15 cores",
]


def rows_of(
    summaries: dict[str, dict[str, dict[str, Any]]], answered: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return one row for each variant of each engine, with the seconds of every answer."""
    rows = []
    for task, engines in summaries.items():
        for engine, variants in engines.items():
            for variant, found in variants.items():
                labels = {"task": task, "engine": engine, "variant": variant}
                own = [each for each in answered if labels.items() <= each.items()]
                seconds = [each["metrics"]["seconds"] for each in own]
                others = [each["others"] for each in own]
                rows.append(
                    {**labels, **found, "answers.seconds": seconds, "answers.others_cores": others}
                )
    return rows
