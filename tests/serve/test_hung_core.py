"""A core that hangs, and processes that run out of file descriptors."""

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire import AsyncLLM, SamplingParams
from quire.base.messages import Ready, Request
from quire.base.requests.sampling_params import RequestOutputKind
from quire.engine.client.remote import LATE_S, RemoteClient
from quire.engine.wire.wire import client_codec
from tests.serve.test_attacks import num_open_files, post, send
from tests.serve.test_server import client_of, started
from tests.support.processes.forks import ForkedPopen
from tests.support.processes.servers import (
    Server,
    Stream,
    children_of,
    is_running,
    kill,
    wait_until,
)


def lines_with(server: Server, text: str) -> list[str]:
    return [line for line in server.lines if text in line]


def test_timeout_ends_a_request_of_a_hung_core(tmp_path: Path) -> None:
    """A fake core that sends `Ready` and nothing more hangs."""

    async def hung(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ready = Ready(0, 100, 64, 20, 4, {"model": "tiny"}, "memory")
        writer.write(client_codec().encode(ready))
        await reader.read()
        writer.close()

    async def run() -> None:
        path = tmp_path / "core.sock"
        async with await asyncio.start_unix_server(hung, path):
            client = await RemoteClient.connect(path, None)
            params = SamplingParams(output_kind=RequestOutputKind.DELTA)
            request = Request("r", [5, 6], params, 1, timeout_s=0.2)
            began = time.monotonic()
            [output] = [output async for output in client.generate(request)]
            assert 0.2 < time.monotonic() - began < 0.2 + LATE_S + 2
            assert output.finished and output.outputs[0].finish_reason == "timeout"
            assert "timeout_s=0.2" in output.outputs[0].error.message
            assert client.num_unfinished == 0
            await client.close()

    asyncio.run(run())


@pytest.mark.slow
def test_hung_idle_core_is_replaced_and_timeouts_still_work() -> None:
    with started("--restart-engine") as server:
        stream = Stream(server, max_tokens=3)
        assert stream.rest()
        kill(server.core, signal.SIGSTOP)
        began = time.monotonic()
        body = {"prompt": "Hi", "timeout_s": 0.5}
        status, answer = post(server, "/v1/completions", json.dumps(body).encode())
        assert status == 408 and json.loads(answer)["error"]["code"] == "request_timeout"
        assert time.monotonic() - began < 5
        server.wait_for_line("makes no progress")
        assert time.monotonic() - began < 25
        server.wait_for_line("engine ended unexpectedly")
        wait_until(lambda: server.get("/health") == 200, "a new core serves")
        assert client_of(server).completions.create(model="demo", prompt="Hi", max_tokens=2)
        assert server.stop() == 0


def test_server_with_a_hung_core_stops_in_time_with_an_error() -> None:
    shorter = (
        "from quire.serve import supervisor; from quire.serve.processes import launch;"
        " launch.END_S = supervisor.END_S = 2.0"
    )
    with started("--shutdown-timeout", "0", before=shorter) as server:
        kill(server.core, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 1
        assert lines_with(server, "the engine does not stop; killing it")


def test_core_death_while_draining_is_an_error() -> None:
    with started("--shutdown-timeout", "30") as server:
        stream = Stream(server)
        stream.event()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/ready") == 503, "it drains")
        kill(server.core)
        assert "error" in stream.rest()[-1]
        assert server.process.wait(30) == 1


@pytest.mark.slow
def test_dead_api_process_is_replaced_and_other_streams_continue() -> None:
    with started("--api-server-count", "2") as server:
        streams = [Stream(server, max_tokens=400) for _ in range(6)]
        for stream in streams:
            stream.event()
        owners = {pid: num_sockets(pid) for pid in server.api}
        victim = min(owners, key=lambda pid: owners[pid])
        others = max(owners.values()) - min(owners.values())
        kill(victim)
        ends = [end_of(stream) for stream in streams]
        if others:
            assert ends.count(400) >= 1, f"streams of the surviving process ended: {ends}"
        assert set(ends) <= {400, None}
        server.wait_for_line("API process . ended unexpectedly")
        assert server.process.poll() is None
        wait_until(lambda: server.metric("quire:num_requests_running") == 0, "rows are free")
        for _ in range(4):
            assert server.get("/health") == 200
        assert server.stop() == 0


def num_sockets(pid: int) -> int:
    """Count a process's sockets: the process with more of them has more streams."""
    found = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += os.readlink(fd).startswith("socket:")
        except OSError:
            continue
    return found


def end_of(stream: Stream) -> int | None:
    """Return the number of tokens of a complete stream, or None if its connection broke."""
    try:
        events = stream.rest()
    except OSError:
        return None
    usage = events[-1].get("usage") if events else None
    return usage["completion_tokens"] if usage else None


@pytest.mark.parametrize(
    "victim", ["core_main", pytest.param("serve.server", marks=pytest.mark.slow)]
)
def test_process_killed_while_loading_is_restarted(victim: str) -> None:
    """`Server` waits until the server answers, so this test starts the process itself."""
    command = [sys.executable, "-m", "quire.cli.main", "serve", "--port", "0", "--restart-engine"]
    process = ForkedPopen(command, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len(children_of(process.pid)) == 2, "both children run")
        children = children_of(process.pid)
        [pid] = [pid for pid, command in children.items() if victim in command]
        kill(pid)
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "ready: http" in line:
                break
        assert any("restarting it" in line for line in lines)
        assert "ready: http" in lines[-1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_ttl_of_a_year_is_accepted_and_a_longer_one_rejected() -> None:
    with started("--pipeline-depth", "2") as server:
        for ttl_s, expected in [
            (2_147_484, 200),
            (31_622_400, 200),
            (31_622_401, 400),
            (1e300, 400),
        ]:
            body = json.dumps({"prompt": "The cat sat on", "ttl_s": ttl_s}).encode()
            status, answer = post(server, "/v1/prefixes", body)
            assert status == expected, answer
            if expected == 400:
                error = json.loads(answer)["error"]
                assert error["param"] == "ttl_s" and "31622400, a year" in error["message"]
        body = json.dumps({"prompt": "Hi", "timeout_s": 1e9}).encode()
        status, answer = post(server, "/v1/completions", body)
        assert (status, json.loads(answer)["error"]["param"]) == (400, "timeout_s")
        assert server.get("/health") == 200
        assert is_running(server.core)
        assert server.stop() == 0


@pytest.mark.slow
def test_exhausted_descriptors_cost_few_log_lines_and_no_cpu() -> None:
    with started() as server:
        [api] = server.api
        hard = resource.prlimit(api, resource.RLIMIT_NOFILE)[1]
        limit = num_open_files(api) + 8
        resource.prlimit(api, resource.RLIMIT_NOFILE, (limit, hard))
        waiting = [send(server, b"GET /he") for _ in range(40)]
        server.wait_for_line("no connection can be accepted")
        cpu_s, began, before = cpu_of(api), time.monotonic(), len(server.lines)
        time.sleep(3.0)  # measures a time in which nothing should happen
        passed_s = time.monotonic() - began
        assert len(server.lines) - before <= passed_s + 2, server.lines[before:]
        assert cpu_of(api) - cpu_s < 0.5
        for sock in waiting:
            sock.close()
        wait_until(lambda: server.get("/health") == 200, "the server accepts again")
        resource.prlimit(api, resource.RLIMIT_NOFILE, (hard, hard))
        assert server.stop() == 0


@pytest.mark.slow
def test_core_without_descriptors_serves_its_existing_clients() -> None:
    with started("--api-server-count", "2") as server:
        core = server.core
        hard = resource.prlimit(core, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(core, resource.RLIMIT_NOFILE, (num_open_files(core), hard))
        kill(server.api[0])  # its successor needs a connection
        # The dead process's descriptor is free for it, but other connections compete for that.
        home = core_socket(core)
        extra = [socket.socket(socket.AF_UNIX) for _ in range(4)]
        for sock in extra:
            sock.connect(home)
        server.wait_for_line("the engine cannot accept a connection")
        assert any(post_ok(server) for _ in range(3))
        assert is_running(core)
        for sock in extra:
            sock.close()
        resource.prlimit(core, resource.RLIMIT_NOFILE, (hard, hard))
        for _ in range(6):
            wait_until(lambda: post_ok(server), "both answer")
        assert server.stop() == 0


def core_socket(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return command[command.index(b"--home") + 1].decode() + "/core.sock"


def post_ok(server: Server) -> bool:
    body = json.dumps({"prompt": "Hi", "max_tokens": 2}).encode()
    return post(server, "/v1/completions", body)[0] == 200


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_timeouts_hold_in_asyncllm_with_a_hung_core() -> None:
    """`AsyncLLM` has no supervisor."""

    async def run() -> None:
        async with await AsyncLLM.create("demo", disable_log_stats=True) as llm:
            process = llm._cores._cores[0]._process
            assert process is not None
            pid = process.process.pid
            await llm.check_health()
            assert [output async for output in llm.generate("Hi", SamplingParams(max_tokens=2))]
            kill(pid, signal.SIGSTOP)
            outputs = [output async for output in llm.generate("Hi", timeout_s=0.3)]
            assert outputs[-1].outputs[0].finish_reason == "timeout"
            assert llm.is_running
            kill(pid, signal.SIGCONT)

    asyncio.run(run())
