"""Metrics match numbers computed by hand and the recorded events of a real scheduler."""

import gc
import re
from collections import defaultdict

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.virtual.dry_run import dry_request, dry_run
from quire.base.clock import FakeClock
from quire.base.events import (
    Admitted,
    Event,
    Finished,
    Planned,
    Preempted,
    Queued,
    Stepped,
)
from quire.base.messages import Abort
from quire.base.settings.cache_config import CacheConfig
from quire.base.settings.config import SchedulerConfig
from quire.engine.client.output import StepReader
from quire.engine.observability.exposition import Exposition
from quire.engine.observability.metrics import EngineMetrics, RequestTimes
from quire.scheduler.scheduler import Scheduler
from tests.support.engine.updates import read
from tests.support.scheduler.events import listen

MAX_LEN = 1000
EXPECTED_NAMES = (  # metrics that llm-d, Gateway API endpoint pickers and vLLM's dashboard read
    "num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total",
    "generation_tokens_total", "request_success_total", "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_sum", "iteration_tokens_total_bucket",
)  # fmt: skip
Series = dict[tuple[str, str], float]


def new_metrics(caching: bool = True) -> EngineMetrics:
    return EngineMetrics(num_rows=4, max_model_len=MAX_LEN, counts_hits=caching)


def idle_scheduler() -> Scheduler:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    return dry_run(100, 4, config, MAX_LEN, True)[0]


def text_of(
    metrics: EngineMetrics,
    scheduler: Scheduler | None = None,
    name: str = "tiny",
    caching: bool = True,
) -> str:
    cache = CacheConfig(enable_prefix_caching=caching)
    return Exposition(metrics, (scheduler or idle_scheduler()).view, name, cache).text()


def feed(metrics: EngineMetrics, *events: Event) -> None:
    for event in events:
        metrics(event)


def stepped(at_s: float, step_id: int, rows: list[int], num_tokens: int = 1) -> Stepped:
    return Stepped(at_s, step_id, np.asarray(rows, np.int32), num_tokens, 0.01)


def scrape(metrics: EngineMetrics, scheduler: Scheduler | None = None) -> Series:
    """Return the values by metric name without prefix, and labels except those of the engine."""
    series: Series = {}
    for family in text_string_to_metric_families(text_of(metrics, scheduler)):
        for sample in family.samples:
            own = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            key = sample.name.removeprefix("quire:"), ",".join(sorted(own.values()))
            assert key not in series, f"{key} is exported twice"
            series[key] = sample.value
    return series


def histogram_of(series: Series, histogram: str) -> tuple[float, float]:
    """Return the number of observed values of a histogram, and their sum."""
    return series[f"{histogram}_count", ""], series[f"{histogram}_sum", ""]


def assert_observed(series: Series, histogram: str, *values: float) -> None:
    assert histogram_of(series, histogram) == (len(values), pytest.approx(sum(values))), histogram


def one_request(metrics: EngineMetrics) -> None:
    """Received at 10.0, queued at 10.5, admitted at 11, tokens at 13, 13.5 and 15.5."""
    feed(
        metrics,
        Queued(10.5, "a", 20, max_tokens=7, received_s=10.0),
        Admitted(11.0, "a", 2, 8),
        Planned(11.0, 0, 1, 10),
        stepped(12.0, 0, [], 10),
        Planned(12.0, 1, 1, 2),
        stepped(13.0, 1, [2], 2),
        Planned(13.0, 2, 1, 1),
        stepped(13.5, 2, [2]),
        Planned(13.5, 3, 1, 1),
        stepped(15.5, 3, [2]),
        Finished(15.5, "a", "stop", 3),
    )


def test_times_of_one_request() -> None:
    metrics = new_metrics()
    one_request(metrics)
    series = scrape(metrics)
    assert_observed(series, "time_to_first_token_seconds", 3.0)
    assert_observed(series, "inter_token_latency_seconds", 0.5, 2.0)
    assert_observed(series, "request_time_per_output_token_seconds", 1.25)
    assert_observed(series, "e2e_request_latency_seconds", 5.5)
    assert_observed(series, "request_queue_time_seconds", 0.5)
    assert_observed(series, "request_inference_time_seconds", 4.5)
    assert_observed(series, "request_prefill_time_seconds", 2.0)
    assert_observed(series, "request_decode_time_seconds", 2.5)
    assert series["inter_token_latency_seconds_bucket", "0.3"] == 0
    assert series["inter_token_latency_seconds_bucket", "0.5"] == 1
    assert series["inter_token_latency_seconds_bucket", "2.0"] == 2
    assert series["inter_token_latency_seconds_bucket", "+Inf"] == 2


def test_tokens_of_one_request() -> None:
    metrics = new_metrics()
    one_request(metrics)
    series = scrape(metrics)
    assert series["prompt_tokens_total", ""] == 20
    assert series["prompt_tokens_cached_total", ""] == 8
    assert series["prefix_cache_queries_total", ""] == 20
    assert series["prefix_cache_hits_total", ""] == 8
    assert series["generation_tokens_total", ""] == 3
    assert series["request_success_total", "stop"] == 1
    assert series["request_success_total", "length"] == 0
    assert_observed(series, "request_prompt_tokens", 20)
    assert_observed(series, "request_generation_tokens", 3)
    assert_observed(series, "request_params_max_tokens", 7)
    assert_observed(series, "request_params_n", 1)
    assert_observed(series, "request_num_preemptions", 0)
    assert_observed(series, "iteration_tokens_total", 10, 2, 1, 1)
    assert metrics.num_computed_prompt_tokens == 12


def test_unknown_values_are_not_observed() -> None:
    """Without received_s, times start when the request is queued. One token makes no interval."""
    metrics = new_metrics(caching=False)
    feed(metrics, Queued(1.0, "a", 5), Admitted(2.0, "a", 0, 0), Planned(2.0, 0, 1, 5))
    feed(metrics, stepped(4.0, 0, [0], 5), Finished(4.0, "a", "length", 1))
    series = scrape(metrics)
    assert_observed(series, "time_to_first_token_seconds", 3.0)
    assert_observed(series, "inter_token_latency_seconds")
    assert_observed(series, "request_time_per_output_token_seconds")
    assert_observed(series, "request_params_max_tokens")
    assert_observed(series, "request_decode_time_seconds", 0.0)
    assert series["prefix_cache_queries_total", ""] == 0


def test_preempted_request_continues_its_intervals() -> None:
    """It resumes on another row while its former row has a new owner. Its first token, queue time
    and prompt count only once."""
    metrics = new_metrics()
    feed(
        metrics,
        Queued(0.0, "a", 8),
        Admitted(0.0, "a", 0, 0),
        Planned(0.0, 0, 1, 8),
        stepped(1.0, 0, [0], 8),
        Preempted(1.0, "a", "b", 8),
        Queued(1.0, "c", 4),
        Admitted(2.0, "c", 0, 0),
        Admitted(3.0, "a", 1, 4),
        Planned(3.0, 1, 2, 9),
        stepped(6.0, 1, [0, 1], 9),
        Planned(6.0, 2, 2, 2),
        stepped(7.0, 2, [1, 0], 2),
        Finished(7.0, "a", "length", 3),
        Finished(7.0, "c", "length", 2),
    )
    series = scrape(metrics)
    assert_observed(series, "time_to_first_token_seconds", 1.0, 5.0)
    assert_observed(series, "inter_token_latency_seconds", 5.0, 1.0, 1.0)
    assert_observed(series, "request_queue_time_seconds", 0.0, 1.0)
    assert_observed(series, "request_num_preemptions", 1, 0)
    assert series["num_preemptions_total", ""] == 1
    assert series["prompt_tokens_total", ""] == 12
    assert series["prefix_cache_queries_total", ""] == 12
    assert series["prefix_cache_hits_total", ""] == 0


def test_first_token_counts_once_after_an_early_preemption() -> None:
    metrics = new_metrics()
    feed(metrics, Queued(0.0, "a", 8), Admitted(0.0, "a", 3, 0), Preempted(1.0, "a", "b", 4))
    feed(metrics, Admitted(2.0, "a", 3, 0), Planned(2.0, 0, 1, 8), stepped(4.0, 0, [3], 8))
    assert_observed(scrape(metrics), "time_to_first_token_seconds", 4.0)


@pytest.mark.parametrize("row", [0, 1])
def test_preempted_request_may_resume_on_its_old_row(row: int) -> None:
    metrics = new_metrics()
    feed(metrics, Queued(0.0, "a", 8), Admitted(0.0, "a", 0, 0), Planned(0.0, 0, 1, 8))
    feed(metrics, stepped(1.0, 0, [0], 8), Planned(1.0, 1, 1, 1), Preempted(2.0, "a", "b", 8))
    feed(metrics, Admitted(3.0, "a", row, 0), Planned(3.0, 2, 1, 9), stepped(4.0, 2, [row], 9))
    series = scrape(metrics)
    assert_observed(series, "time_to_first_token_seconds", 1.0)
    assert_observed(series, "inter_token_latency_seconds", 3.0)


def test_tokens_in_flight_at_a_preemption_count_for_the_old_owner() -> None:
    """The row may have a new owner by the time they arrive."""
    metrics = new_metrics()
    feed(metrics, Queued(0.0, "a", 8), Admitted(0.0, "a", 0, 0), Planned(0.0, 0, 1, 8))
    feed(metrics, Planned(0.0, 1, 1, 1), Planned(0.0, 2, 1, 1), stepped(1.0, 0, [0], 8))
    feed(metrics, Preempted(1.0, "a", "b", 9), Planned(1.0, 3, 1, 1), stepped(2.0, 1, [0]))
    feed(metrics, Queued(2.0, "c", 4), Admitted(2.0, "c", 0, 0), Planned(2.0, 4, 1, 4))
    feed(metrics, stepped(3.0, 2, [0]))
    series = scrape(metrics)
    assert_observed(series, "time_to_first_token_seconds", 1.0)
    assert_observed(series, "inter_token_latency_seconds", 1.0)
    assert series["generation_tokens_total", ""] == 3
    feed(metrics, stepped(5.0, 4, [0], 4))
    assert_observed(scrape(metrics), "time_to_first_token_seconds", 1.0, 3.0)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_aborted_and_failed_requests_only_count_as_ended(reason: str) -> None:
    """One ends in the queue, one before its first token, one in the middle."""
    metrics = new_metrics()
    feed(metrics, Queued(0.0, "q", 8), Queued(0.0, "a", 8), Queued(0.0, "b", 8))
    feed(metrics, Admitted(1.0, "a", 0, 0), Admitted(1.0, "b", 1, 0), Planned(1.0, 0, 2, 16))
    feed(metrics, stepped(2.0, 0, [1], 16))
    feed(metrics, *(Finished(3.0, name, reason, 0) for name in "qab"))
    series = scrape(metrics)
    assert series["request_success_total", reason] == 3
    assert_observed(series, "time_to_first_token_seconds", 2.0)
    assert_observed(series, "request_queue_time_seconds", 1.0, 1.0)
    for name in ("e2e_request_latency_seconds", "request_prompt_tokens"):
        assert_observed(series, name)
    feed(metrics, Queued(4.0, "d", 8), Admitted(4.0, "d", 1, 0), Planned(4.0, 1, 1, 8))
    feed(metrics, stepped(5.0, 1, [1], 8))
    assert_observed(scrape(metrics), "time_to_first_token_seconds", 2.0, 1.0)


# ---- the exported text ---------------------------------------------------------------------


def test_usage_is_counted_by_api_key() -> None:
    """Tenants without a key are not listed, because clients could invent their names."""
    metrics = new_metrics()
    feed(
        metrics,
        *(Queued(0.0, name, 8, tenant=tenant) for name, tenant in
          (("a", "key 2"), ("b", "key 2"), ("c", "user 5"), ("d", "key 1"))),
        *(Admitted(0.0, name, row, 4) for row, name in enumerate("abcd")),
        Planned(0.0, 0, 4, 16),
        stepped(1.0, 0, [0, 1, 2], 12),
        Finished(2.0, "a", "stop", 5), Finished(2.0, "b", "abort", 2),
        Finished(2.0, "c", "stop", 9), Finished(2.0, "d", "abort", 0),
    )  # fmt: skip
    counts = [line for line in text_of(metrics).splitlines() if line.startswith("quire:key_")]
    plain = [
        line.replace('engine="0",', "").replace(',model_name="tiny"', "").replace('{key="', " ")
        for line in counts
    ]
    found = {name: float(value) for name, value in (line.split('"} ') for line in plain)}
    assert found == {
        "quire:key_requests_total key 2": 2, "quire:key_requests_total key 1": 1,
        "quire:key_prompt_tokens_total key 2": 16,
        "quire:key_prompt_tokens_total key 1": 0,  # no output token
        "quire:key_prompt_tokens_cached_total key 2": 8,
        "quire:key_prompt_tokens_cached_total key 1": 0,
        "quire:key_generation_tokens_total key 2": 7, "quire:key_generation_tokens_total key 1": 0,
    }  # fmt: skip


def test_accepted_draft_tokens_are_counted_by_position() -> None:
    """The series appear with the first draft. Later steps may have more draft tokens than earlier
    ones."""
    metrics, rows = new_metrics(), np.asarray([0, 1, 2], np.int32)
    feed(metrics, stepped(1.0, 0, [0, 1, 2], 3))
    assert not any(name.startswith("spec_decode") for name, _ in scrape(metrics))
    for step_id, accepted_at in enumerate([(2, 1), (), (3, 2, 2, 1), (1,)], 1):
        feed(metrics, Stepped(1.0, step_id, rows, 15, 0.1, 3, 12, accepted_at))
    found = {key: value for key, value in scrape(metrics).items() if "spec_decode" in key[0]}
    per_position = "spec_decode_num_accepted_tokens_per_pos_total"
    assert found == {
        ("spec_decode_num_drafts_total", ""): 12,
        ("spec_decode_num_draft_tokens_total", ""): 48,
        ("spec_decode_num_accepted_tokens_total", ""): 12,
        (per_position, "0"): 6, (per_position, "1"): 3, (per_position, "2"): 2,
        (per_position, "3"): 1,
    }  # fmt: skip
    assert metrics.num_generation_tokens == 3 + 4 * 3 + 12


def test_metrics_have_the_expected_names_types_and_labels() -> None:
    metrics = new_metrics()
    one_request(metrics)
    types = {f.name: f.type for f in text_string_to_metric_families(text_of(metrics))}
    ours = {k.removeprefix("quire:"): v for k, v in types.items() if k.startswith("quire:")}
    by_type = defaultdict(set)
    for name, kind in ours.items():
        by_type[kind].add(name)
    assert by_type["gauge"] == {
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "kv_cache_usage_perc",
        "pinned_prefixes",
        "pinned_kv_blocks",
        "held_requests",
        "held_tokens",
        "cache_config_info",
    }
    assert by_type["counter"] == {
        "prompt_tokens",
        "generation_tokens",
        "prompt_tokens_cached",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "pinned_prefix_hits",
        "pinned_prefix_hit_tokens",
        "num_preemptions",
        "request_success",
    }
    assert len(by_type["histogram"]) == 14
    assert ours.keys() == set().union(*by_type.values())
    assert all(name.startswith(("quire:", "process_")) for name in types)
    for family in text_string_to_metric_families(text_of(metrics)):
        for sample in family.samples:
            assert family.type != "counter" or sample.name.endswith("_total")
            assert not sample.name.endswith("_created")
            if family.name.startswith("quire:"):
                assert sample.labels["model_name"] == "tiny" and sample.labels["engine"] == "0"


def test_vllm_prefix_renames_only_the_metrics_that_vllm_has() -> None:
    """Values and labels are the same under both prefixes."""
    metrics = new_metrics()
    feed(metrics, Queued(0.0, "a", 8, tenant="key 1"), Finished(2.0, "a", "stop", 5))
    view = idle_scheduler().view
    ours = Exposition(metrics, view, "tiny", CacheConfig()).text()
    theirs = Exposition(metrics, view, "tiny", CacheConfig(), prefix="vllm").text()
    lines = [line for line in theirs.splitlines() if not line.startswith(("#", "process_"))]
    assert {line.partition(":")[0] for line in lines} == {"quire", "vllm"}
    names = {re.split(r"[{ ]", line)[0] for line in lines}
    for expected_name in EXPECTED_NAMES:
        assert f"vllm:{expected_name}" in names
    assert "quire:pinned_prefixes" in names and "quire:key_requests_total" in names
    assert "vllm:lora_requests_info" not in names, "this engine has no adapters"
    quire_lines = [line for line in ours.splitlines() if not line.startswith(("#", "process_"))]
    assert [re.sub("^vllm:", "quire:", line) for line in lines] == quire_lines


def test_cache_settings_are_labels() -> None:
    for family in text_string_to_metric_families(text_of(new_metrics(), caching=False)):
        if family.name == "quire:cache_config_info":
            (sample,) = family.samples
    assert sample.value == 1
    assert sample.labels["num_gpu_blocks"] == "100"
    assert sample.labels["block_size"] == "16"
    assert sample.labels["enable_prefix_caching"] == "False"
    assert sample.labels["kv_cache_memory_bytes"] == "None"


def test_model_name_is_escaped() -> None:
    name = 'a "quoted" \\ name\nof {two} lines, ü'
    text = text_of(new_metrics(), name=name)
    families = list(text_string_to_metric_families(text))
    samples = [s for f in families if f.name.startswith("quire:") for s in f.samples]
    assert samples and all(s.labels["model_name"] == name for s in samples)


# ---- with a real scheduler -----------------------------------------------------------------


class Bench:
    """A scheduler with metrics that records when each request got its tokens."""

    def __init__(self, depth: int = 1, num_blocks: int = 24, num_rows: int = 4) -> None:
        config = SchedulerConfig(
            max_num_seqs=num_rows, max_num_batched_tokens=32, pipeline_depth=depth
        )
        self.scheduler, self.executor = dry_run(num_blocks, 4, config, MAX_LEN, True)
        self.heard_events = listen(self.scheduler)
        self.metrics = EngineMetrics(num_rows, MAX_LEN, counts_hits=True)
        self.clock = FakeClock(100.0)
        self.rng = np.random.default_rng(depth)
        self.queued_s: dict[str, float] = {}
        self.tokens_s: dict[str, list[float]] = defaultdict(list)
        self.num_planned: list[int] = []
        self.reader = StepReader()

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self.scheduler.add(dry_request(name, prompt, max_tokens), self.clock.now())
        self.queued_s[name] = self.clock.now()

    def step(self) -> None:
        self.clock.advance(float(self.rng.uniform(0.001, 0.1)))
        while (plan := self.scheduler.schedule(self.clock.now()).plan) is not None:
            self.executor.submit(plan)
            self.num_planned.append(int(plan.num_tokens.sum()))
        if self.scheduler.planner.in_flight:
            self.clock.advance(float(self.rng.uniform(0.001, 0.1)))
            outputs = self.scheduler.update(self.executor.next_result(), self.clock.now()).outputs
            for update in read(self.reader, outputs):
                self.tokens_s[update.request_id] += [self.clock.now()] * len(update.token_ids)
        self.publish()

    def publish(self) -> None:
        feed(self.metrics, *self.heard_events)
        self.heard_events.clear()

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_metrics_match_a_busy_scheduler(depth: int) -> None:
    """Prefixes are shared, rows preempted, and there are more requests than rows."""
    bench = Bench(depth)
    line = bench.rng.integers(0, 1000, 40).tolist()
    for i in range(40):
        own = bench.rng.integers(0, 1000, int(bench.rng.integers(1, 12))).tolist()
        bench.add(f"r{i}", line[: 4 * (i % 8)] + own, int(bench.rng.integers(1, 30)))
        bench.step()
    bench.finish()
    series, tokens_s = scrape(bench.metrics, bench.scheduler), bench.tokens_s
    assert series["num_preemptions_total", ""] > 0, "no request was preempted"
    assert series["prefix_cache_hits_total", ""] > 0
    assert len(tokens_s) == 40 and series["request_success_total", "length"] == 40
    assert series["generation_tokens_total", ""] == sum(map(len, tokens_s.values()))
    assert_observed(
        series,
        "time_to_first_token_seconds",
        *(times[0] - bench.queued_s[name] for name, times in tokens_s.items()),
    )
    gaps = [gap for times in tokens_s.values() for gap in np.diff(times).tolist()]
    assert_observed(series, "inter_token_latency_seconds", *gaps)
    assert_observed(series, "request_generation_tokens", *map(len, tokens_s.values()))
    assert_observed(
        series, "request_decode_time_seconds", *(t[-1] - t[0] for t in tokens_s.values())
    )
    assert_observed(series, "iteration_tokens_total", *bench.num_planned)


def test_gauges_show_the_current_state_of_the_scheduler() -> None:
    bench = Bench(num_blocks=20, num_rows=2)
    for i in range(5):
        bench.add(f"r{i}", [i] * 9, 4)
    bench.step()
    series = scrape(bench.metrics, bench.scheduler)
    assert series["num_requests_running", ""] == 2
    assert series["num_requests_waiting", ""] == 3
    assert series["num_requests_waiting_by_reason", "capacity"] == 3
    assert series["kv_cache_usage_perc", ""] == pytest.approx(6 / 20)
    bench.finish()
    series = scrape(bench.metrics, bench.scheduler)
    assert series["num_requests_running", ""] == 0
    assert series["kv_cache_usage_perc", ""] == 0


def num_request_times() -> int:
    gc.collect()
    return sum(isinstance(item, RequestTimes) for item in gc.get_objects())


def test_no_state_is_kept_for_ended_requests() -> None:
    """Every third of the requests is aborted: in the queue, before its first token, or
    preempted."""
    bench = Bench(depth=2)
    before = num_request_times()
    for i in range(400):
        bench.add(f"r{i}", bench.rng.integers(0, 1000, 1 + i % 30).tolist(), 1 + i % 7)
        if i % 3 == 0:
            bench.scheduler.control(Abort(f"r{i - i % 5}"), bench.clock.now())
        if i % 2:
            bench.step()
    bench.finish()
    series = scrape(bench.metrics, bench.scheduler)
    ended = {reason: series["request_success_total", reason] for reason in ("length", "abort")}
    assert sum(ended.values()) == 400 and ended["abort"] > 40
    assert bench.metrics.open == {} and num_request_times() == before


def test_idle_time_is_the_time_between_requests() -> None:
    metrics = new_metrics()
    feed(metrics, Queued(5.0, "a", 8), Queued(6.0, "b", 8), Finished(7.0, "a", "abort", 0))
    assert metrics.idle_s == 0
    feed(metrics, Finished(8.0, "b", "abort", 0), Queued(20.0, "c", 8))
    assert metrics.idle_s == 12.0
