"""The coding agents that `quire launch` knows: their settings files, and how they start.

Each sets an address, a key and a model as the agent's own documentation describes it.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quire.cli.launch.settings_files import JsonFile, OwnFile, SettingsFile, YamlFile

NO_KEY = "quire"  # agents refuse an empty key; a server without keys ignores it
KEY_VARIABLE = "QUIRE_API_KEY"
CLAUDE_MODELS = (
    "ANTHROPIC_MODEL",
    *(f"ANTHROPIC_DEFAULT_{n}_MODEL" for n in ("OPUS", "SONNET", "HAIKU")),
)


@dataclass(frozen=True)
class Target:
    """The server and model that an agent is to use. url: root of the API. key: None if the server
    has no keys. num_context: tokens of the model's context; None if unknown."""

    url: str
    model: str
    key: str | None = None
    num_context: int | None = None

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"


@dataclass(frozen=True)
class Start:
    """How an agent is started. unset: environment variables that would take precedence."""

    arguments: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    unset: Sequence[str] = ()


@dataclass(frozen=True)
class Agent:
    """A coding agent. program: its command. install: the command that installs it."""

    name: str
    program: str
    install: str
    settings: Callable[[Target], SettingsFile]
    start: Callable[[Target], Start]


def _claude_settings(target: Target) -> SettingsFile:
    folder = os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude"
    variables = {
        "ANTHROPIC_BASE_URL": target.url,  # the agent appends /v1/messages
        "ANTHROPIC_AUTH_TOKEN": target.key or NO_KEY,
        **dict.fromkeys(CLAUDE_MODELS, target.model),
    }
    return JsonFile(Path(folder) / "settings.json", {"env": variables})


def _claude_start(target: Target) -> Start:
    return Start(unset=("ANTHROPIC_API_KEY",))  # it would be sent, too, and be refused


def _codex_settings(target: Target) -> SettingsFile:
    folder = Path(os.environ.get("CODEX_HOME") or Path.home() / ".codex")
    lines = [
        f"model = {_toml(target.model)}",
        'model_provider = "quire"',
        *([] if target.num_context is None else [f"model_context_window = {target.num_context}"]),
        "",
        "[model_providers.quire]",
        'name = "quire"',
        f"base_url = {_toml(target.openai_url)}",
        'wire_api = "responses"',
        *([] if target.key is None else [f'env_key = "{KEY_VARIABLE}"']),
    ]
    return OwnFile(folder / "quire.config.toml", "\n".join(lines) + "\n")


def _codex_start(target: Target) -> Start:
    variables = {} if target.key is None else {KEY_VARIABLE: target.key}
    return Start(("--profile", "quire"), variables)


def _opencode_settings(target: Target) -> SettingsFile:
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    model: dict[str, object] = {"name": target.model}
    if target.num_context is not None:
        model["limit"] = {"context": target.num_context, "output": target.num_context // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "quire",
        "options": {"baseURL": target.openai_url, "apiKey": target.key or NO_KEY},
        "models": {target.model: model},
    }
    values = {"provider": {"quire": provider}, "model": f"quire/{target.model}"}
    return JsonFile(Path(home) / "opencode" / "opencode.json", values)


def _aider_settings(target: Target) -> SettingsFile:
    values = {
        "openai-api-base": target.openai_url,
        "openai-api-key": target.key or NO_KEY,
        "model": f"openai/{target.model}",
    }
    return YamlFile(Path.home() / ".aider.conf.yml", values)


def _plain_start(target: Target) -> Start:
    return Start()


def _toml(text: str) -> str:
    """Return a text as a basic string of TOML, whose escapes are JSON's."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


AGENTS = {
    agent.name: agent
    for agent in (
        Agent(
            "claude", "claude", "npm install -g @anthropic-ai/claude-code",
            _claude_settings, _claude_start,
        ),
        Agent("codex", "codex", "npm install -g @openai/codex", _codex_settings, _codex_start),
        Agent(
            "opencode", "opencode", "npm install -g opencode-ai", _opencode_settings, _plain_start
        ),
        Agent(
            "aider", "aider", "pip install aider-install && aider-install",
            _aider_settings, _plain_start,
        ),
    )
}  # fmt: skip
