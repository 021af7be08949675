"""examples/front_end.py run as by a user: a core in its own process, prompts over TCP."""

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from tests.support.processes.forks import ForkedPopen

SCRIPT = Path(__file__).parents[2] / "examples" / "front_end.py"
QUESTIONS = ["What is 17 + 25?", "Who are you?"]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    process = ForkedPopen(
        [sys.executable, str(SCRIPT), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    found = re.search(r"port (\d+)", process.stdout.readline())
    assert found is not None
    yield int(found[1])
    process.terminate()
    process.wait()


def test_example_answers_several_open_connections(port: int) -> None:
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
    answers = []
    for i, connection in enumerate(connections):
        connection.sendall((QUESTIONS[i % 2] + "\n").encode())
    for connection in connections:
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as file:
            answers.append(file.read().decode())
        connection.close()
    with LLM("demo", disable_log_stats=True) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=256)
        for i, answer in enumerate(answers):
            [expected] = llm.chat([{"role": "user", "content": QUESTIONS[i % 2]}], params, False)
            assert answer == expected.outputs[0].text + "\n\n"


def test_example_reports_errors(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(("word " * 9000 + "\n").encode())
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as file:
            assert b"error: the prompt has" in file.read()
