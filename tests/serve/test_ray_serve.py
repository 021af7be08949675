"""quire as a Ray Serve replica: the class without Ray, and with Ray where it is installed."""

import asyncio
import json
import socket
import urllib.request
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from quire.base.errors import ConfigError, EngineDead, MissingDependency
from quire.serve.batches.app_caller import AppCaller
from quire.serve.ray_serve import QuireServer, application

SMALL: dict[str, Any] = {
    "max_num_seqs": 4, "kv_cache_memory_bytes": 8 << 20, "max_model_len": 128,
    "disable_log_stats": True, "pipeline_depth": 1,
}  # fmt: skip
BODY = {"prompt": "Once upon a time", "max_tokens": 6, "temperature": 0.0}


@dataclass
class LLMConfig:
    """The fields of Ray's LLMConfig that quire reads."""

    model_id: str = "fox"
    model_loading_config: Any = field(
        default_factory=lambda: SimpleNamespace(model_id="fox", model_source="demo")
    )
    engine_kwargs: dict[str, Any] = field(default_factory=lambda: dict(SMALL))
    deployment_config: dict[str, Any] = field(default_factory=lambda: {"num_replicas": 2})


async def status_of(app: Any, path: str, host: str) -> int:
    """Return the status of a GET with this Host header."""
    sent: list[dict[str, Any]] = []
    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "root_path": "",
        "query_string": b"", "headers": [(b"host", host.encode())], "http_version": "1.1",
        "scheme": "http", "client": ("10.0.0.9", 1), "server": ("10.0.0.1", 8000),
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    status: int = sent[0]["status"]
    return status


def test_replica_answers_through_quires_app() -> None:
    """The name that Ray's LLMConfig gives the model is the one that requests give."""

    async def talk() -> None:
        config = LLMConfig()
        replica = QuireServer(config)
        await replica.check_health()  # healthy before it is started
        app = await replica.__serve_build_asgi_app__()
        await replica.check_health()
        assert await replica.llm_config() is config
        assert await status_of(app, "/v1/models", "fox.example") == 200, "Ray may use any host name"
        caller = AppCaller(app)
        body = json.dumps({"model": "fox", **BODY}).encode()
        reply = await caller.post("/v1/completions", body)
        assert reply.status == 200
        answer = json.loads(reply.body)
        assert answer["usage"]["completion_tokens"] == 6 and answer["model"] == "fox"
        await asyncio.to_thread(replica.__del__)
        with pytest.raises(EngineDead):
            await replica.check_health()

    asyncio.run(talk())


def test_deployment_options_come_from_the_config() -> None:
    assert QuireServer.get_deployment_options(LLMConfig()) == {"num_replicas": 2}


@pytest.mark.parametrize("name", ["port", "api_server_count", "files_dir", "usage_log"])
def test_settings_that_ray_controls_are_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} has no effect in a Ray Serve replica"):
        QuireServer("demo", **{name: 1})


def test_settings_are_checked_before_loading() -> None:
    with pytest.raises(ConfigError, match="no setting 'max_seqs'"):
        QuireServer("demo", max_seqs=1)
    with pytest.raises(ConfigError, match="is not supported"):
        QuireServer("demo", grpc=True)
    source = SimpleNamespace(model_id="fox", model_source={"bucket_uri": "s3://x"})
    with pytest.raises(ConfigError, match="a directory or a Hugging Face id"):
        QuireServer(LLMConfig(model_loading_config=source))


def test_application_without_ray_names_the_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingDependency, match=r'pip install "quire\[ray-serve\]"'):
        application("demo")


@pytest.mark.slow
def test_local_ray_serve_answers_requests() -> None:
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"

    def call(path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            url + path, data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text: str = answer.read().decode()
            return text

    ray.init(num_cpus=2, include_dashboard=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(application("demo", **SMALL, deployment={"graceful_shutdown_timeout_s": 20}))
        assert call("/health") == ""
        whole = json.loads(call("/v1/completions", {"model": "demo", **BODY}))
        assert whole["usage"]["completion_tokens"] == 6
        streamed = call("/v1/completions", {"model": "demo", **BODY, "stream": True})
        events = [line[6:] for line in streamed.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        texts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
        assert "".join(texts) == whole["choices"][0]["text"]
        assert "quire:num_requests_running" in call("/metrics")
    finally:
        serve.shutdown()
        ray.shutdown()
