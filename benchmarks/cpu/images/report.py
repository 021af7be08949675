"""The tables of images: each engine's best and median, its share of the limit, equal answers."""

from collections.abc import Iterable, Mapping

from benchmarks.cpu.engines import Engine
from benchmarks.cpu.images.limits import TowerWork, min_times
from benchmarks.cpu.images.workload import METRICS, ImageWorkload, chosen_workload
from benchmarks.cpu.limits import Ceilings
from benchmarks.cpu.processes import Run
from benchmarks.cpu.report import GIGA, NAME_WIDTH, summarised

Summaries = dict[str, dict[str, dict[str, float]]]  # by engine and metric
Texts = Mapping[tuple[str, str, int], list[str]]  # by engine, workload and round
REFERENCE = "transformers bf16"
STREAM = "stream"


def summary(
    runs: Iterable[Run], engines: list[Engine], ceilings: Ceilings, is_small: bool
) -> Summaries:
    """Summarise each metric of each engine, as `benchmarks.cpu.report` does.

    tower_share: the share of the limit of the vision tower alone, of the metric that is hardly
    more than the tower.
    """
    listed, found = list(runs), Summaries()
    for engine in engines:
        found[engine.name] = {}
        for metric in METRICS:
            workload = chosen_workload(metric.workload, is_small)
            limit = min_times(workload, ceilings)[metric.name]
            own = [r for r in listed if r.engine == engine.name and metric.name in r.metrics]
            if own:
                entry = summarised(metric, own, limit)
                if workload.name == STREAM:
                    entry["tower_share"] = entry["best"] * tower_s(workload, ceilings)
                found[engine.name][metric.name] = entry
    return found


def tower_s(workload: ImageWorkload, ceilings: Ceilings) -> float:
    """Return the least time of the tower for an image."""
    return TowerWork.of(workload.shape, workload.side).lower_bound_s(ceilings)


def tower_lines(summaries: Summaries, ceilings: Ceilings, is_small: bool) -> list[str]:
    """Return the arithmetic of the tower, and each engine's share of its limit."""
    workload = chosen_workload(STREAM, is_small)
    work = TowerWork.of(workload.shape, workload.side)
    lines = [
        f"vision tower, {workload.side} x {workload.side} pixels: {work.products / GIGA:,.1f}"
        f" * 10^9 operations in products, {work.attention / GIGA:,.1f} in attention;"
        f" at least {tower_s(workload, ceilings):.3g} s"
    ]
    for name, metrics in summaries.items():
        if (entry := metrics.get("images_rate")) is not None:
            share = f"{entry['tower_share']:.0%} of the tower's limit"
            lines.append(f"{name:{NAME_WIDTH}s}{1 / entry['best']:.3g} s for an image, {share}")
    return lines


def agreement(texts: Texts, engine: str) -> str:
    """Return how many first tokens equal the reference's, such as "3 of 4".

    Returns an empty text if nothing was compared.
    """
    pairs = [
        (own, reference)
        for (name, workload, round_), listed in texts.items()
        if name == engine
        for own, reference in zip(
            listed, texts.get((REFERENCE, workload, round_), []), strict=False
        )
    ]
    if engine == REFERENCE or not pairs:
        return ""
    return f"{sum(own == reference for own, reference in pairs)} of {len(pairs)}"


def agreement_lines(texts: Texts, engines: list[Engine]) -> list[str]:
    """Return how often each engine's first token is that of the reference."""
    found = {engine.name: agreement(texts, engine.name) for engine in engines}
    return [
        f"{name:{NAME_WIDTH}s}{equal} first tokens are those of {REFERENCE}"
        for name, equal in found.items()
        if equal
    ]
