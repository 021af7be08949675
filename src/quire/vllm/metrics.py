"""`llm.get_metrics()`: an engine's metrics as objects, with vLLM's classes and names."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import Metric as Family
from prometheus_client.samples import Sample

from quire.engine.observability.exposition import Exposition
from quire.engine.observability.metrics import EngineMetrics
from quire.engine.start.build import Engine

PREFIX = "vllm"
BY_POSITION = f"{PREFIX}:spec_decode_num_accepted_tokens_per_pos"
Labels = tuple[tuple[str, str], ...]


@dataclass
class Metric:
    """A metric with one set of labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counters of consecutive positions: accepted draft tokens by position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A number that grows and shrinks."""

    value: float


@dataclass
class Histogram(Metric):
    """Observed values. buckets: number of values up to each bound; the last is `+Inf`."""

    count: int
    sum: float
    buckets: dict[str, int]


class MetricsReader:
    """Counts an engine's events from now on, and reads them."""

    def __init__(self, engine: Engine) -> None:
        config, core = engine.config, engine.client.core
        rows, length = config.scheduler.max_num_seqs or 0, config.model.max_model_len or 0
        counted = EngineMetrics(rows, length, config.cache.enable_prefix_caching)
        core.subscribe(counted)
        name = config.model.model
        self._exposition = Exposition(counted, core.view, name, config.cache, prefix=PREFIX)

    def read(self) -> list[Metric]:
        """Return the metrics that vLLM has, under its names."""
        families = self._exposition.collect()
        return [each for one in families if one.name.startswith(PREFIX) for each in _metrics(one)]


def _metrics(family: Family) -> Iterator[Metric]:
    name, samples = family.name, family.samples
    if family.type == "gauge":
        yield from (Gauge(name, each.labels, each.value) for each in samples)
    elif name == BY_POSITION:
        for labels, group in _grouped(samples, "position"):
            at = {int(each.labels["position"]): int(each.value) for each in group}
            yield Vector(name, dict(labels), [at[position] for position in sorted(at)])
    elif family.type == "counter":
        totals = (each for each in samples if each.name == f"{name}_total")
        yield from (Counter(name, each.labels, int(each.value)) for each in totals)
    elif family.type == "histogram":
        for labels, group in _grouped(samples, "le"):
            values = {each.name: each.value for each in group}
            buckets = {each.labels["le"]: int(each.value) for each in group if "le" in each.labels}
            count, total = int(values[f"{name}_count"]), values[f"{name}_sum"]
            yield Histogram(name, dict(labels), count, total, buckets)


def _grouped(samples: Iterable[Sample], label: str) -> Iterator[tuple[Labels, list[Sample]]]:
    """Yield the samples that differ only in one label, with their other labels."""
    groups: dict[Labels, list[Sample]] = defaultdict(list)
    for sample in samples:
        rest = tuple(pair for pair in sample.labels.items() if pair[0] != label)
        groups[rest].append(sample)
    yield from groups.items()
