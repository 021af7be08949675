"""The observers of an API process, made from the server's settings. They report ended requests."""

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.base.settings.config import ServerConfig
from quire.base.settings.secrets import SecretUrl
from quire.engine.client.async_client import AsyncClient
from quire.serve.observers.observed_client import Listener, ObservedClient, ObservedRequest
from quire.serve.observers.rate_limits import RateLimits
from quire.serve.observers.usage_log import UsageLog

if TYPE_CHECKING:
    from quire.serve.observers.tracer import RequestTracer


logger = logging.getLogger("quire")


class UsageLine(msgspec.Struct):
    """A line of the usage log. time: end of the request. key: its key's name, as in
    `base/tenants.py`."""

    time: str
    key: str
    model: str
    request_id: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    duration_s: float
    status: str


class Observers:
    """The observers of one model. client: the client that the API uses, which wraps the given one
    if necessary. model: the name to report. Raises ConfigError for unusable settings."""

    def __init__(
        self, client: AsyncClient, server: ServerConfig, model: str, rates: RateLimits | None
    ) -> None:
        self._model = model
        self._log = None if server.usage_log is None else UsageLog(Path(server.usage_log))
        listeners: list[Listener] = [] if self._log is None else [self._write]
        if server.log_requests:
            listeners.append(self._log_line)
        self._tracer = _tracer(server.otlp_traces_endpoint, model)
        if self._tracer is not None:
            listeners.append(self._tracer)
        self.client = client
        if listeners or rates is not None:
            needs_timeline = self._tracer is not None
            self.client = ObservedClient(client, listeners, rates, needs_timeline)

    async def close(self) -> None:
        """Close the client, then send and write the pending reports."""
        await self.client.close()
        if self._tracer is not None:
            self._tracer.close()
        if self._log is not None:
            self._log.close()

    def _log_line(self, seen: ObservedRequest) -> None:
        first = "" if seen.first_token_s is None else f"first token {seen.first_token_s:.3f} s, "
        logger.info(
            "request %s, model %s: %d prompt tokens (%d cached), %d output tokens, %stotal %.3f s,"
            " %s%s",
            seen.request.request_id, self._model, seen.num_prompt, seen.num_cached,
            seen.num_completion, first, seen.duration_s, seen.status,
            f", weights {seen.weights_version}" if seen.weights_version else "",
        )  # fmt: skip

    def _write(self, seen: ObservedRequest) -> None:
        assert self._log is not None
        ended = datetime.fromtimestamp(seen.began_s + seen.duration_s, UTC)
        line = UsageLine(
            ended.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            seen.request.tenant,
            self._model,
            seen.request.request_id,
            seen.num_prompt,
            seen.num_cached,
            seen.num_completion,
            round(seen.duration_s, 4),
            seen.status,
        )
        self._log.append(msgspec.json.encode(line))


def _tracer(endpoint: str | None, model: str) -> "RequestTracer | None":
    """Return a tracer if there is an endpoint. Only then are the packages of `quire[otel]` used."""
    if endpoint is None:
        return None
    from quire.serve.observers.tracer import RequestTracer

    return RequestTracer.sending_to(SecretUrl(endpoint), model)
