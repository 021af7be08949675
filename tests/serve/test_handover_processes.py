"""Servers that hand prompts over and are killed meanwhile. The other server still answers, with
the tokens of a single server."""

import http.client
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from quire.engine.connectors.peer_wire import SECRET
from tests.support.engine.shared_store import shared_store
from tests.support.processes.servers import WAIT_S, Server

FIRST_LEG = {"do_remote_decode": True, "do_remote_prefill": False}
STORY = "Once upon a time there was a little fox who lived in a deep forest with its mother. "
OPTIONS = ("--dtype", "float32", "--max-num-batched-tokens", "64")


@pytest.fixture
def store() -> Iterator[str]:
    with shared_store() as url:
        yield url


def ask(server: Server, prompt: str, max_tokens: int, transfer: Any) -> dict[str, Any] | None:
    """Return the answer, or None if the server is gone."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"kv_transfer_params": transfer}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
        return answer if response.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def prompts(num: int, seed: int) -> list[str]:
    numbers = random.Random(seed)
    return [f"Story {numbers.random()}. " + STORY * numbers.randrange(2, 16) for _ in range(num)]


@pytest.mark.slow
def test_killed_prefill_server_changes_no_answer(store: str) -> None:
    """Both legs are sent together, and the prefill server is killed at a random time."""
    second = Server("--kv-store", store, *OPTIONS)
    numbers = random.Random(1)
    for number in range(4):
        first = Server("--kv-store", store, "--kv-eager", *OPTIONS)
        texts = prompts(4, number)
        legs = [threading.Thread(target=ask, args=(first, p, 1, FIRST_LEG)) for p in texts]
        for leg in legs:
            leg.start()
        timer = threading.Timer(numbers.uniform(0.0, 1.0), os.kill, (first.core, signal.SIGKILL))
        timer.start()
        answers = [ask(second, p, 8, {"do_remote_prefill": True}) for p in texts]
        for leg in legs:
            leg.join(WAIT_S)
        timer.join()
        first.stop(signal.SIGKILL)
        assert all(answer is not None for answer in answers)
        for prompt, answer in zip(texts, answers, strict=True):
            assert answer is not None
            fresh = ask(second, prompt, 8, None)  # from its own blocks, whoever computed them
            assert fresh is not None and fresh["choices"] == answer["choices"]
        assert_same_without_hits(second, texts, answers)
    assert second.stop() == 0


def assert_same_without_hits(server: Server, texts: list[str], answers: list[Any]) -> None:
    """Compare with answers that are computed without prefix hits, because of another salt."""
    for prompt, answer in zip(texts, answers, strict=True):
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        body |= {"cache_salt": "nobody's"}
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        alone = json.loads(connection.getresponse().read())
        connection.close()
        assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert alone["choices"] == answer["choices"]


@pytest.mark.slow
def test_killed_decode_servers_leave_no_running_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SECRET, "a secret of this test")
    first = Server("--kv-store", "serve://127.0.0.1:0", *OPTIONS)
    port = int(first.wait_for_line(r"served to peers at 127.0.0.1, port (\d+)")[1])
    [prompt] = prompts(1, 9)
    answer = ask(first, prompt, 1, FIRST_LEG)
    assert answer is not None
    for _ in range(2):
        second = Server("--kv-store", f"peer://127.0.0.1:{port}", *OPTIONS)
        threading.Timer(0.2, os.kill, (second.core, signal.SIGKILL)).start()
        ask(second, prompt, 400, answer["kv_transfer_params"])
        time.sleep(0.2)
        second.stop(signal.SIGKILL)
    third = Server("--kv-store", f"peer://127.0.0.1:{port}", *OPTIONS)
    reply = ask(third, prompt, 8, answer["kv_transfer_params"])
    assert reply is not None
    cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (reply["usage"]["prompt_tokens"] - 1) // 16 * 16
    assert_same_without_hits(third, [prompt], [reply])
    assert first.metric("quire:num_requests_running") == 0
    assert third.stop() == 0 and first.stop() == 0


@pytest.mark.slow
def test_cores_of_one_server_hit_each_others_prefixes(store: str) -> None:
    server = Server("-dp", "2", "--kv-store", store, "--kv-eager", *OPTIONS)
    [prompt] = prompts(1, 5)
    found = []
    for core in ("0", "1"):
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        headers = {"Content-Type": "application/json", "X-data-parallel-rank": core}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        found.append(json.loads(connection.getresponse().read()))
        connection.close()
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in found]
    assert cached[0] == 0 and cached[1] > 0
    assert found[0]["choices"] == found[1]["choices"]
    assert server.stop() == 0
