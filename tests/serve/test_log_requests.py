"""Test `--log-requests`: one line per finished request, with lengths and times, without text."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator

import pytest

from quire.base.messages import Request
from quire.base.requests.outputs import CompletionOutput, RequestMetrics, RequestOutput, WeightsSpan
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.config import ServerConfig
from quire.serve.observers.observers import Observers
from tests.support.processes.servers import Server, Stream


class Client:
    """A client that answers every request with one output. version: of its weights."""

    def __init__(self, version: str) -> None:
        self._spans = (WeightsSpan(0, version),) if version else ()

    async def generate(
        self, request: Request, prompt_text: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        metrics = RequestMetrics(10.0, first_token_s=10.25, num_generation_tokens=2)
        completion = CompletionOutput(0, "secret words", [1, 2], finish_reason="stop")
        completion.weights_versions = self._spans
        yield RequestOutput(
            request.request_id, "secret", [1, 2, 3], None, [completion], True, metrics, 2
        )

    async def close(self) -> None: ...


@pytest.mark.parametrize("version", ["", "step-2"])
@pytest.mark.parametrize("log_requests", [True, False])
def test_each_request_is_logged_in_one_line(
    log_requests: bool,
    version: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    server = ServerConfig(log_requests=log_requests)
    request = Request("cmpl-1", [1, 2, 3], SamplingParams(), seed=0)

    async def run() -> None:
        observers = Observers(Client(version), server, "m", None)
        assert [each async for each in observers.client.generate(request, "secret")]
        await observers.close()

    with caplog.at_level(logging.INFO, "quire"):
        asyncio.run(run())
    assert len(caplog.messages) == log_requests
    if log_requests:
        [line] = caplog.messages
        assert re.fullmatch(
            r"request cmpl-1, model m: 3 prompt tokens \(2 cached\), 2 output tokens, first token"
            r" 0\.250 s, total \d+\.\d{3} s, stop" + (f", weights {version}" if version else ""),
            line,
        )


def test_server_log_shows_startup_and_each_request() -> None:
    server = Server("--log-requests", "--max-model-len", "64")
    try:
        server.wait_for_line(r"model demo \(llama, .*weights: not quantized.*context: 64 tokens")
        server.wait_for_line(r"ready: .*\(page\); started in \d+\.\d s; ")
        Stream(server, max_tokens=3).rest()
        server.wait_for_line(r"request cmpl-\S+, model demo: \d+ prompt tokens .* 3 output tokens")
    finally:
        assert server.stop() == 0
