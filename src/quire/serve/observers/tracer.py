"""OpenTelemetry spans of ended requests, made from the engine's timelines.

A request is a span `llm_request` with vLLM's attributes. Its children are `queue`, `prefill` and
`decode`. It belongs to the trace in the client's `traceparent`. No span holds any text of prompts
or answers. Nothing is traced while a request runs, and a thread sends the spans.
"""

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from quire.base.settings.secrets import SecretUrl
from quire.base.version import QUIRE_VERSION
from quire.serve.observers.observed_client import ObservedRequest

FAILURES = ("busy", "refused", "engine_dead", "failed", "error", "timeout")
CLOSE_S = 3.0  # time to send the last spans
PATH = "/v1/traces"
# Each part of a request, with the timeline's fields of its begin and end.
PARTS = (
    ("queue", "queued_ms", "admitted_ms"),
    ("prefill", "admitted_ms", "first_token_ms"),
    ("decode", "first_token_ms", "finished_ms"),
)


class _Scrub(logging.Filter):
    """Log filter that masks the collector's secrets, because the exporter's messages quote URLs."""

    def __init__(self, endpoint: SecretUrl) -> None:
        super().__init__()
        self._endpoint = endpoint

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = self._endpoint.scrub(record.getMessage()), ()
        if record.exc_info and self._endpoint.has_secret:
            record.exc_info = record.exc_text = None
        return True


class RequestTracer:
    """Maker of the spans of ended requests. model: name to report; processor: receives spans."""

    def __init__(self, processor: SpanProcessor, model: str) -> None:
        name = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "quire"}
        resource = Resource.create({**name, "service.version": QUIRE_VERSION})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("quire", QUIRE_VERSION)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    @classmethod
    def sending_to(cls, endpoint: SecretUrl, model: str) -> "RequestTracer":
        """Return a tracer that sends spans to a collector by OTLP over HTTP. endpoint: a URL; a URL
        without a path gets the usual path."""
        true = endpoint.reveal()
        bare = urlsplit(true).path in ("", "/")
        url = true.rstrip("/") + PATH if bare else true
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(_Scrub(endpoint))
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)), model)

    def __call__(self, seen: ObservedRequest) -> None:
        context = self._propagator.extract(dict(seen.trace_headers))
        start_ns = int(seen.began_s * 1e9)
        span = self._tracer.start_span(
            "llm_request",
            context,
            SpanKind.SERVER,
            attributes=self._attributes(seen),
            start_time=start_ns,
        )
        if seen.status in FAILURES:
            span.set_status(StatusCode.ERROR, seen.status)
        end_ns = start_ns + int(seen.duration_s * 1e9)
        self._add_parts(span, seen.timeline, start_ns, end_ns)
        span.end(end_ns)

    def close(self) -> None:
        """Send the last spans within 3 s, so that an unreachable collector delays no shutdown."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(CLOSE_S)

    def _add_parts(
        self, span: Span, timeline: Mapping[str, Any], start_ns: int, end_ns: int
    ) -> None:
        """Add the child spans and the preemptions, as far as the timeline has them."""
        context = set_span_in_context(span)
        for name, begin, end in PARTS:
            if timeline.get(begin) is not None:
                until = timeline.get(end)
                child = self._tracer.start_span(
                    name, context, start_time=_at(start_ns, timeline[begin])
                )
                child.end(end_ns if until is None else _at(start_ns, until))
        for preemption in timeline.get("preemptions", ()):
            event_attributes = {
                "quire.way": preemption["way"],
                "quire.lost_tokens": preemption["lost_tokens"],
            }
            span.add_event("preempted", event_attributes, _at(start_ns, preemption["at_ms"]))

    def _attributes(self, seen: ObservedRequest) -> dict[str, Any]:
        params, timeline = seen.request.params, seen.timeline
        found: dict[str, Any] = {
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": (seen.status,),
            "gen_ai.request.id": seen.request.request_id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": float(params.temperature),
            "gen_ai.request.top_p": float(params.top_p),
            "gen_ai.usage.prompt_tokens": seen.num_prompt,
            "gen_ai.usage.completion_tokens": seen.num_completion,
            "gen_ai.latency.e2e": seen.duration_s,
            "quire.usage.cached_tokens": seen.num_cached,
            "quire.key": seen.request.tenant,
        }
        if params.max_tokens is not None:
            found["gen_ai.request.max_tokens"] = params.max_tokens
        for name, begin, end in (
            ("time_in_queue", "queued_ms", "admitted_ms"),
            ("time_to_first_token", None, "first_token_ms"),
            ("time_in_model_prefill", "admitted_ms", "first_token_ms"),
            ("time_in_model_decode", "first_token_ms", "finished_ms"),
            ("time_in_model_inference", "admitted_ms", "finished_ms"),
        ):
            from_ms = 0.0 if begin is None else timeline.get(begin)
            until_ms = timeline.get(end)
            if from_ms is not None and until_ms is not None:
                found[f"gen_ai.latency.{name}"] = (until_ms - from_ms) / 1000
        return found


def _at(start_ns: int, ms: float) -> int:
    return start_ns + int(ms * 1e6)
