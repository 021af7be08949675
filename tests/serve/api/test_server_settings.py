"""The effects of the server's settings on its responses, and its listening address."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.base.errors import ConfigError
from quire.base.settings.config import ModelConfig, ServerConfig, config_from_flat
from quire.cli.commands.serve import keys_of_environment
from quire.engine.start.text import build_text_side
from quire.models.checkpoint.source import resolve_model
from quire.render.templates.chat_template import ChatOptions
from quire.serve.app import create_app
from quire.serve.supervisor import bind_unix

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
TEXT = {"prompt": "Once", "max_tokens": 3, "temperature": 0}


def client_of(make_context: Callable[..., Any], **server: Any) -> TestClient:
    return TestClient(create_app(make_context(**server)), raise_server_exceptions=False)


def test_response_role_is_used(make_context: Callable[..., Any]) -> None:
    with client_of(make_context, response_role="model") as client:
        answer = client.post("/v1/chat/completions", json=CHAT).json()
        assert answer["choices"][0]["message"]["role"] == "model"
        streamed = client.post("/v1/chat/completions", json=CHAT | {"stream": True}).text
        assert '"role":"model"' in streamed


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
)
def test_force_include_usage_adds_usage_to_streams(
    make_context: Callable[..., Any], path: str, body: dict[str, Any]
) -> None:
    with client_of(make_context, enable_force_include_usage=True) as client:
        assert '"usage":{' in client.post(path, json=body | {"stream": True}).text
        assert client.post(path, json=body).json()["usage"]["completion_tokens"] == 3
        options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
        assert client.post(path, json=body | options).text.count('"usage":{') > 1
    with client_of(make_context) as client:
        assert '"usage":{' not in client.post(path, json=body | {"stream": True}).text


def test_token_id_setting_is_the_default_of_requests(make_context: Callable[..., Any]) -> None:
    with client_of(make_context, return_tokens_as_token_ids=True) as client:
        for requested, is_id in ((None, True), (True, True), (False, False)):
            body = TEXT | {"logprobs": 0, "return_tokens_as_token_ids": requested}
            answer = client.post("/v1/completions", json=body).json()
            for token in answer["choices"][0]["logprobs"]["tokens"]:
                assert token.startswith("token_id:") == is_id


def test_tools_can_be_excluded_if_tool_choice_is_none(make_context: Callable[..., Any]) -> None:
    plain = CHAT | {"return_token_ids": True}
    with_tools = plain | {"tools": [{"type": "function", "function": {"name": "f"}}]}
    for excludes in (False, True):
        with client_of(make_context, exclude_tools_when_tool_choice_none=excludes) as client:
            prompts = [
                client.post("/v1/chat/completions", json=body).json()["prompt_token_ids"]
                for body in (plain, with_tools, with_tools | {"tool_choice": "none"})
            ]
        assert prompts[0] != prompts[1]
        assert prompts[2] == prompts[0 if excludes else 1]


def test_docs_can_be_disabled(make_context: Callable[..., Any]) -> None:
    with client_of(make_context, disable_fastapi_docs=True) as client:
        assert [client.get(path).status_code for path in ("/docs", "/openapi.json")] == [404, 404]
        assert client.get("/health").status_code == 200


def test_root_path_of_a_proxy_is_accepted(make_context: Callable[..., Any]) -> None:
    """uvicorn puts the root path before the path of the request."""
    app = create_app(make_context())
    with TestClient(app, root_path="/quire") as client:
        assert client.get("/quire/v1/models").status_code == 200
        assert client.get("/v1/models").status_code == 200
        assert client.get("/quire/nothing").status_code == 404


@pytest.mark.parametrize("path", ["quire", "/quire/", "/"])
def test_bad_root_paths_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="root_path"):
        ServerConfig(root_path=path)


def test_allowed_origins_may_be_json() -> None:
    assert ServerConfig(allowed_origins=('["https://a", "*"]',)).allowed_origins == (
        "https://a",
        "*",
    )
    assert ServerConfig(allowed_origins=("https://a",)).allowed_origins == ("https://a",)
    for wrong in ("[1]", "[", '[["a"]]'):
        with pytest.raises(ConfigError, match="allowed_origins"):
            ServerConfig(allowed_origins=(wrong,))


def test_bind_unix_replaces_only_stale_sockets(tmp_path: Path) -> None:
    path = tmp_path / "api"
    first = bind_unix(path)
    first.listen()
    with pytest.raises(ConfigError, match="another server is listening there"):
        bind_unix(path)
    first.close()
    with bind_unix(path) as second, socket.socket(socket.AF_UNIX) as client:
        second.listen()
        client.connect(str(path))
    (tmp_path / "file").write_text("keep me")
    with pytest.raises(ConfigError, match="choose another --uds"):
        bind_unix(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "keep me"
    with pytest.raises(ConfigError, match="--uds"):
        bind_unix(tmp_path / ("x" * 200))


def test_api_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert keys_of_environment() == {}
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert keys_of_environment() == {"api_key": ("theirs",)}
    monkeypatch.setenv("QUIRE_API_KEY", "ours")
    assert keys_of_environment() == {"api_key": ("ours",)}


def test_dtype_aliases_are_resolved() -> None:
    assert config_from_flat(dtype="half").model.dtype == "float16"
    assert config_from_flat(dtype="float").model.dtype == "float32"


def test_override_generation_config_replaces_the_models_defaults() -> None:
    override = {"temperature": 0.25, "eos_token_id": [7, 8], "top_k": 3}
    for generation_config in ("auto", "none"):
        config = config_from_flat(
            override_generation_config=override, generation_config=generation_config
        ).model
        defaults = build_text_side(config, resolve_model("demo")).requests.defaults
        assert defaults.sampling["temperature"] == 0.25 and defaults.sampling["top_k"] == 3
        assert set(defaults.eos_token_ids) >= {7, 8}


def test_default_template_variables_yield_to_the_request() -> None:
    template = "{{ who | default('nobody') }} {{ mood | default('calm') }}"
    config = ModelConfig(chat_template=template, default_chat_template_kwargs='{"who": "you"}')
    renderer = build_text_side(config, resolve_model("demo")).renderer
    messages = [{"role": "user", "content": "Hi"}]
    assert renderer.chat_text(messages) == "you calm"
    overrides = ChatOptions(template_kwargs={"who": "me", "mood": "glad"})
    assert renderer.chat_text(messages, overrides) == "me glad"


@pytest.mark.parametrize("name", ["override_generation_config", "default_chat_template_kwargs"])
def test_bad_json_settings_are_refused(name: str) -> None:
    for wrong in ("{", "[1]", "5"):
        with pytest.raises(ConfigError, match=name):
            config_from_flat(**{name: wrong})
