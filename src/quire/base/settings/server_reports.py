"""Settings of a server: what it reports of requests, in logs, traces and metrics."""

from dataclasses import dataclass

from quire.base.settings.fields import setting
from quire.base.settings.secrets import SecretUrl


@dataclass(frozen=True)
class ServerReports:
    """Reports of requests: log lines, the usage log, traces and the names of metrics."""

    log_requests: bool = setting(
        False, "log one line per finished request: lengths and times, never text"
    )
    usage_log: str | None = setting(
        None, "file that gets one JSON line per finished request: name of its API key, and tokens"
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "URL of an OpenTelemetry collector that gets one span per request (`quire[otel]`)",
        secrecy=SecretUrl,
    )
    metrics_prefix: str = setting(
        "quire",
        "prefix of metric names; `vllm` adds vLLM's names for its dashboards and routers",
        choices=("quire", "vllm"),
    )
