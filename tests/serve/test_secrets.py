"""A marker in every setting that can hold a secret is in nothing that a running server shows."""

import http.client
import json
from pathlib import Path

from tests.serve.processes import WAIT_S, Server, wait_until
from tests.serve.test_server import started

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


def test_no_output_of_a_server_has_a_secret(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(SETTINGS | {"record": str(tmp_path / "recording")}))
    paths = ["/", "/metrics", "/health", "/load", "/version", "/v1/models", "/openapi.json"]
    with started("--config", str(config)) as server:
        shown = {path: answer(server, path, KEYS[2]) for path in paths}
        shown["a completion"] = answer(server, "/v1/completions", KEYS[0], BODY)
        shown["a wrong key"] = answer(server, "/v1/models", "wrong")
        shown["an error"] = answer(server, "/v1/completions", KEYS[0], BODY | {"n": -1})
        shown["a reset"] = answer(server, "/reset_prefix_cache", KEYS[2], {})
        assert shown["a completion"][0] == 200 and shown["/metrics"][0] == 200, shown
        assert 'kv_store="' in shown["/metrics"][1] and "127.0.0.1:9" in shown["/metrics"][1]
        assert [shown[name][0] for name in ("a wrong key", "an error")] == [401, 400]
        processes = [server.process.pid, *server.children]
        for pid in processes:
            for name in ("cmdline", "environ", "comm"):
                shown[f"{pid} {name}"] = 200, (Path("/proc") / str(pid) / name).read_text()
        wait_until(lambda: any("KV store" in line for line in server.lines), "the store failed")
        assert server.stop() == 0
        shown["log"] = 200, "".join(server.lines)
    for path in (tmp_path / "recording").rglob("*"):
        if path.is_file():
            shown[path.name] = 200, path.read_bytes().decode("latin-1")
            assert path.stat().st_size > 0
    assert not [name for name, (_, text) in shown.items() if MARKER in text]
