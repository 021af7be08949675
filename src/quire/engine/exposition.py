"""Metrics in Prometheus' text format, under the names that vLLM's dashboards know.

Every series carries `model_name` and `engine`. The process's own numbers (`process_*`: memory,
processor time, open files) are those of the core.
"""

import dataclasses
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from quire.engine.metrics import HISTOGRAMS, EngineMetrics

PREFIX = "quire:"
ENGINE = "0"
LABELS = ("model_name", "engine")


def to_text(metrics: EngineMetrics) -> str:
    """All metrics. Reads the scheduler's counters as they are now."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(metrics))
    ProcessCollector(registry=registry)
    return generate_latest(registry).decode()


class EngineCollector(Collector):
    """Makes metric families from the numbers of an `EngineMetrics`."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._values = (metrics.model_name, ENGINE)

    def describe(self) -> list[Metric]:
        """Nothing: the registry holds no other names to collide with."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        scheduler = self._metrics.scheduler
        waiting = scheduler.num_waiting
        yield self._gauge(
            "num_requests_running", "Requests that hold a row.", scheduler.num_running
        )
        yield self._gauge("num_requests_waiting", "Requests that wait for a row.", waiting)
        yield self._gauge(
            "num_requests_waiting_by_reason",
            "Waiting requests by what they wait for (capacity: rows, blocks, tokens of a step).",
            waiting,
            reason="capacity",
        )
        yield self._gauge(
            "kv_cache_usage_perc",
            "Share of the KV blocks that running sequences hold, from 0 to 1.",
            scheduler.kv.usage,
        )
        pins = scheduler.pins
        yield self._gauge("pinned_prefixes", "Prefixes that are pinned.", len(pins.by_id))
        yield self._gauge("pinned_kv_blocks", "KV blocks that they hold.", pins.num_blocks)
        yield self._gauge(
            "cache_config_info", "Settings of the KV cache, as labels.", 1, **self._cache_labels()
        )

    def _cache_labels(self) -> dict[str, str]:
        cache, pools = self._metrics.cache, self._metrics.scheduler.kv.pools
        settings = {f.name: str(getattr(cache, f.name)) for f in dataclasses.fields(cache)}
        return settings | {"num_gpu_blocks": str(max(pool.num_blocks for pool in pools))}

    def _counters(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield self._counter(
            "prompt_tokens", "Prompt tokens, counted at the first token.", metrics.num_prompt_tokens
        )
        yield self._counter("generation_tokens", "Tokens written.", metrics.num_generation_tokens)
        yield self._counter(
            "prompt_tokens_cached",
            "Those of the prompt tokens that were in the prefix cache.",
            metrics.num_prompt_tokens_cached,
        )
        yield self._counter(
            "prefix_cache_queries",
            "Prompt tokens of admitted requests, looked up in the prefix cache.",
            metrics.num_prefix_queries,
        )
        yield self._counter(
            "prefix_cache_hits", "Those of them that it had.", metrics.num_prefix_hits
        )
        yield from self._tier_counters()
        pins = metrics.scheduler.pins
        yield self._counter(
            "pinned_prefix_hits", "Requests that began with a pinned prefix.", pins.num_hits
        )
        yield self._counter(
            "pinned_prefix_hit_tokens",
            "Prompt tokens that they did not compute.",
            pins.num_hit_tokens,
        )
        yield self._counter(
            "num_preemptions", "Times that a request lost its row.", metrics.num_preemptions
        )
        yield self._endings()

    def _tier_counters(self) -> Iterator[Metric]:
        """Blocks that moved between device, host memory and stores."""
        scheduler = self._metrics.scheduler
        tier, stores = scheduler.kv.tier, scheduler.stores
        if tier is not None:
            yield self._counter(
                "kv_blocks_offloaded", "Evicted blocks copied to host memory.", tier.num_offloaded
            )
            yield self._counter(
                "kv_blocks_loaded", "Blocks that host memory gave back as hits.", tier.num_loaded
            )
        if stores is not None:
            yield self._counter(
                "kv_blocks_fetched", "Blocks that came from stores.", stores.num_fetched
            )
            yield self._counter("kv_blocks_kept", "Blocks that went to stores.", stores.num_kept)

    def _endings(self) -> Metric:
        family = CounterMetricFamily(
            PREFIX + "request_success",
            "Requests that ended, by how.",
            labels=(*LABELS, "finished_reason"),
        )
        for reason, number in self._metrics.num_finished.items():
            family.add_metric((*self._values, reason), number)
        return family

    def _histograms(self) -> Iterator[Metric]:
        for name, histogram in self._metrics.histograms.items():
            _, help = HISTOGRAMS[name]
            family = HistogramMetricFamily(PREFIX + name, help, labels=LABELS)
            bounds = [*(repr(bound) for bound in histogram.bounds), "+Inf"]
            buckets = list(zip(bounds, histogram.cumulative(), strict=True))
            family.add_metric(self._values, buckets, histogram.total)
            yield family

    def _gauge(self, name: str, help: str, value: float, **more: str) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, help, labels=(*LABELS, *more))
        family.add_metric((*self._values, *more.values()), value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, help, labels=LABELS)
        family.add_metric(self._values, value)
        return family
