"""Whether traces can be sent: `--otlp-traces-endpoint` needs packages that quire does without."""

import importlib.util

from quire.base.errors import ConfigError

PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def check_tracing(endpoint: str | None) -> None:
    """Raise ConfigError for an endpoint that is no URL, or if a package is missing."""
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp_traces_endpoint must be a URL of OTLP over HTTP, such as"
            f" http://localhost:4318/v1/traces, got {endpoint!r}."
        )
    for name in PACKAGES:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # of what it is a part of
            found = None
        if found is None:
            raise ConfigError(
                f"otlp_traces_endpoint needs the package {name}; install quire with it:"
                " pip install 'quire[otel]'."
            )
