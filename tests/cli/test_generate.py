"""`quire generate`, a user's first command, with good and bad input."""

import io
import os
import subprocess
import sys

import pytest

from tests.support.commands import run


def test_demo_model_answers(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "generate", "Hello!", "--temperature", "0", "--max-tokens", "20")
    assert status == 0
    assert out.strip()


def test_same_seed_gives_the_same_answer(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("Tell me a story.", "--temperature", "1", "--max-tokens", "24")
    first = run(capsys, "generate", *options, "--sampling-seed", "7")
    second = run(capsys, "generate", *options, "--sampling-seed", "7")
    other = run(capsys, "generate", *options, "--sampling-seed", "8")
    assert first[1] == second[1] != other[1]


def test_prompt_may_come_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello!"))
    given = run(capsys, "generate", "Hello!", "--temperature", "0", "--max-tokens", "5")
    piped = run(capsys, "generate", "--temperature", "0", "--max-tokens", "5")
    assert piped[1] == given[1]


def test_raw_skips_the_chat_template(capsys: pytest.CaptureFixture[str]) -> None:
    raw = run(capsys, "generate", "Once upon a", "--raw", "--temperature", "0", "--max-tokens", "4")
    chat = run(capsys, "generate", "Once upon a", "--temperature", "0", "--max-tokens", "4")
    assert raw[0] == 0
    assert raw[1] != chat[1]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("",), 1, "the prompt is empty"),
        (("x", "--model", "/nowhere"), 1, "there is no directory /nowhere"),
        (("x", "--model", "shape:nothing"), 1, "the shapes are"),
        (("x", "--temperature", "9"), 1, "temperature must be from 0 to 2"),
        (("x", "--max-model-len", "1M"), 1, "max_model_len"),
        (("x", "--kv-cache-memory-bytes", "1k"), 1, "kv_cache_memory_bytes"),
        (("x", "--raw", "--system", "y"), 1, "--raw"),
        (("x", "--top-k", "many"), 2, "invalid int"),
        (("x", "--max-model-len", "lots"), 2, "not a number"),
        (("x", "--dtype", "int3"), 2, "invalid choice"),
        (("x", "--no-such-option"), 2, "there is no option --no-such-option"),
    ],
)
def test_bad_input_is_reported_with_advice(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], status: int, message: str
) -> None:
    exit_status, out, err = run(capsys, "generate", *arguments)
    assert (exit_status, out) == (status, "")
    assert message in err
    assert "Traceback" not in err


def test_help_shows_units_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "generate", "--help", "all")
    assert status == 0
    for text in ("--block-size TOKENS", "(default: 16)", "--kv-cache-memory-bytes", "--stop TEXT"):
        assert text in out


def test_version_is_printed() -> None:
    command = [sys.executable, "-m", "quire.cli.main", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert (done.returncode, done.stdout) == (0, "quire 0.1.0\n")
