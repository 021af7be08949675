"""The first lines of a server's log: the API, the page, and a command that works when pasted."""

import json
import shlex
from pathlib import Path

import pytest

from quire.base.settings.config import ServerConfig, config_from_flat
from quire.models.checkpoint.source import ModelSource, resolve_source
from quire.serve.several.served import FirstRequest, ServedModel, first_request, start_lines

CHAT = FirstRequest("/v1/chat/completions", {"model": "it's"})


def lines(first: FirstRequest = CHAT, **settings: object) -> list[str]:
    return list(start_lines(ServerConfig(**settings), ("127.0.0.1", 8123), first))


def test_start_lines_show_api_page_and_command() -> None:
    ready, command = lines()
    root = "http://127.0.0.1:8123"
    assert ready == f"ready: {root}/v1 (API), {root}/ (page); Ctrl-C stops the server"
    assert command.startswith("try: curl ") and "Authorization" not in command
    words = shlex.split(command.removeprefix("try: "))
    assert words[:2] == ["curl", f"{root}/v1/chat/completions"]
    assert json.loads(words[-1]) == {"model": "it's"}


def test_settings_change_the_start_lines() -> None:
    assert "(page)" not in lines(page=False)[0]
    assert lines(root_path="/quire")[0].startswith("ready: http://127.0.0.1:8123/quire/v1 (API)")
    files = {"ssl_certfile": "c", "ssl_keyfile": "k"}
    assert all("https://127.0.0.1:8123/" in line for line in lines(**files))
    ready, command = lines(uds="/tmp/a b")
    assert ready.startswith("ready: unix:/tmp/a b ")
    words = shlex.split(command.removeprefix("try: "))
    assert words[:4] == [
        "curl",
        "--unix-socket",
        "/tmp/a b",
        "http://localhost/v1/chat/completions",
    ]


@pytest.mark.parametrize(
    ("address", "host"),
    [(("0.0.0.0", 1), "127.0.0.1"), (("::", 1, 0, 0), "[::1]"), (("::1", 1, 0, 0), "[::1]")],
)
def test_start_lines_show_an_address_that_clients_can_use(address: tuple, host: str) -> None:
    found = start_lines(ServerConfig(), address, CHAT)
    assert all(f"http://{host}:1/v1" in line for line in found)


def test_command_reads_the_key_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    [_, command] = lines(api_key=("sesame",))
    assert '-H "Authorization: Bearer $QUIRE_API_KEY"' in command and "sesame" not in command
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    assert "$VLLM_API_KEY" in lines(api_key=("sesame",))[1]


def test_first_request_suits_the_model(tmp_path: Path) -> None:
    model = ServedModel(config_from_flat(model="demo"))
    source = resolve_source(model.engine.model)
    chat = first_request(model, source)
    assert (chat.path, chat.body["model"]) == ("/v1/chat/completions", "demo")
    named = ServedModel(model.engine, ("a", "b"))
    assert first_request(named, source).body["model"] == "a"
    pooling = ServedModel(config_from_flat(model="demo", runner="pooling"))
    assert first_request(pooling, source).path == "/v1/embeddings"
    classes = ServedModel(config_from_flat(model="demo", runner="pooling", convert="classify"))
    assert first_request(classes, source).path in ("/classify", "/v1/chat/completions")
    bare = ModelSource(tmp_path, "auto", "bare")
    (tmp_path / "config.json").write_text((source.directory / "config.json").read_text())
    found = first_request(model, bare)
    assert (found.path, found.body["model"]) == ("/v1/completions", "bare")
    assert first_request(model, ModelSource(tmp_path / "none", "auto", "x")).path == chat.path
