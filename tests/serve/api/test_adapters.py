"""Adapters as models of the server: selection by `model`, and permissions to load and unload."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from quire.base.errors import ConfigError
from quire.base.requests.numerics import differing_parts
from quire.base.settings.config import EngineConfig, ServerConfig
from quire.base.settings.lora import LoraConfig
from quire.engine.start.build import Engine
from quire.engine.start.preflight import check_adapters
from quire.models.checkpoint.source import resolve_model
from quire.ops.host.native import core
from quire.serve.adapters import add_configured
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from tests.serve.api.conftest import small_engine
from tests.support.runner.adapters import to_gguf, write_adapter, write_demo_adapter
from tests.support.serve.fake_client import FakeClient

pytestmark = pytest.mark.skipif(core() is None, reason="the C++ core is not built")

KEYS = ("one", "boss")
BODY = {"prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with adapters: a, b, deep/c, a.gguf, and two that the demo model cannot use."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("a", "b", "deep/c")):
        write_demo_adapter(folder / name, 4 + seed, seed=seed)
    config = json.loads((resolve_model("demo").directory / "config.json").read_text())
    to_gguf(folder / "a", folder / "a.gguf", config)
    write_demo_adapter(folder / "high", 17)
    write_adapter(folder / "other", {"model.layers.0.self_attn.q_proj": (8, 8)}, 4)
    return folder


@pytest.fixture(scope="module")
def adapted() -> Iterator[Engine]:
    built = small_engine(enable_lora=True, max_loras=1)
    yield built
    built.client.close()


def context_of(engine: Engine, **server: Any) -> ApiContext:
    config = ServerConfig(**server)
    client = FakeClient(engine)
    return ApiContext(client, engine.renderer, engine.requests, ("demo",), config, 1_700_000_000)


@pytest.fixture(scope="module")
def app(adapted: Engine) -> FastAPI:
    return create_app(context_of(adapted))


@pytest.fixture
def api(app: FastAPI, adapted: Engine, adapters: Path) -> Iterator[TestClient]:
    """A server without keys that may load the adapters. Each test gets a fresh context."""
    app.state.context.__dict__ = vars(context_of(adapted, lora_roots=(str(adapters),)))
    with TestClient(app) as client:
        yield client


def load(api: TestClient, name: str, path: str, **more: Any) -> Any:
    headers = {"Content-Type": "application/json"} | more.pop("headers", {})
    body = json.dumps({"lora_name": name, "lora_path": path} | more)
    return api.post("/v1/load_lora_adapter", content=body, headers=headers)


def text(api: TestClient, model: str, path: str = "/v1/completions", **more: Any) -> str:
    answer = api.post(path, json=BODY | {"model": model} | more)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    found: str = answer.json()["choices"][0]["text"]
    return found


def test_loaded_adapter_is_served_as_a_model(api: TestClient, adapters: Path) -> None:
    base = text(api, "demo")
    answer = load(api, "first", "a")
    assert answer.status_code == 200 and "added successfully" in answer.text
    assert load(api, "second", str(adapters / "deep" / "c")).status_code == 200
    texts = {text(api, name) for name in ("demo", "first", "second")}
    assert base in texts and len(texts) == 3
    cards = api.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("demo", None), ("first", "demo"), ("second", "demo"),
    ]  # fmt: skip
    assert api.get("/v1/models/first").json()["root"] == str(adapters / "a")
    chat = {"model": "first", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    assert api.post("/v1/chat/completions", json=chat).json()["model"] == "first"
    unknown = api.post("/v1/completions", json=BODY | {"model": "third"})
    assert unknown.status_code == 404
    assert "demo, first, second" in unknown.json()["error"]["message"]


def test_adapter_changes_the_fingerprint_of_its_responses(api: TestClient) -> None:
    """In whole responses and in streams; only the weights part differs."""
    load(api, "first", "a")
    load(api, "second", "b")
    found = {}
    for name in ("demo", "first", "second"):
        body = BODY | {"model": name}
        whole = api.post("/v1/completions", json=body).json()["system_fingerprint"]
        stream = api.post("/v1/completions", json=body | {"stream": True}).text
        assert (
            json.loads(stream.split("\n")[0].removeprefix("data: "))["system_fingerprint"] == whole
        )
        found[name] = whole
    assert len({*found.values()}) == 3
    assert differing_parts(found["demo"], found["first"]) == ["weights"]
    assert differing_parts(found["first"], found["second"]) == ["weights"]


def test_gguf_file_loads_as_an_adapter(api: TestClient) -> None:
    assert load(api, "first", "a").status_code == load(api, "second", "a.gguf").status_code == 200
    assert text(api, "first") == text(api, "second") != text(api, "demo")


def test_unloaded_adapter_is_unknown(api: TestClient) -> None:
    load(api, "first", "a")
    body = {"lora_name": "first", "lora_int_id": 1}
    assert "removed successfully" in api.post("/v1/unload_lora_adapter", json=body).text
    assert api.post("/v1/completions", json=BODY | {"model": "first"}).status_code == 404
    again = api.post("/v1/unload_lora_adapter", json=body)
    assert again.status_code == 404 and again.json()["error"]["param"] == "lora_name"


def test_loading_a_used_name_needs_load_inplace(api: TestClient) -> None:
    load(api, "first", "a")
    before = text(api, "first")
    for name in ("first", "demo"):
        refused = load(api, name, "b")
        assert refused.status_code == 400 and "already a model" in refused.text
    assert load(api, "first", "b", load_inplace=True).status_code == 200
    assert text(api, "first") != before
    assert load(api, "demo", "b", load_inplace=True).status_code == 400


@pytest.mark.parametrize(
    ("name", "path", "status", "message"),
    [
        ("x", "high", 400, "rank 17, above max_lora_rank=16"),
        ("x", "other", 400, "trained on another model"),
        ("x", "missing", 400, "no adapter_config.json"),
        ("x", "..", 403, "--lora-roots"),
        ("x", ".", 403, "--lora-roots"),
        ("x", "a/../../a", 403, "--lora-roots"),
        ("x", "/etc", 403, "--lora-roots"),
        ("x", "", 400, "lora_path"),
        ("x", "a\0", 400, "lora_path"),
        ("x", "\ud800", 400, "lora_path"),
        ("x", "a/" * 3000, 400, "lora_path"),
        ("", "a", 400, "lora_name"),
        ("with blanks", "a", 400, "lora_name"),
        ("x" * 200, "a", 400, "lora_name"),
    ],
)
def test_invalid_adapters_names_and_paths_are_refused(
    api: TestClient, name: str, path: str, status: int, message: str
) -> None:
    answer = load(api, name, path)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert len(api.get("/v1/models").json()["data"]) == 1
    assert text(api, "demo")


def test_symlink_out_of_the_root_is_refused(
    api: TestClient, adapters: Path, tmp_path: Path
) -> None:
    link = adapters / "link"
    link.symlink_to(tmp_path)
    try:
        assert load(api, "x", "link").status_code == 403
    finally:
        link.unlink()


def test_keys_limit_loading_and_unloading(adapted: Engine, adapters: Path) -> None:
    boss, one = ({"Authorization": f"Bearer {key}"} for key in ("boss", "one"))
    context = context_of(adapted, api_key=KEYS, admin_api_key=("boss",))
    with TestClient(create_app(context)) as api:
        path = str(adapters / "a")
        assert load(api, "x", path).status_code == 401
        assert load(api, "x", path, headers=one).status_code == 403
        assert load(api, "x", path, headers=boss).status_code == 200
        body = {"lora_name": "x"}
        for headers, status in ((one, 403), (boss, 200)):
            answer = api.post("/v1/unload_lora_adapter", json=body, headers=headers)
            assert answer.status_code == status
    context = context_of(adapted, api_key=KEYS, lora_roots=(str(adapters),))
    with TestClient(create_app(context)) as api:
        assert load(api, "x", "a", headers=one).status_code == 200
        assert load(api, "x", "a", headers=one, load_inplace=True).status_code == 403
        assert api.get("/v1/models/x", headers=one).json()["root"] == "x"


def test_server_without_lora_roots_refuses_loading(adapted: Engine) -> None:
    with TestClient(create_app(context_of(adapted))) as api:
        assert load(api, "x", "a").status_code == 403
        assert api.post("/v1/unload_lora_adapter", json={"lora_name": "x"}).status_code == 403


def test_engine_without_lora_refuses_loading(api_context: ApiContext, adapters: Path) -> None:
    api_context.config = ServerConfig(lora_roots=(str(adapters),))
    with TestClient(create_app(api_context)) as api:
        answer = load(api, "x", "a")
        assert answer.status_code == 400 and "--enable-lora" in answer.text


def test_lora_modules_are_loaded_at_the_start(adapted: Engine, adapters: Path) -> None:
    modules = (f"x={adapters / 'a'}", f'{{"name": "y", "path": "{adapters / "b"}"}}')
    context = context_of(adapted, lora_modules=modules)
    asyncio.run(add_configured(context))
    assert [*context.adapters] == ["x", "y"]
    context = context_of(adapted, lora_modules=(f"x={adapters / 'other'}",))
    with pytest.raises(ConfigError, match="another model"):
        asyncio.run(add_configured(context))
    base = f'{{"name": "y", "path": "{adapters / "b"}", "base_model_name": "other"}}'
    with pytest.raises(ConfigError, match="'other', but this server's is demo"):
        asyncio.run(add_configured(context_of(adapted, lora_modules=(base,))))


def test_settings_are_checked_before_the_model_is_loaded(adapters: Path) -> None:
    enabled = EngineConfig(lora=LoraConfig(enable_lora=True))
    check_adapters(enabled, ServerConfig(lora_modules=(f"x={adapters / 'other'}",)))
    with pytest.raises(ConfigError, match="rank 17"):
        check_adapters(enabled, ServerConfig(lora_modules=(f"x={adapters / 'high'}",)))
    fewer = EngineConfig(lora=LoraConfig(enable_lora=True, lora_target_modules=("o_proj",)))
    with pytest.raises(ConfigError, match="the adapter 'x'.* is none of lora_target_modules"):
        check_adapters(fewer, ServerConfig(lora_modules=(f"x={adapters / 'other'}",)))
    for server in (ServerConfig(lora_modules=("x=/a",)), ServerConfig(lora_roots=("/a",))):
        with pytest.raises(ConfigError, match="enable_lora"):
            check_adapters(EngineConfig(), server)


# ---- adapter scales of llama.cpp's API -------------------------------------------------------


def scaled(api: TestClient, scales: Mapping[int, float] | None, path: str = "/completion") -> str:
    """Return the text of a request to the base model. scales: None leaves out the field `lora`."""
    body: dict[str, Any] = {"temperature": 0, "n_predict": 6, "ignore_eos": True, "prompt": [5, 6]}
    if path != "/completion":
        body = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
        body["messages"] = [{"role": "user", "content": "Hi"}]
    if scales is not None:
        body["lora"] = [{"id": number, "scale": scale} for number, scale in scales.items()]
    answer = api.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    text = found["content"] if path == "/completion" else found["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions"])
def test_request_scales_select_and_weight_adapters(api: TestClient, path: str) -> None:
    assert load(api, "first", "a").status_code == load(api, "second", "b").status_code == 200
    base = scaled(api, None, path)
    texts = [scaled(api, each, path) for each in ({0: 1}, {1: 1}, {0: 1, 1: 1}, {0: -1.5, 1: 0.5})]
    assert len({base, *texts}) == 5
    assert scaled(api, {}, path) == scaled(api, {0: 0, 1: 0}, path) == base
    assert scaled(api, {1: 1, 0: 1}, path) == texts[2]
    if path == "/completion":
        body = {"prompt": [5, 6], "model": "first", "n_predict": 6, "temperature": 0}
        named = api.post(path, json=body | {"ignore_eos": True})
        assert named.json()["content"] == texts[0]


def test_default_scales_apply_to_requests_without_lora(api: TestClient, adapters: Path) -> None:
    assert api.get("/lora-adapters").json() == []
    load(api, "first", "a")
    load(api, "second", "b")
    base, first = scaled(api, None), scaled(api, {0: 1.0})
    both = scaled(api, {0: 1.0, 1: -0.5})
    scales = [{"id": 0, "scale": 1.0}, {"id": 1, "scale": -0.5}]
    assert api.post("/lora-adapters", json=scales).json() == {"success": True}
    listed = api.get("/lora-adapters").json()
    assert [(each["id"], each["scale"], each["name"]) for each in listed] == [
        (0, 1.0, "first"), (1, -0.5, "second"),
    ]  # fmt: skip
    assert listed[0]["path"] == str(adapters / "a")
    assert scaled(api, None) == both and scaled(api, {}) == base
    assert text(api, "second") != text(api, "demo")  # an adapter's name uses that adapter alone
    assert api.post("/v1/unload_lora_adapter", json={"lora_name": "second"}).status_code == 200
    assert scaled(api, None) == first
    load(api, "third", "b")
    assert [each["id"] for each in api.get("/lora-adapters").json()] == [0, 1]
    load(api, "first", "b", load_inplace=True)
    assert scaled(api, None) == scaled(api, {1: 1.0})
    assert api.post("/lora-adapters", json=[]).status_code == 200
    assert scaled(api, None) == base


@pytest.mark.parametrize(
    "lora",
    [
        [{"id": 5, "scale": 1}],
        [{"id": -1, "scale": 1}],
        [{"id": 0}],
        [{"id": 0, "scale": "x"}],
        [{"id": 0, "scale": 1e9}],
        [{"id": 0, "scale": 1, "name": "first"}],
        [{"id": 0, "scale": 1}] * 65,
        {"id": 0, "scale": 1},
        "first",
    ],
)
def test_invalid_scales_are_refused(api: TestClient, lora: Any) -> None:
    load(api, "first", "a")
    for body in (BODY, {"prompt": "x"}):
        path = "/completion" if "max_tokens" not in body else "/v1/completions"
        assert api.post(path, json=body | {"lora": lora}).status_code == 400
    assert api.post("/lora-adapters", json=lora).status_code == 400
    assert api.get("/lora-adapters").json()[0]["scale"] == 0


def test_scales_need_the_name_of_the_base_model(api: TestClient) -> None:
    load(api, "first", "a")
    refused = api.post(
        "/v1/completions", json=BODY | {"model": "first", "lora": [{"id": 0, "scale": 1}]}
    )
    assert refused.status_code == 400 and "name the base model" in refused.text
    assert (
        api.post("/v1/completions", json=BODY | {"model": "first", "lora": []}).status_code == 200
    )


def test_setting_default_scales_needs_an_admin_key(adapted: Engine, adapters: Path) -> None:
    boss, one = ({"Authorization": f"Bearer {key}"} for key in ("boss", "one"))
    context = context_of(adapted, api_key=KEYS, admin_api_key=("boss",))
    with TestClient(create_app(context)) as api:
        load(api, "x", str(adapters / "a"), headers=boss)
        scales = [{"id": 0, "scale": 1}]
        assert api.post("/lora-adapters", json=scales).status_code == 401
        assert api.post("/lora-adapters", json=scales, headers=one).status_code == 403
        assert api.post("/lora-adapters", json=scales, headers=boss).status_code == 200
        assert api.get("/lora-adapters", headers=one).json()[0]["path"] == "x"
