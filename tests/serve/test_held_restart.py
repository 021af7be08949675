"""Retained requests of a server whose core is killed: the next core knows their ids."""

import http.client
import json
from pathlib import Path
from typing import Any

import pytest

from tests.serve.test_server import started
from tests.support.processes.servers import WAIT_S, Server, kill, wait_until


def ask(server: Server, method: str, path: str, key: str = "one", **body: Any) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request(method, path, json.dumps(body) if body else None, headers)
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


@pytest.mark.slow
def test_retained_ids_survive_a_killed_core(tmp_path: Path) -> None:
    options = ["--restart-engine", "--kv-disk-dir", str(tmp_path), "--kv-eager"]
    body = {"temperature": 1.0, "seed": 5, "ignore_eos": True, "return_token_ids": True}
    first_body = body | {
        "prompt": "Once upon a time there was a little fox. One day",
        "max_tokens": 30,
    }
    with started(*options, "--api-key", "one", "--api-key", "two") as server:
        status, first = ask(server, "POST", "/v1/completions", **first_body, keep_s=600)
        assert status == 200, first
        name, other = (
            first["id"],
            ask(server, "POST", "/v1/completions", **first_body, keep_s=600)[1],
        )
        assert ask(server, "DELETE", f"/v1/requests/{other['id']}")[0] == 200
        tokens = ask(server, "GET", f"/v1/requests/{name}/tokens")[1]["token_ids"]
        fork = body | {"at_token": 20, "max_tokens": 12, "seed": 7}
        before = ask(server, "POST", f"/v1/requests/{name}/fork", **fork)[1]
        wait_until(
            lambda: len(list(tmp_path.rglob("*.held"))) == 1, "the retained request is written"
        )
        wait_until(lambda: len(list(tmp_path.rglob("*.kv"))) > 1, "blocks are written")
        kill(server.core)
        wait_until(lambda: server.get("/health") == 503, "the core is gone")
        wait_until(lambda: server.get("/health") == 200, "the core is back")
        status, found = ask(server, "GET", f"/v1/requests/{name}/tokens")
        assert status == 200 and found["token_ids"] == tokens and found["num_blocks"] == 0
        assert 500 < found["expires_in_s"] < 600
        assert ask(server, "GET", f"/v1/requests/{other['id']}/tokens")[0] == 404
        for path in ("tokens", "fork"):
            method, sent = ("GET", {}) if path == "tokens" else ("POST", fork)
            assert ask(server, method, f"/v1/requests/{name}/{path}", "two", **sent)[0] == 404
        status, after = ask(server, "POST", f"/v1/requests/{name}/fork", **fork)
        assert status == 200 and after["choices"] == before["choices"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
        status, more = ask(server, "POST", f"/v1/requests/{name}/append", prompt=" Then", **body)
        assert status == 200
        assert ask(server, "GET", f"/v1/requests/{name}/tokens")[0] == 404
        assert ask(server, "GET", f"/v1/requests/{more['id']}/tokens")[0] == 200
    with started(*options, "--api-key", "two") as server:
        assert ask(server, "GET", "/v1/requests", "two")[1]["data"] == [], (
            "the key has another number now"
        )


@pytest.mark.slow
def test_without_keys_retained_ids_survive_the_server(tmp_path: Path) -> None:
    options = ["--kv-disk-dir", str(tmp_path)]
    with started(*options) as server:
        first = ask(server, "POST", "/v1/completions", prompt="Once", max_tokens=5, keep_s=600)[1]
        tokens = ask(server, "GET", f"/v1/requests/{first['id']}/tokens")[1]["token_ids"]
        assert server.stop() == 0
    with started(*options) as server:
        assert server.metric("quire:held_requests") == 1
        assert server.metric("quire:held_tokens") == len(tokens)
        found = ask(server, "GET", f"/v1/requests/{first['id']}/tokens")[1]
        assert found["token_ids"] == tokens
