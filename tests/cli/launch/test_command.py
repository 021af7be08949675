"""`quire launch`: settings of each agent, and the agent's start, with a stand-in for the agent."""

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from quire.base.settings.config import ServerConfig, config_from_flat
from quire.cli.launch.agents import AGENTS
from quire.engine.start.build import build_engine
from quire.serve.context import ApiContext
from tests.serve.api.conftest import serving
from tests.support.commands import run
from tests.support.serve.fake_client import FakeClient


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """Serve the demo model in a thread of this process, with an API key."""
    engine = build_engine(config_from_flat(model="demo", disable_log_stats=True))
    client, config = FakeClient(engine), ServerConfig(api_key=("s3cret",))
    context = ApiContext(client, engine.renderer, engine.requests, ("demo",), config, 1_700_000_000)
    with serving(context) as url:
        yield url
    engine.client.close()


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A home without settings, with a program for each agent that writes its arguments."""
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("QUIRE_API_KEY", "s3cret")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "theirs")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in AGENTS:
        program = programs / name
        program.write_text('#!/bin/sh\necho "$@" > "$HOME/arguments"\nenv > "$HOME/env"\nexit 3\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return tmp_path


def test_each_agent_gets_url_key_and_model(
    home: Path, server_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in AGENTS:
        words = ("launch", name, "--url", f"{server_url}/v1/", "--yes", "--", "--resume", "a b")
        status, out, _ = run(capsys, *words)
        assert status == 3, "the exit status is the agent's"
        assert "s3cret" not in out and f"quire launch {name} --undo" in out
        given = (home / "arguments").read_text().strip()
        assert given == ("--profile quire --resume a b" if name == "codex" else "--resume a b")
        assert ("ANTHROPIC_API_KEY" in (home / "env").read_text()) == (name != "claude")
    claude = json.loads((home / ".claude/settings.json").read_text())["env"]
    assert claude["ANTHROPIC_BASE_URL"] == server_url
    assert claude["ANTHROPIC_AUTH_TOKEN"] == "s3cret"
    assert claude["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == claude["ANTHROPIC_MODEL"] == "demo"
    codex = tomllib.loads((home / ".codex/quire.config.toml").read_text())
    provider = codex["model_providers"][codex["model_provider"]]
    assert (codex["model"], provider["base_url"]) == ("demo", f"{server_url}/v1")
    assert (provider["wire_api"], provider["env_key"]) == ("responses", "QUIRE_API_KEY")
    opencode = json.loads((home / ".config/opencode/opencode.json").read_text())
    assert opencode["model"] == "quire/demo"
    assert opencode["provider"]["quire"]["options"]["baseURL"] == f"{server_url}/v1"
    assert opencode["provider"]["quire"]["models"]["demo"]["limit"]["context"] == 2048
    aider = yaml.safe_load((home / ".aider.conf.yml").read_text())
    assert aider["model"] == "openai/demo" and aider["openai-api-base"] == f"{server_url}/v1"
    for name in AGENTS:
        assert run(capsys, "launch", name, "--undo")[0] == 0
    left = [path for path in home.rglob("*") if path.suffix in (".json", ".toml", ".yml")]
    assert left == []


def test_settings_do_not_change_without_consent(
    home: Path, server_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, err = run(capsys, "launch", "claude", "--url", server_url, "--dry-run")
    assert status == 0 and '+    "ANTHROPIC_MODEL": "demo"' in out
    assert "has a context of 2,048 tokens" in err
    status, _, err = run(capsys, "launch", "claude", "--url", server_url)
    assert status == 1 and "add --yes" in err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: "n")
    status, out, _ = run(capsys, "launch", "claude", "--url", server_url)
    assert status == 1 and "nothing was changed" in out
    assert not (home / ".claude").exists() and not (home / "arguments").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("cursor",), "there is no agent 'cursor'; there are claude, codex, opencode, aider"),
        (("aider", "--model", "other"), "has no model 'other'; it has demo"),
        (("aider", "--dry-run", "--model", "demo"), "no server has demo"),
    ],
)
def test_unknown_agents_and_models_are_refused(
    home: Path,
    server_url: str,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    url = () if "--dry-run" in words else ("--url", server_url)
    status, _, err = run(capsys, "launch", *words, *url)
    assert status == 1 and message in err


def test_missing_agent_gets_install_instructions(
    home: Path, server_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    status, out, _ = run(capsys, "launch", "codex", "--url", server_url, "--yes")
    assert status == 0
    assert "install it with: npm install -g @openai/codex" in out
    assert "codex --profile quire" in out
