"""A marker in every setting that can hold a secret appears in no output of a running server."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from tests.serve.test_server import started
from tests.support.cases import slow_but
from tests.support.processes.servers import WAIT_S, Server, children_of, wait_until

MARKER = "MARK3R-s3cret"
KEYS = [f"{MARKER}-one", f"{MARKER}-urgent", f"{MARKER}-admin"]
SETTINGS = {
    "api-key": KEYS,
    "urgent-api-key": [KEYS[1]],
    "admin-api-key": [KEYS[2]],
    "kv-store": [f"redis://user:{MARKER}@127.0.0.1:9/0?password={MARKER}"],
    "kv-transfer-config": json.dumps(
        {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"token": MARKER}}
    ),
    "otlp-traces-endpoint": f"http://user:{MARKER}@127.0.0.1:9",
    "log-level": "debug",
    "record-tokens": True,
}
BODY = {"prompt": "Once upon a time there was a fox. " * 20, "max_tokens": 4, "temperature": 0}


def answer(server: Server, path: str, key: str, body: object = None) -> tuple[int, str]:
    """Return status, headers and text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request(
        "GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers
    )
    response = connection.getresponse()
    text = f"{response.headers}{response.read().decode()}"
    connection.close()
    return response.status, text


def first_bytes(server: Server, path: str, key: str) -> tuple[int, str]:
    """Return the status and the beginning of an answer that does not end."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
    response = connection.getresponse()
    text = f"{response.headers}{response.readline().decode()}"
    connection.close()
    return response.status, text


def descendants_of(pid: int) -> Iterator[int]:
    for child in children_of(pid):
        yield child
        yield from descendants_of(child)


def flags_of(settings: dict[str, Any]) -> list[str]:
    """Return settings as a command line has them."""
    words: list[str] = []
    for name, value in settings.items():
        for each in value if isinstance(value, list) else [value]:
            words += [f"--{name}"] if each is True else [f"--{name}", str(each)]
    return words


@pytest.mark.parametrize("way", slow_but(["config", "ranks", "flags"], "config"))
def test_no_output_of_a_server_has_a_secret(tmp_path: Path, way: str) -> None:
    config = tmp_path / "config.yaml"
    settings = SETTINGS | {"record": str(tmp_path / "recording")}
    if way == "ranks":  # with ranks, settings allow no store
        del settings["kv-store"], settings["kv-transfer-config"]
        settings["tensor-parallel-size"] = 2
    config.write_text(json.dumps(settings))
    words = flags_of(settings) if way == "flags" else ["--config", str(config)]
    paths = ["/", "/metrics", "/health", "/load", "/version", "/v1/models", "/openapi.json"]
    with started(*words) as server:
        shown = {path: answer(server, path, KEYS[2]) for path in paths}
        shown["a completion"] = answer(server, "/v1/completions", KEYS[0], BODY)
        name = json.loads(shown["a completion"][1].partition("\n\n")[2])["id"]
        shown["its explanation"] = answer(server, f"/v1/requests/{name}", KEYS[2])
        shown["live"] = first_bytes(server, "/v1/engine/live", KEYS[2])
        shown["a wrong key"] = answer(server, "/v1/models", "wrong")
        shown["an error"] = answer(server, "/v1/completions", KEYS[0], BODY | {"n": -1})
        shown["a reset"] = answer(server, "/reset_prefix_cache", KEYS[2], {})
        for each in ("/metrics", "a completion", "its explanation", "live"):
            assert shown[each][0] == 200, shown[each]
        assert 'kv_store="' in shown["/metrics"][1]
        assert ("127.0.0.1:9" in shown["/metrics"][1]) == (way != "ranks")
        assert [shown[name][0] for name in ("a wrong key", "an error")] == [401, 400]
        # Every user sees the secrets of a command line; the server warns of it when it starts.
        processes = [server.process.pid] * (way != "flags")
        processes += descendants_of(server.process.pid)
        assert len(processes) >= 3
        for pid in processes:
            for name in ("cmdline", "environ", "comm"):
                shown[f"{pid} {name}"] = 200, (Path("/proc") / str(pid) / name).read_text()
        if way != "ranks":
            wait_until(lambda: any("KV store" in line for line in server.lines), "the store failed")
        assert server.stop() == 0
        shown["log"] = 200, "".join(server.lines)
    for path in (tmp_path / "recording").rglob("*"):
        if path.is_file():
            shown[path.name] = 200, path.read_bytes().decode("latin-1")
            assert path.stat().st_size > 0
    assert not [name for name, (_, text) in shown.items() if MARKER in text]


def test_doctor_shows_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(SETTINGS))
    for more in ([], ["--json"]):
        main(["doctor", "demo", "--config", str(config), *more])
        shown = capsys.readouterr()
        assert "bfloat16" in shown.out
        assert MARKER not in shown.out + shown.err
