"""The real server under overload: an immediate 503, and overdue work dropped with 408."""

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.support.processes.servers import Server, Stream, wait_until

WAITING = "quire:num_requests_waiting"
RUNNING = "quire:num_requests_running"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One row, and room for one waiting request."""
    server = Server("--max-num-seqs", "1", "--max-num-queued-reqs", "1")
    yield server
    assert server.stop() == 0


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    wait_until(lambda: server.metric(RUNNING) + server.metric(WAITING) == 0, "it is idle")
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_full_queue_rejects_requests_with_503(server: Server, client: openai.OpenAI) -> None:
    running = Stream(server)
    running.event()
    with ThreadPoolExecutor(1) as pool:
        queued = pool.submit(client.completions.create, model="demo", prompt="Hi", max_tokens=2)
        wait_until(lambda: server.metric(WAITING) == 1, "one waits")
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model="demo", prompt="Ho", max_tokens=2)
        assert refused.value.status_code == 503
        assert refused.value.code == "engine_busy"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        running.close()
        assert queued.result(60).choices[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize("chat", [False, True])
def test_waiting_request_past_its_deadline_gets_408(
    server: Server, client: openai.OpenAI, chat: bool
) -> None:
    running = Stream(server)
    running.event()
    late = {"timeout_s": 0.05}
    with pytest.raises(openai.APIStatusError) as refused:
        if chat:
            question = [{"role": "user", "content": "Hi"}]
            client.chat.completions.create(model="demo", messages=question, extra_body=late)
        else:
            client.completions.create(model="demo", prompt="Hi", extra_body=late)
    assert refused.value.status_code == 408
    assert refused.value.code == "request_timeout"
    assert "timeout_s=0.05" in refused.value.body["message"]
    assert server.metric(WAITING) == 0
    running.close()


def test_stream_past_its_deadline_ends_with_an_error_event(
    server: Server, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.APIError, match=r"timeout_s=0\.3"):
        stream = client.completions.create(
            model="demo", prompt="Once upon a time", max_tokens=1900, stream=True,
            extra_body={"timeout_s": 0.3, "ignore_eos": True},
        )  # fmt: skip
        assert list(stream)
    wait_until(lambda: server.metric(RUNNING) == 0, "its row is free")
    assert server.metric("quire:kv_cache_usage_perc") == 0


def test_timeout_does_not_change_a_timely_answer(server: Server, client: openai.OpenAI) -> None:
    plain = client.completions.create(model="demo", prompt="Hi", max_tokens=8, temperature=0)
    timed = client.completions.create(
        model="demo", prompt="Hi", max_tokens=8, temperature=0, extra_body={"timeout_s": 60}
    )
    assert timed.choices[0].text == plain.choices[0].text


def test_overloaded_server_rejects_within_a_second(server: Server) -> None:
    """Errors of invalid requests and /health are as quick, whatever the core does."""
    wait_until(lambda: server.metric(RUNNING) + server.metric(WAITING) == 0, "it is idle")
    end_s = time.monotonic() + 2.5
    took_s: dict[int, list[float]] = {200: [], 400: [], 503: []}
    long = json.dumps({"prompt": [7] * 1900, "max_tokens": 40, "ignore_eos": True}).encode()
    wrong = json.dumps({"prompt": "Hi", "max_tokens": -5}).encode()

    def ask(body: bytes | None) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        while time.monotonic() < end_s:
            began = time.monotonic()
            if body is None:
                connection.request("GET", "/health")
            else:
                head = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/completions", body, head)
            answer = connection.getresponse()
            answer.read()
            is_served = body is long and answer.status == 200
            took_s[answer.status] += [] if is_served else [time.monotonic() - began]
            time.sleep(0.05)  # clients without pauses would measure themselves
        connection.close()

    bodies = [long] * 12 + [wrong, None]
    with ThreadPoolExecutor(len(bodies)) as pool:
        assert not [error for error in pool.map(ask, bodies) if error is not None]
    for status, times in took_s.items():
        assert len(times) > 5, f"there was no answer of status {status}"
        late = sorted(times)[int(0.95 * len(times))]
        assert late < 1.0, f"answers of status {status} took up to {max(times):.2f} s"
