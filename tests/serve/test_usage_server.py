"""Limits and usage of API keys on a server with two API processes."""

import json
import signal
from http.client import HTTPConnection
from pathlib import Path

from tests.support.processes.servers import Server, kill

BODY = json.dumps({"prompt": "Once", "max_tokens": 4, "ignore_eos": True})
KEY = {"Authorization": "Bearer top-secret"}


def ask(server: Server, method: str = "POST", path: str = "/v1/completions") -> tuple[int, str]:
    """Send a request on a new connection, which either process may accept."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(method, path, BODY, KEY | {"Content-Type": "application/json"})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def test_api_processes_share_limits_and_ledger(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    server = Server(
        "--api-key", "top-secret", "--requests-per-minute", "4", "--usage-log", str(path),
        "--api-server-count", "2", "--max-num-seqs", "8",
    )  # fmt: skip
    try:
        found = [ask(server)[0] for _ in range(12)]
        assert found == [200] * 4 + [429] * 8
        kill(server.api[0], signal.SIGKILL)
        server.wait_for_line("restarting it")
        assert ask(server)[0] == 429  # both the surviving and the new process know the usage
        metrics = ask(server, "GET", "/metrics")[1]
        counted = [line for line in metrics.splitlines() if line.startswith("quire:key_")]
        assert all('key="key 1"' in line for line in counted)
        values = {line.split("{")[0]: float(line.split()[-1]) for line in counted}
        assert values["quire:key_requests_total"] == 4
        assert values["quire:key_generation_tokens_total"] == 16
    finally:
        assert server.stop() == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["completion_tokens"] for line in lines] == [4] * 4
    prompt = sum(line["prompt_tokens"] for line in lines)
    assert prompt == values["quire:key_prompt_tokens_total"]
    assert "top-secret" not in path.read_text() + metrics
