"""examples/learn_from_feedback.py with a real server."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from quire.ops.host.native import core
from tests.support.processes.servers import Server

if core() is None:
    pytest.skip("the C++ core is not built", allow_module_level=True)

SCRIPT = Path(__file__).parents[2] / "examples" / "learn_from_feedback.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("learn_from_feedback", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_is_short_and_rates_by_its_rule() -> None:
    assert len(SCRIPT.read_text("utf-8").splitlines()) <= 150
    found = example()
    assert found.rating_of("One. Two. Three. Four! Five?") == 1.0
    assert found.rating_of("One. Two.") == pytest.approx(0.4)
    with pytest.raises(SystemExit):
        found.parse(["--consent", "0"])


@pytest.mark.slow
def test_a_server_answers_while_its_weights_learn(capsys: pytest.CaptureFixture[str]) -> None:
    """Users get answers during updates; answers of later weights say so."""
    found = example()
    server = Server("demo", "--dtype", "bfloat16")
    try:
        given = ["--url", server.url, "--users", "4", "--batches", "2", "--size", "6"]
        curve = found.run(found.parse([*given, "--consent", "1"]))
        reply = found.post(server.url, "/v1/completions", {"prompt": "A", "max_tokens": 2})
    finally:
        server.stop()
    lines = capsys.readouterr().out.splitlines()
    assert len(curve) == len(lines) == 2 and lines[1].startswith("feedback-2: ")
    assert reply["choices"][0]["weights_versions"][-1]["version"] == "feedback-2"
