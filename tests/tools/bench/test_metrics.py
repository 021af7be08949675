"""The metrics of a run of three requests, computed by hand."""

import math

import pytest

from quire.tools.bench.metrics import RequestResult, block, json_details, json_keys, measure

# Token times after the start: 0.1, 0.2, 0.4 | 0.3, 1.3 (two tokens per chunk) | one token at 0.5.
RESULTS = [
    RequestResult(10.0, 7, latency_s=0.4, ttft_s=0.1, itls_s=[0.1, 0.2], output_len=3, text="abc"),
    RequestResult(10.5, 5, latency_s=1.3, ttft_s=0.3, itls_s=[1.0], output_len=4),
    RequestResult(12.0, 3, latency_s=0.5, ttft_s=0.5, output_len=1),
    RequestResult(12.0, 99, ttft_s=9.0, itls_s=[9.0], output_len=9, error="refused"),
]
ORDER = [
    "============ Serving Benchmark Result ============",
    "Successful requests:                     3         ",
    "Failed requests:                         1         ",
    "Maximum request concurrency:             8         ",
    "Request rate configured (RPS):           2.50      ",
    "Benchmark duration (s):                  4.00      ",
    "Total input tokens:                      15        ",
    "Total generated tokens:                  8         ",
    "Request throughput (req/s):              0.75      ",
    "Request goodput (req/s):                 0.50      ",
    "Output token throughput (tok/s):         2.00      ",
    "Peak output token throughput (tok/s):    5.00      ",
    "Peak concurrent requests:                2.00      ",
    "Total token throughput (tok/s):          5.75      ",
    "---------------Time to First Token----------------",
    "Mean TTFT (ms):                          300.00    ",
    "Median TTFT (ms):                        300.00    ",
    "P50 TTFT (ms):                           300.00    ",
    "P99.9 TTFT (ms):                         499.60    ",
    "-----Time per Output Token (excl. 1st token)------",
    "Mean TPOT (ms):                          241.67    ",
    "Median TPOT (ms):                        241.67    ",
    "P50 TPOT (ms):                           241.67    ",
    "P99.9 TPOT (ms):                         333.15    ",
    "---------------Inter-token Latency----------------",
    "Mean ITL (ms):                           433.33    ",
    "Median ITL (ms):                         200.00    ",
    "P50 ITL (ms):                            200.00    ",
    "P99.9 ITL (ms):                          998.40    ",
    "----------------End-to-end Latency----------------",
    "Mean E2EL (ms):                          733.33    ",
    "Median E2EL (ms):                        500.00    ",
    "P50 E2EL (ms):                           500.00    ",
    "P99.9 E2EL (ms):                         1298.40   ",
    "==================================================",
]


def test_block_has_the_order_of_vllm() -> None:
    metrics = measure(RESULTS, 4.0, (50.0, 99.9), {"ttft": 500.0, "tpot": 160.0})
    shown = ("e2el", "itl", "tpot", "ttft")  # the order is vLLM's, regardless of the request
    assert block(metrics, shown, 8, 2.5).splitlines() == ORDER


def test_unrequested_metrics_are_not_printed() -> None:
    printed = block(measure(RESULTS, 4.0, (99.0,), {}), ("itl",), None, math.inf)
    for name in ("concurrency:", "configured", "goodput", "TTFT", "E2EL"):
        assert name not in printed
    assert "P99 ITL (ms):" in printed


def test_json_values_are_computed_by_hand() -> None:
    keys = json_keys(measure(RESULTS, 4.0, (50.0, 99.9), {"e2el": 500.0}))
    assert (keys["completed"], keys["failed"]) == (3, 1)
    assert (keys["total_input_tokens"], keys["total_output_tokens"]) == (15, 8)
    assert keys["request_goodput"] == pytest.approx(2 / 4)  # of 400, 1300, 500 ms
    assert keys["total_token_throughput"] == pytest.approx(23 / 4)
    assert keys["std_ttft_ms"] == pytest.approx(math.sqrt((200**2 + 0 + 200**2) / 3))
    assert keys["mean_tpot_ms"] == pytest.approx((150 + 1000 / 3) / 2)
    assert keys["p99.9_itl_ms"] == pytest.approx(200 + 800 * 0.998)
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p50")} <= keys.keys()


def test_peaks_are_counted_by_second() -> None:
    # From 10.0 on: 3 tokens in second 0 (10.1, 10.2, 10.4) and 2 of 4 at 10.8; 2 at 11.8.
    metrics = measure(RESULTS, 4.0, (), {})
    assert metrics.max_output_tokens_per_s == 5.0
    assert metrics.max_concurrent_requests == 2


def test_run_without_successful_requests_has_zeros() -> None:
    metrics = measure(RESULTS[3:], 4.0, (99.0,), {"ttft": 1.0})
    assert (metrics.completed, metrics.failed, metrics.goodput) == (0, 1, 0.0)
    assert json_keys(metrics)["p99_ttft_ms"] == 0.0


def test_details_keep_the_order_and_the_errors() -> None:
    details = json_details(RESULTS)
    assert details["errors"] == ["", "", "", "refused"]
    assert details["itls"][:2] == [[0.1, 0.2], [1.0]]
    assert details["generated_texts"][0] == "abc"
