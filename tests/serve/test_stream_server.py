"""/v1/stream through the real processes: its answers, and no leaks after a disconnect."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from websockets.sync.client import ClientConnection, connect

from tests.support.processes.servers import Server, wait_until

STORY = "Once upon a time, there was a little fox. It lived in the woods, and one day it"
START = {"type": "start", "temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("--max-num-seqs", "8")
    yield server
    assert server.stop() == 0


def opened(server: Server) -> ClientConnection:
    return connect(server.url.replace("http", "ws") + "/v1/stream")


def send(line: ClientConnection, **fields: Any) -> None:
    line.send(json.dumps(fields))


def receive(line: ClientConnection) -> Any:
    return json.loads(line.recv(timeout=60))


def text(line: ClientConnection) -> str:
    found = ""
    while (message := receive(line))["type"] != "done":
        assert message["type"] in ("started", "chunk"), message
        found += "".join(choice["text"] for choice in message.get("choices", []))
    return found


def test_streamed_prompt_gives_the_text_of_a_completion(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    whole = client.completions.create(model="demo", prompt=STORY, temperature=0, max_tokens=40)
    with opened(server) as line:
        for size in (1, 5, 30):
            send(line, **START)
            for start in range(0, len(STORY), size):
                send(line, type="append", prompt=STORY[start : start + size])
            send(line, type="end")
            assert text(line) == whole.choices[0].text
        send(line, **START, prompt=[10**8])
        while (message := receive(line))["type"] != "error":
            pass
        assert "vocabulary" in message["error"]["message"]
        send(line, **START, prompt=STORY, last=True)
        assert text(line) == whole.choices[0].text


@pytest.mark.parametrize("is_last", [False, True])
def test_disconnect_frees_row_and_blocks(server: Server, is_last: bool) -> None:
    with opened(server) as line:
        send(line, **START | {"max_tokens": 1900, "ignore_eos": True}, prompt=STORY, last=is_last)
        wait_until(
            lambda: server.metric("quire:kv_cache_usage_perc") > 0, "the prompt is being computed"
        )
    wait_until(lambda: server.metric("quire:num_requests_running") == 0, "all rows are free")
    wait_until(lambda: server.metric("quire:kv_cache_usage_perc") == 0, "all blocks are free")


def test_sigterm_lets_an_open_prompt_finish() -> None:
    server = Server("--shutdown-timeout", "300")
    try:
        with opened(server) as line, opened(server) as other:
            send(line, **START, prompt="Once upon")
            assert receive(line)["type"] == "started"
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.get("/ready") == 503, "it drains")
            send(other, **START, prompt=STORY)
            assert receive(other)["error"]["code"] == "draining"
            send(line, type="append", prompt=" a time", last=True)
            assert text(line)
            assert server.process.wait(30) == 0
    finally:
        server.process.kill()
        server.process.wait()
    assert not [found for found in server.lines if "Traceback" in found]
