"""`RequestMetrics` under vLLM's names."""

from quire.base.requests.outputs import RequestMetrics


def test_times_have_the_names_of_vllm() -> None:
    metrics = RequestMetrics(10.0)
    assert (metrics.arrival_time, metrics.first_token_ts, metrics.last_token_ts) == (10, None, None)
    assert metrics.first_token_latency is None
    metrics.first_token_s, metrics.last_token_s = 10.5, 12.0
    assert (metrics.first_token_ts, metrics.last_token_ts) == (10.5, 12.0)
    assert metrics.first_token_latency == 0.5
