"""Spans of requests, from the app to an in-memory exporter."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.base.errors import ConfigError
from quire.base.settings.config import ServerConfig
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from quire.serve.observers.observed_client import ObservedClient, ObservedRequest
from quire.serve.observers.observers import Observers
from quire.serve.supervisor import check_tracing
from tests.serve.api.conftest import MakeContext
from tests.support.processes.servers import wait_until
from tests.support.serve.fake_client import FakeClient

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs quire[otel]")
from opentelemetry.sdk.trace import ReadableSpan  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # noqa: E402
    InMemorySpanExporter,
)

from quire.serve.observers.tracer import RequestTracer  # noqa: E402

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "top_p": 0.5}
COMPLETIONS = "/v1/completions"


class Traced:
    def __init__(self, context: ApiContext) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer = RequestTracer(SimpleSpanProcessor(self.exporter), "fox")
        assert isinstance(context.client, FakeClient)
        self.client = context.client
        context.client = ObservedClient(context.client, [self.tracer], needs_timeline=True)
        self.api = TestClient(create_app(context), raise_server_exceptions=False)

    def spans(self, num: int) -> dict[str, ReadableSpan]:
        """Wait for `num` spans; return them by name."""
        wait_until(lambda: len(self.exporter.get_finished_spans()) >= num)
        found = {span.name: span for span in self.exporter.get_finished_spans()}
        assert len(found) == num
        return found


@pytest.fixture
def traced(make_context: MakeContext) -> Iterator[Traced]:
    context = make_context(otlp_traces_endpoint="http://127.0.0.1:1/v1/traces")
    found = Traced(context)
    with found.api:
        yield found
    found.tracer.close()


def test_request_is_a_span_with_its_phases_as_children(traced: Traced) -> None:
    before = time.time_ns()
    answer = traced.api.post(COMPLETIONS, json=BODY).json()
    spans = traced.spans(4)
    root = spans.pop("llm_request")
    assert root.parent is None and root.kind.name == "SERVER" and root.status.is_ok
    tags = dict(root.attributes or {})
    assert tags["gen_ai.request.id"] == f"{answer['id']}-0"
    assert tags["gen_ai.usage.prompt_tokens"] == 3
    assert tags["gen_ai.usage.completion_tokens"] == 4
    assert tags["gen_ai.request.max_tokens"] == 4 and tags["gen_ai.request.top_p"] == 0.5
    assert tags["gen_ai.request.n"] == 1 and tags["gen_ai.response.model"] == "fox"
    assert tags["gen_ai.response.finish_reasons"] == ("length",)
    assert root.resource.attributes["service.name"] == "quire"
    assert set(spans) == {"queue", "prefill", "decode"}
    assert root.context is not None
    for child in spans.values():
        assert child.parent is not None and child.parent.span_id == root.context.span_id
    times = [(s.start_time or 0, s.end_time or 0) for s in spans.values()]
    (q0, q1), (p0, p1), (d0, d1) = sorted(times)
    assert before <= q0 <= q1 == p0 <= p1 == d0 <= d1 <= time.time_ns()
    latency = {n.rpartition(".")[2]: v for n, v in tags.items() if n.startswith("gen_ai.latency")}
    assert latency["time_in_model_decode"] == pytest.approx((d1 - d0) / 1e9, abs=2e-6)
    assert latency["time_in_model_inference"] == pytest.approx((d1 - p0) / 1e9, abs=2e-6)
    assert latency["time_to_first_token"] <= latency["e2e"]
    text = json.dumps(tags) + str(root.events)
    assert answer["choices"][0]["text"].strip() not in text


def test_span_belongs_to_the_clients_trace(traced: Traced) -> None:
    """Also if the engine's requests are made in separate tasks."""
    header = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    two = BODY | {"prompt": [[5, 6], [7]], "stream": True}
    traced.api.post(COMPLETIONS, json=two, headers=header)
    wait_until(lambda: len(traced.exporter.get_finished_spans()) == 8)
    spans = traced.exporter.get_finished_spans()
    roots = [span for span in spans if span.name == "llm_request"]
    assert len(roots) == 2
    for root in roots:
        assert root.parent is not None and f"{root.parent.span_id:016x}" == PARENT
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context} == {TRACE}


def test_unsampled_trace_has_no_span_and_bad_header_is_ignored(traced: Traced) -> None:
    for value in (f"00-{TRACE}-{PARENT}-00", "nonsense"):
        traced.api.post(COMPLETIONS, json=BODY, headers={"traceparent": value})
    assert traced.spans(4)["llm_request"].parent is None  # the second request's


def test_failed_request_is_an_error_span(traced: Traced) -> None:
    traced.client.kill()
    assert traced.api.post(COMPLETIONS, json=BODY).status_code == 503
    [root] = traced.spans(1).values()
    assert root.status.status_code.name == "ERROR" and root.status.description == "engine_dead"


def test_unresponsive_collector_delays_no_request(make_context: MakeContext) -> None:
    """The collector accepts connections but never responds."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        endpoint = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        context = make_context(otlp_traces_endpoint=endpoint)
        observers = Observers(context.client, context.config, "fox", None)
        context.client = observers.client
        with TestClient(create_app(context)) as api:
            for _ in range(3):
                assert api.post(COMPLETIONS, json=BODY).status_code == 200
        began = time.monotonic()
        asyncio.run(observers.close())
        assert time.monotonic() - began < 5


def test_raising_listener_affects_no_request(
    api_context: ApiContext, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    def raises(request: ObservedRequest) -> None:
        raise RuntimeError("of the listener")

    listeners = [raises, lambda request: seen.append(request.status)]
    api_context.client = ObservedClient(api_context.client, listeners)
    with TestClient(create_app(api_context)) as api:
        assert api.post(COMPLETIONS, json=BODY).status_code == 200
    assert seen == ["length"] and "of the listener" in caplog.text


def test_otlp_endpoint_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tracing(ServerConfig().otlp_traces_endpoint)
    check_tracing("https://collector")
    with pytest.raises(ConfigError, match="must be a URL of OTLP over HTTP.*'collector:4317'"):
        check_tracing("collector:4317")
    monkeypatch.setattr("quire.serve.supervisor.PACKAGES", ("no_such_package.sdk",))
    with pytest.raises(ConfigError, match=r"pip install 'quire\[otel\]'"):
        check_tracing("https://collector")
