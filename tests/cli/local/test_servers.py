"""`quire ps` and `stop` identify servers by the process id and start time in their files.

Covers `serve/processes/server_files.py`.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from quire.serve.processes import server_files
from quire.serve.processes.server_files import running_servers, server_file, start_ticks
from tests.support.commands import run


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "quire"


def test_ps_lists_servers_by_their_files(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with server_file(url, {"small": "org/small", "s": "org/small"}):
            [server] = running_servers()
            assert (server.pid, server.url) == (os.getpid(), url)
            assert [server.name_of(word) for word in ("small", "s", "org/small", "x")] == [
                "small", "s", "small", None,
            ]  # fmt: skip
            assert (next(cache.glob("*.json")).stat().st_mode & 0o777) == 0o600
            status, out, _ = run(capsys, "ps")
            assert status == 0 and "small,s" in out and out.rstrip().endswith("ready")
            listening.close()
            [shown] = json.loads(run(capsys, "ps", "--json")[1])
            assert shown["state"] == "no answer"
    assert running_servers() == [] and not [*cache.iterdir()]


def test_cache_directory_replaces_a_missing_runtime_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with server_file("http://127.0.0.1:9", {"m": "m"}):
        assert [path.name for path in (tmp_path / "quire/servers").iterdir()] == [
            f"{os.getpid()}.json"
        ]


def test_model_paths_do_not_depend_on_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    with server_file("http://127.0.0.1:9", {"m": "m.gguf"}):
        monkeypatch.chdir("/")
        [server] = running_servers()
        assert server.name_of(str(tmp_path / "m.gguf")) == "m"
        assert server.name_of("m.gguf") is None


@pytest.mark.parametrize(
    "change",
    [{"start_ticks": 1}, {"pid": 1}, {"models": [1]}, {"extra": 1}, {"started_s": "soon"}],
)
def test_stale_and_invalid_files_are_removed(cache: Path, change: dict[str, object]) -> None:
    with server_file("http://127.0.0.1:9", {}):
        [path] = cache.glob("*.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        assert running_servers() == []
        assert not path.exists()


def test_stop_ends_servers_by_model_port_or_id(
    capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    """A process that only reuses a server's id is not stopped."""
    code = (
        "import signal, sys\n"
        "from quire.serve.processes.server_files import server_file\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "with server_file(f'http://127.0.0.1:{sys.argv[1]}', {sys.argv[2]: sys.argv[2]}):\n"
        "    print('up', flush=True); signal.pause()\n"
    )
    processes = []
    for port, name in (("7001", "a"), ("7002", "b"), ("7003", "c")):
        command = [sys.executable, "-c", code, port, name]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    try:
        for each in processes:
            assert each.stdout is not None and each.stdout.readline() == "up\n"
        a, b, c = processes
        status, _, err = run(capsys, "stop")
        assert status == 1 and "3 servers run; running are: " in err
        status, _, err = run(capsys, "stop", "zzz")
        assert status == 1 and "no server runs for 'zzz'" in err
        assert run(capsys, "stop", "a") == (0, "stopped a at http://127.0.0.1:7001\n", "")
        assert run(capsys, "stop", "7002")[0] == 0
        assert (a.wait(10), b.wait(10)) == (0, 0)
        file = cache / f"{c.pid}.json"
        known = json.loads(file.read_text())
        file.write_text(json.dumps(known | {"start_ticks": known["start_ticks"] - 1}))
        assert run(capsys, "stop", "--all") == (0, "", "")
        assert c.poll() is None
        file.write_text(json.dumps(known))
        assert run(capsys, "stop", str(c.pid))[0] == 0
        assert c.wait(10) == 0
    finally:
        for each in processes:
            each.kill()
            each.wait()


def test_stop_reports_a_server_that_does_not_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cli.local.servers.STOP_S", 0.0)
    monkeypatch.setattr(server_files.signal, "pidfd_send_signal", lambda *_: None)
    with server_file("http://127.0.0.1:9", {"m": "m"}):
        status, _, err = run(capsys, "stop")
    assert status == 1 and "still runs after 0 s" in err


def test_start_ticks_are_none_without_a_process() -> None:
    assert start_ticks(os.getpid()) and start_ticks(1 << 30) is None
