"""`quire serve` with its real processes: its answers, and how it ends.

Covers `serve/processes/core_main.py`.
"""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import openai
import pytest

from quire import LLM, SamplingParams
from quire.serve.responses.store import process_of
from tests.support.processes.forks import run_forked
from tests.support.processes.servers import Server, Stream, is_running, kill, wait_until

CHAT = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Start the processes as a user does."""
    server = Server("--api-server-count", "2", "--max-num-seqs", "16", is_fork=False)
    yield server
    assert server.stop() == 0
    server._reader.join(10)
    assert not [line for line in server.lines if "leaked" in line], "a process leaked objects"
    assert not [line for line in server.lines if "Warning" in line]


@contextlib.contextmanager
def started(*arguments: str, before: str = "", is_fork: bool = True) -> Iterator[Server]:
    """Yield a server for one test; none of its processes is left behind."""
    server = Server(*arguments, before=before, is_fork=is_fork)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not any(map(is_running, server.children)), "no orphan is left")


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def is_idle(server: Server) -> bool:
    return server.metric("quire:num_requests_running") == 0


# ---- answers -----------------------------------------------------------------------------------


def test_chat_equals_the_offline_answer_streamed_or_whole(server: Server) -> None:
    with LLM("demo", disable_log_stats=True) as llm:
        [expected] = llm.chat(CHAT, SamplingParams(temperature=0.0, max_tokens=60), False)
    text = expected.outputs[0].text
    for _ in range(4):  # reaches both API processes
        client = client_of(server)
        answer = client.chat.completions.create(
            model="demo", messages=CHAT, temperature=0, max_tokens=60
        )
        assert answer.choices[0].message.content == text
        stream = client.chat.completions.create(
            model="demo", messages=CHAT, temperature=0, max_tokens=60, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text


def test_concurrent_requests_match_single_ones(server: Server) -> None:
    client = client_of(server)

    def ask(i: int, into: dict[int, str]) -> None:
        answer = client.completions.create(
            model="demo", prompt=f"The number {i} is", temperature=0.8, seed=i, max_tokens=30
        )
        into[i] = answer.choices[0].text

    together: dict[int, str] = {}
    threads = [threading.Thread(target=ask, args=(i, together)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone: dict[int, str] = {}
    for i in (0, 7, 23):
        ask(i, alone)
        assert alone[i] == together[i]


def test_stored_responses_are_found_from_every_process(server: Server) -> None:
    """Each client opens a new connection, which the kernel gives to one of the processes."""
    owners = set()
    for number in range(8):
        first = client_of(server).responses.create(
            model="demo", input=f"I am {number}.", max_output_tokens=4
        )
        owners.add(process_of(first.id))
        assert client_of(server).responses.retrieve(first.id) == first
        *_, last = client_of(server).responses.create(
            model="demo", input="Who?", previous_response_id=first.id, stream=True
        )
        second = last.response
        assert process_of(second.id) == process_of(first.id)
        assert second.usage.input_tokens > first.usage.input_tokens
        client_of(server).responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client_of(server).responses.retrieve(first.id)
    assert owners == {0, 1}


def test_metrics_count_all_api_processes(server: Server) -> None:
    before = server.metric("quire:generation_tokens_total")
    for _ in range(6):
        client_of(server).completions.create(
            model="demo", prompt="Hi", max_tokens=5, extra_body={"ignore_eos": True}
        )
    assert server.metric("quire:generation_tokens_total") == before + 30


def test_disconnect_frees_row_and_blocks(server: Server) -> None:
    aborted = 'quire:request_success_total{.*finished_reason="abort".*}'
    before = server.metric(aborted)
    streams = [Stream(server) for _ in range(8)]
    for stream in streams:
        stream.event()
        stream.close()
    wait_until(lambda: is_idle(server), "all rows are free")
    assert server.metric("quire:kv_cache_usage_perc") == 0
    assert server.metric(aborted) > before


def test_bad_input_is_rejected_and_the_engine_survives(server: Server) -> None:
    client = client_of(server)
    with pytest.raises(openai.BadRequestError, match="max_model_len|context|tokens"):
        client.completions.create(model="demo", prompt=[5] * 3000)
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model="demo", prompt=[10**8])
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="Hi")
    assert server.get("/health") == 200


def test_server_listens_only_on_the_requested_port(server: Server) -> None:
    with open("/proc/net/tcp") as file:
        listening = {line.split()[9]: line.split()[1] for line in file if line.split()[3] == "0A"}
    from pathlib import Path

    mine = set()
    for pid in [server.process.pid, *server.children]:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(fd.readlink())
                if target.startswith("socket:["):
                    mine.add(target[8:-1])
    ports = {int(listening[inode].split(":")[1], 16) for inode in mine & listening.keys()}
    assert ports == {server.port}


# ---- ends --------------------------------------------------------------------------------------


def test_sigterm_finishes_open_requests_and_rejects_new_ones() -> None:
    with started("--shutdown-timeout", "300") as server:
        stream = Stream(server, max_tokens=600)
        stream.event()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/ready") == 503, "it drains")
        with pytest.raises(openai.APIStatusError) as refused:
            client_of(server).completions.create(model="demo", prompt="Hi")
        assert refused.value.status_code == 503
        assert "retry-after" in refused.value.response.headers
        events = stream.rest()
        assert events[-1]["usage"]["completion_tokens"] == 600
        assert server.process.wait(30) == 0
        assert not any(map(is_running, server.children))


def test_without_a_drain_open_requests_end_with_an_error_event() -> None:
    with started("--shutdown-timeout", "0") as server:
        stream = Stream(server)
        stream.event()
        server.process.send_signal(signal.SIGINT)
        assert "shutting down" in stream.rest()[-1]["error"]["message"]
        assert server.process.wait(10) == 0


def test_second_signal_ends_the_server_immediately() -> None:
    with started() as server:
        stream = Stream(server)
        stream.event()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/ready") == 503, "it drains")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 1
        stream.close()


def test_killed_core_fails_streams_and_ends_the_server() -> None:
    with started() as server:
        stream = Stream(server)
        stream.event()
        kill(server.core)
        assert "engine" in stream.rest()[-1]["error"]["message"]
        assert server.process.wait(10) == 1
        wait_until(lambda: not any(map(is_running, server.children)), "all have ended", 2)


def test_restart_engine_replaces_a_killed_core() -> None:
    with started("--restart-engine") as server:
        stream = Stream(server)
        stream.event()
        kill(server.core)
        took_s = wait_until(lambda: server.get("/health") == 503, "/health reports it")
        assert took_s < 2
        assert "error" in stream.rest()[-1]
        wait_until(lambda: server.get("/health") == 200, "the core is back")
        answer = client_of(server).completions.create(model="demo", prompt="Hi", max_tokens=3)
        assert answer.choices[0].finish_reason in ("length", "stop")
        assert server.process.poll() is None


def test_no_process_survives_the_supervisor() -> None:
    with started("--api-server-count", "2") as server:
        stream = Stream(server)
        stream.event()
        kill(server.process.pid)
        assert server.process.wait(15) == -signal.SIGKILL
        wait_until(lambda: not any(map(is_running, server.children)), "all have ended", 2)
        stream.close()


@pytest.mark.slow
def test_stuck_core_is_replaced() -> None:
    with started("--restart-engine") as server:
        stream = Stream(server)
        stream.event()
        kill(server.core, signal.SIGSTOP)
        server.wait_for_line("makes no progress")
        assert "error" in stream.rest()[-1]
        wait_until(lambda: server.get("/health") == 200, "the core was restarted")


def test_port_in_use_is_an_error_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "quire.cli.main", "serve", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"port {port}" in done.stderr and "--port" in done.stderr
    assert "memory:" not in done.stderr


def test_startup_error_of_the_core_ends_the_server() -> None:
    command = [sys.executable, "-m", "quire.cli.main", "serve", "--port", "0"]
    command += ["--kv-cache-memory-bytes", "1000"]
    done = run_forked(command)
    assert done.returncode == 3
    assert "quire: " in done.stderr and "Traceback" not in done.stderr
