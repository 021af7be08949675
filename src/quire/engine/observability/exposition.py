"""Metrics in Prometheus' text format, under the names that vLLM's dashboards know.

With the prefix `vllm`, metrics that mean the same in vLLM have vLLM's full names, because endpoint
pickers and dashboards know only these. Metrics that only quire has stay under `quire:`. Every
series has the labels `model_name` and `engine` (the core's number). The process metrics
(`process_*`: memory, processor time, open files) describe the core's process.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from quire.base.settings.cache_config import CacheConfig
from quire.base.settings.secrets import MASK, public_value
from quire.engine.observability.adapter_use import AdapterUse
from quire.engine.observability.metrics import HISTOGRAMS, EngineMetrics
from quire.engine.observability.rank_times import RankTimes
from quire.scheduler.views import SchedulerView

OURS = "quire"
LABELS = ("model_name", "engine")
VLLM_NAMES = frozenset(HISTOGRAMS) | {
    "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason",
    "kv_cache_usage_perc", "cache_config_info", "prompt_tokens", "generation_tokens",
    "prompt_tokens_cached", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions",
    "request_success", "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
    "lora_requests_info",
}  # fmt: skip


class Exposition(Collector):
    """Collector of metric families, from counted events and the scheduler's current state."""

    def __init__(
        self,
        metrics: EngineMetrics,
        view: Callable[[], SchedulerView],
        model_name: str,
        cache: CacheConfig,
        core_id: int = 0,
        ranks: Sequence[RankTimes] = (),
        prefix: str = OURS,
        adapters: AdapterUse | None = None,
    ) -> None:
        self._prefix = prefix
        self._metrics = metrics
        self._view = view
        self._cache = cache
        self._ranks, self._adapters = ranks, adapters
        self._values = (model_name, str(core_id))

    def text(self) -> str:
        """Return the current values of all metrics."""
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        return generate_latest(registry).decode()

    def describe(self) -> list[Metric]:
        """Return nothing: the registry holds no other names to collide with."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._of_scheduler(self._view())
        yield from self._of_events(self._metrics)
        yield from self._histograms(self._metrics)
        yield from self._of_ranks()
        if self._adapters is not None:
            yield from self._of_adapters(self._adapters)

    def _of_scheduler(self, view: SchedulerView) -> Iterator[Metric]:
        """Yield the scheduler's current state: requests, KV blocks, pins, tiers, encoder memory."""
        waiting, pins, tier, stores = view.num_waiting, view.pins, view.tier, view.stores
        media = view.media
        gauge, counter = self._gauge, self._counter
        yield gauge("num_requests_running", "Running requests, which hold a row.", view.num_running)
        yield gauge("num_requests_waiting", "Waiting requests, which need a row.", waiting)
        yield gauge(
            "num_requests_waiting_by_reason",
            "Waiting requests by reason (capacity: rows, blocks or tokens of a step).",
            waiting,
            reason="capacity",
        )
        yield gauge(
            "kv_cache_usage_perc",
            "Share of the KV blocks that running sequences hold, from 0 to 1.",
            view.usage,
        )
        yield gauge("pinned_prefixes", "Pinned prefixes.", pins.num_pins)
        yield gauge("pinned_kv_blocks", "KV blocks of pinned prefixes.", pins.num_blocks)
        help = "Sequences of retained requests."
        yield gauge("held_requests", help, view.held.num_sequences)
        yield gauge("held_tokens", "Tokens of retained requests.", view.held.num_tokens)
        yield self._cache_info(view.num_blocks)
        help = "Requests that began with a pinned prefix."
        yield counter("pinned_prefix_hits", help, pins.num_hits)
        help = "Prompt tokens taken from pinned prefixes."
        yield counter("pinned_prefix_hit_tokens", help, pins.num_hit_tokens)
        if tier is not None:
            help = "Evicted blocks copied to host memory."
            yield counter("kv_blocks_offloaded", help, tier.num_offloaded)
            help = "Blocks loaded from host memory as prefix hits."
            yield counter("kv_blocks_loaded", help, tier.num_loaded)
        if stores is not None:
            yield counter("kv_blocks_fetched", "Blocks loaded from stores.", stores.num_fetched)
            yield counter("kv_blocks_kept", "Blocks saved to stores.", stores.num_kept)
            yield counter("kv_bytes_fetched", "Bytes loaded from stores.", stores.num_fetched_bytes)
            yield counter("kv_bytes_kept", "Bytes saved to stores.", stores.num_kept_bytes)
            help = "Prompt blocks looked up in stores that this engine had cached already."
            yield counter("kv_blocks_not_moved", help, stores.num_here)

        if media is not None:
            yield gauge("encoder_cache_slots", "Slots of the encoder cache.", media.num_slots)
            help = "Slots of the encoder cache that hold outputs."
            yield gauge("encoder_cache_used_slots", help, media.num_used_slots)
            help = "Tokens of images and videos that were encoded."
            yield counter("encoder_tokens", help, media.num_encoded_tokens)
            help = "Reads of images and videos whose outputs were in the encoder cache."
            yield counter("encoder_cache_hits", help, media.num_hits)

    def _of_ranks(self) -> Iterator[Metric]:
        """Yield step times, steps and expert pairs by rank."""
        if not self._ranks:
            return
        seconds = {rank: times.seconds for rank, times in enumerate(self._ranks)}
        steps = {rank: times.num_steps for rank, times in enumerate(self._ranks)}
        help = "Time of steps by rank, including waiting for other ranks."
        yield self._counters("rank_step_seconds", help, "rank", seconds)
        yield self._counters("rank_steps", "Steps, by rank.", "rank", steps)
        pairs = {rank: times.expert_pairs for rank, times in enumerate(self._ranks)}
        if any(pairs.values()):
            help = "Token-expert pairs that a rank computed (CPUs)."
            yield self._counters("rank_expert_pairs", help, "rank", pairs)

    def _of_adapters(self, use: AdapterUse) -> Iterator[Metric]:
        """Yield the adapters in use, as labels of the current time, and requests by adapter."""
        running, waiting = use.by_state()
        yield self._gauge(
            "lora_requests_info",
            "Adapters of running and waiting requests, as labels; the value is the time.",
            time.time(),
            max_lora=str(use.max_adapters),
            waiting_lora_adapters=",".join(waiting),
            running_lora_adapters=",".join(running),
        )
        help = "Requests that use adapters, by adapter."
        yield self._counters("adapter_requests", help, "adapter", use.num_requests)

    def _cache_info(self, num_blocks: int) -> Metric:
        cache = self._cache
        settings = {f.name: _label(f, getattr(cache, f.name)) for f in dataclasses.fields(cache)}
        settings["num_gpu_blocks"] = str(num_blocks)
        help = "Settings of the KV cache, as labels."
        return self._gauge("cache_config_info", help, 1, **settings)

    def _of_events(self, metrics: EngineMetrics) -> Iterator[Metric]:
        for name, help, number in (
            ("prompt_tokens", "Prompt tokens, counted at the first token.",
             metrics.num_prompt_tokens),
            ("generation_tokens", "Tokens written.", metrics.num_generation_tokens),
            ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.",
             metrics.num_prompt_tokens_cached),
            ("prefix_cache_queries",
             "Prompt tokens of admitted requests, looked up in the prefix cache.",
             metrics.num_prefix_queries),
            ("prefix_cache_hits", "Prompt tokens of admitted requests found in the prefix cache.",
             metrics.num_prefix_hits),
            ("num_preemptions", "Number of preemptions.", metrics.num_preemptions),
        ):  # fmt: skip
            yield self._counter(name, help, number)
        if metrics.num_drafts:
            help = "Steps of rows that verified draft tokens."
            yield self._counter("spec_decode_num_drafts", help, metrics.num_drafts)
            help = "Draft tokens that were verified."
            yield self._counter("spec_decode_num_draft_tokens", help, metrics.num_draft_tokens)
            help = "Draft tokens that were accepted."
            yield self._counter("spec_decode_num_accepted_tokens", help, metrics.num_accepted)
            name = "spec_decode_num_accepted_tokens_per_pos"
            help = "Accepted draft tokens by position in the draft, from 0."
            yield self._counters(name, help, "position", dict(enumerate(metrics.accepted_at)))
        yield from self._of_keys(metrics)
        help = "Ended requests by reason."
        yield self._counters("request_success", help, "finished_reason", metrics.num_finished)

    def _of_keys(self, metrics: EngineMetrics) -> Iterator[Metric]:
        """Yield the usage of each API key. A label shows the key's position, never the key."""
        if not metrics.of_keys:
            return
        for name, help, field in (
            ("key_requests", "Ended requests by API key.", "num_requests"),
            ("key_prompt_tokens", "Prompt tokens by API key.", "num_prompt_tokens"),
            ("key_prompt_tokens_cached", "Prompt tokens found in the prefix cache, by API key.",
             "num_cached_tokens"),
            ("key_generation_tokens", "Output tokens of ended requests by API key.",
             "num_generation_tokens"),
        ):  # fmt: skip
            values = {key: getattr(usage, field) for key, usage in metrics.of_keys.items()}
            yield self._counters(name, help, "key", values)

    def _histograms(self, metrics: EngineMetrics) -> Iterator[Metric]:
        for name, histogram in metrics.histograms.items():
            family = HistogramMetricFamily(self._full(name), HISTOGRAMS[name][1], labels=LABELS)
            bounds = [*(repr(bound) for bound in histogram.bounds), "+Inf"]
            buckets = list(zip(bounds, histogram.cumulative(), strict=True))
            family.add_metric(self._values, buckets, histogram.total)
            yield family

    def _full(self, name: str) -> str:
        """Return a metric's name with its prefix."""
        return f"{self._prefix if name in VLLM_NAMES else OURS}:{name}"

    def _gauge(self, name: str, help: str, value: float, **more: str) -> Metric:
        family = GaugeMetricFamily(self._full(name), help, labels=(*LABELS, *more))
        family.add_metric((*self._values, *more.values()), value)
        return family

    def _counters(self, name: str, help: str, label: str, values: Mapping[Any, float]) -> Metric:
        family = CounterMetricFamily(self._full(name), help, labels=(*LABELS, label))
        for of, value in values.items():
            family.add_metric((*self._values, str(of)), value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(self._full(name), help, labels=LABELS)
        family.add_metric(self._values, value)
        return family


def _label(item: "dataclasses.Field[Any]", value: Any) -> str:
    """Return a setting as a label, with secrets and paths of this machine masked."""
    if item.metadata["is_path"] and value is not None:
        return MASK
    if item.name == "kv_store":
        value = tuple(f"dir:{MASK}" if each.startswith("dir:") else each for each in value)
    return str(public_value(value))
