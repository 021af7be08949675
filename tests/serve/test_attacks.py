"""A hostile client's requests to the real processes; other clients must not be affected."""

import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cases import slow_but
from tests.support.processes.servers import (
    WAIT_S,
    Server,
    Stream,
    children_of,
    is_running,
    kill,
    wait_until,
)

MESSAGES = [{"role": "user", "content": "Hi"}]
BIG = "word " * 400_000
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("--max-num-seqs", "16")
    yield server
    assert server.stop() == 0


def post(server: Server, path: str, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def completion(**fields: object) -> bytes:
    body = json.dumps({"prompt": "Once upon a time", "temperature": 0, **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def send(server: Server, data: bytes) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
    sock.sendall(data)
    return sock


def greedy(server: Server) -> str:
    body = json.dumps({"prompt": "Once upon a time", "temperature": 0, "max_tokens": 20})
    status, answer = post(server, "/v1/completions", body.encode())
    assert status == 200
    return str(json.loads(answer)["choices"][0]["text"])


def is_idle(server: Server) -> bool:
    return not any(server.metric(f"quire:{name}") for name in GAUGES)


def num_open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "description": BIG}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1, BIG]}}]},
        {"documents": [{"text": BIG}]},
    ],
    ids=["tools", "mixed", "documents"],
)
def test_all_template_inputs_count_towards_the_prompt_limit(
    server: Server, fields: dict[str, object]
) -> None:
    """Rendering and tokenising them on the event loop would block all clients for seconds."""
    body = json.dumps({"messages": MESSAGES, "max_tokens": 1, **fields}).encode()
    status, answer = post(server, "/v1/chat/completions", body)
    error = json.loads(answer)["error"]
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "messages" and "shorten" in error["message"]


@pytest.mark.parametrize(
    "make_fields",
    [
        lambda: {"chat_template_kwargs": {"x": [[]] * 600_000}},
        lambda: {"messages": [{**MESSAGES[0], **{str(i): {} for i in range(200_000)}}]},
    ],
    ids=["kwargs", "names"],
)
def test_body_with_too_many_values_is_rejected_unread(
    server: Server, make_fields: Callable[[], dict[str, object]]
) -> None:
    fields = make_fields()
    body = json.dumps({"messages": MESSAGES, "max_tokens": 1, **fields}).encode()
    status, answer = post(server, "/v1/chat/completions", body)
    assert (status, json.loads(answer)["error"]["code"]) == (413, "too_many_values")


@pytest.mark.parametrize(
    ("num", "texts"),
    [(250, ["prompt is required"]), (20_000, ["20000 fields", "the limit is 256"])],
)
def test_many_unknown_fields_are_counted_not_described(
    server: Server, num: int, texts: list[str]
) -> None:
    """A description of each would need a search for similar names."""
    body = b"{" + b",".join(b'"k%d":1' % i for i in range(num)) + b"}"
    status, answer = post(server, "/v1/completions", body)
    assert status == 400
    assert all(text in json.loads(answer)["error"]["message"] for text in texts)


def test_disconnects_at_any_stage_leak_nothing(server: Server) -> None:
    text, files = greedy(server), {pid: num_open_files(pid) for pid in server.children}
    prompts = ["a b c " * 100, "d", "e"]
    whole = [
        completion(max_tokens=400, ignore_eos=True, stream=stream, prompt=prompt)
        for stream in (False, True)
        for prompt in ("Once", prompts)
    ]

    def storm() -> None:
        for i in range(24):
            data, stage = whole[i % 4], i // 4 % 3
            sock = send(server, data[: len(data) // 2] if stage == 0 else data)
            if stage == 2 and i % 4 > 1:
                sock.recv(300)
            if i % 2:  # a reset instead of an orderly close
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()

    threads = [threading.Thread(target=storm) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: is_idle(server), "rows and blocks are free", 20)
    for pid, number in files.items():
        wait_until(lambda p=pid, n=number: num_open_files(p) <= n + 2, "files are closed", 20)  # type: ignore[misc]
    assert greedy(server) == text


def test_unread_streams_do_not_block_other_clients(server: Server) -> None:
    text = greedy(server)
    data = completion(max_tokens=200, ignore_eos=True, stream=True, logprobs=20)
    unread = [send(server, data) for _ in range(4)]
    assert greedy(server) == text
    wait_until(lambda: is_idle(server), "the unread streams have ended")
    for sock in unread:
        sock.close()


def test_open_file_limit_is_raised_to_the_maximum(server: Server) -> None:
    [pid] = server.api
    limits = Path(f"/proc/{pid}/limits").read_text()
    [line] = [line for line in limits.splitlines() if line.startswith("Max open files")]
    soft, hard = line.split()[3:5]
    assert hard == "unlimited" or int(soft) >= min(int(hard), 1 << 16)


@pytest.mark.parametrize(
    "number", slow_but((signal.SIGKILL, signal.SIGTERM, signal.SIGHUP), signal.SIGKILL)
)
def test_server_killed_while_loading_leaves_no_process(number: int, tmp_path: Path) -> None:
    """Its children's imports take seconds. The next server removes the temporary directory that a
    kill -9 leaves."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "quire.cli.main", "serve", "--port", "0"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(children_of(process.pid)) == 2, "both children run")
        children = children_of(process.pid)
        kill(process.pid, number)
        assert process.wait(20) == (-number if number == signal.SIGKILL else 0)
        wait_until(lambda: not any(map(is_running, children)), "all have ended", 2)
    finally:
        process.kill()
        process.wait()
    assert len(list(tmp_path.glob("quire-*"))) == (number == signal.SIGKILL)


def test_only_directories_of_dead_servers_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.serve.processes.launch import CoreSocket, remove_abandoned_sockets

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead, young, living = CoreSocket(), CoreSocket(), CoreSocket()
    for unix in (dead, young):
        unix._listener.close()
    for unix in (dead, living):
        os.utime(unix.path, (0, 0))
    (tmp_path / "quire-notes").mkdir()
    remove_abandoned_sockets()
    assert not dead.home.exists()
    assert young.home.exists() and living.home.exists() and (tmp_path / "quire-notes").exists()
    living.close()


def test_restarted_core_answers_as_before() -> None:
    server = Server("--restart-engine", "--max-num-seqs", "16")
    try:
        text, stream = greedy(server), Stream(server)
        stream.event()
        kill(server.core)
        assert "error" in stream.rest()[-1]
        refused, answer = post(server, "/v1/completions", b'{"prompt": "Hi"}')
        assert refused == 503 and json.loads(answer)["error"]["code"] == "engine_dead"
        wait_until(lambda: server.get("/health") == 200, "the core is back")
        assert greedy(server) == text and is_idle(server)
    finally:
        server.stop(signal.SIGKILL)
