"""`quire run`: a download, a server in the background, a chat, and reuse of the server."""

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.cli.local import run as run_module
from quire.models.checkpoint.source import resolve_model
from quire.serve.processes.server_files import running_servers
from tests.support.commands import run
from tests.support.models.gguf_writer import Q8_0, byte_level_metadata, convert
from tests.support.serve.fake_hub import running_hub, use_hub

OPTIONS = ("--temperature", "0", "--max-tokens", "8")


@pytest.fixture(autouse=True)
def cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[None]:
    """Stop the servers at the end of each test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    run(capsys, "stop", "--all")


@pytest.mark.slow
def test_gguf_file_of_the_hub_is_downloaded_and_served(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second command uses the running server."""
    demo = resolve_model("demo").directory
    whole = (demo / "tokenizer.json").read_text()
    extra = byte_level_metadata(demo, "own") | {"tokenizer.huggingface.json": whole}
    file = convert(demo, tmp_path / "demo-Q8_0.gguf", Q8_0, extra)
    with running_hub() as hub:
        hub.repos["org/demo"] = {file.name: file.read_bytes(), "demo-Q2_K.gguf": bytes(2000)}
        use_hub(monkeypatch, hub, str(tmp_path / "hf"))
        for name, value in hub.variables(str(tmp_path / "hf")).items():
            monkeypatch.setenv(name, value)
        for number in range(2):
            words = ("run", "org/demo", "Who are you?", "--temperature", "0", "--port", "0")
            status, out, err = run(capsys, *words)
            assert status == 0 and "I am the demo model" in out, err
            assert ("serving at http" in err) == (number == 0)
            assert ("keeps its own settings, without port" in err) == (number == 1)
        assert len(hub.downloads()) == 1
    [server] = running_servers()
    assert server.models == {"org/demo": "org/demo"}


@pytest.mark.slow
def test_demo_model_is_served_for_a_chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello!\nWho are you?\n"))
    monkeypatch.setenv("QUIRE_API_KEY", "open-sesame")
    status, out, err = run(capsys, "run", *OPTIONS, "--port", "0", "--max-model-len", "128")
    assert status == 0 and len(out.splitlines()) == 2
    assert not [*Path(os.environ["XDG_RUNTIME_DIR"]).rglob("*.yaml")]
    status, out, err = run(capsys, "stop", "demo")
    assert status == 0 and running_servers() == []


def test_errors_are_reported_before_a_server_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(run_module, "_start", never)
    cases = {
        ("no/such/model",): "there is no directory no/such/model",
        (str(tmp_path),): "config.json",
        ("demo", "--uds", "/tmp/x"): "remove --uds",
        ("demo", "--idle-unload-s", "-1"): "idle_unload_s",
        ("demo", "--image", "none.png"): "cannot be read",
    }
    for words, message in cases.items():
        status, out, err = run(capsys, "run", *words)
        assert (status, out) == (1, "") and message in err, words


def test_failed_server_start_shows_the_end_of_its_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "LOG_LINES", 3)
    assert resolve_model("demo")
    status, out, err = run(capsys, "run", "demo", "Hi", "--host", "203.0.113.1")
    assert (status, out) == (1, "")
    assert "before it was ready" in err and "cannot listen on 203.0.113.1" in err
