"""quire as a deployment of Ray Serve: experimental, written for ray 2.60.

    from ray import serve
    from quire.serve.ray_serve import application

    serve.run(application("demo", max_num_seqs=64, deployment={"num_replicas": 2}))

Each replica has cores of its own and answers HTTP through quire's app, with all its endpoints. Ray
requests the app from a started replica by `__serve_build_asgi_app__`.

`LLMConfig(server_cls=...)` of Ray Serve LLM accepts the same class if the replicas answer HTTP
themselves (its "direct streaming"). Its other mode is not supported: there an ingress calls `chat`
and `completions` with vLLM's classes.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from quire.base.errors import ConfigError, MissingDependency
from quire.base.settings.config import EngineConfig, ServerConfig, config_from_flat
from quire.engine.client.fleet import client_of
from quire.engine.start.preflight import check_before_loading
from quire.engine.start.text import TextSide, build_text_side
from quire.models.checkpoint.source import ModelSource, resolve_source
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from quire.serve.hooks.hooks import Hooks
from quire.serve.processes.managed_core import ManagedCores
from quire.serve.vllm_compat import drop_vllm_settings

if TYPE_CHECKING:
    from fastapi import FastAPI

ANY_HOST = "0.0.0.0"  # Ray's proxy connects under any name
# Settings that Ray replaces, and settings of state that several processes of a server share.
NOT_HERE = {
    "host", "port", "uds", "root_path", "api_server_count", "shutdown_timeout", "restart_engine",
    "ssl_keyfile", "ssl_certfile", "files_dir", "files_gb", "requests_per_minute",
    "tokens_per_minute", "usage_log", "otlp_traces_endpoint",
}  # fmt: skip


class QuireServer:
    """A replica of the deployment.

    model: name or directory of the model, or Ray's LLMConfig with settings in `engine_kwargs`.
    settings: settings of the engine and the server, by name. Raises ConfigError for a setting that
    is invalid, or that has no effect in a replica.
    """

    def __init__(self, model: Any = "demo", **settings: Any) -> None:
        self._cores: ManagedCores | None = None  # stays None if __init__ fails
        self._llm_config = None if isinstance(model, str) else model
        if self._llm_config is not None:
            model, settings = _of_llm_config(model)
        drop_vllm_settings(settings)
        known = {field.name for field in fields(ServerConfig)}
        own = {name: settings.pop(name) for name in list(settings) if name in known}
        if wrong := sorted(own.keys() & NOT_HERE):
            raise ConfigError(f"{wrong[0]} has no effect in a Ray Serve replica; remove it.")
        self._server = ServerConfig(host=ANY_HOST, **own)
        self._engine: EngineConfig = config_from_flat(model=model, **settings)
        self._cores = ManagedCores(self._engine, "warning")
        self._loaded: tuple[ModelSource, TextSide] | None = None

    @property
    def _started(self) -> ManagedCores:
        assert self._cores is not None
        return self._cores

    async def start(self) -> None:
        """Load the model, unless it is loaded already."""
        if self._loaded is None:
            self._loaded = await asyncio.to_thread(self._load)

    def _load(self) -> tuple[ModelSource, TextSide]:
        source = resolve_source(self._engine.model, progress=False)
        check_before_loading(self._engine, source)
        self._started.start()
        text = build_text_side(self._engine.model, source)
        text.renderer.prepare()
        self._started.wait_until_ready()
        return source, text

    async def __serve_build_asgi_app__(self) -> "FastAPI":
        """Load the model and return the app that answers this replica's requests."""
        await self.start()
        assert self._loaded is not None
        source, text = self._loaded
        client, server = client_of(self._started.paths, text.tokenizer), self._server
        client.start()
        await client.wait_until_ready()
        names = server.served_model_name or (source.name,)
        context = ApiContext(client, text.renderer, text.requests, names, server, int(time.time()))
        if server.hooks:
            context.hooks = Hooks(server.hooks, server.hook_timeout)
        return create_app(context)

    async def check_health(self) -> None:
        """Raise EngineDead if a core has ended or is stuck; Ray then starts a new replica."""
        if self._loaded is not None:
            self._started.check()

    async def llm_config(self) -> Any:
        """Return Ray's LLMConfig if the replica was made from one, else None."""
        return self._llm_config

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """Return the deployment options that Ray's LLMConfig contains."""
        return dict(llm_config.deployment_config)

    def __del__(self) -> None:
        """Stop the cores when Ray drops the replica, whose requests have ended."""
        if self._cores is not None:
            self._cores.stop()


def application(
    model: str = "demo", *, deployment: Mapping[str, Any] | None = None, **settings: Any
) -> Any:
    """Return an application for `serve.run`. deployment: options of the deployment, such as
    `num_replicas`; settings: as in `quire serve`. Raises MissingDependency without Ray Serve."""
    try:
        from ray import serve
    except ImportError as error:
        raise MissingDependency(
            'Ray Serve is not installed; install it: pip install "quire[ray-serve]"'
        ) from error
    made = serve.deployment(serve.ingress()(QuireServer), name="quire")
    return made.options(**(deployment or {})).bind(model, **settings)


def _of_llm_config(llm_config: Any) -> tuple[str, dict[str, Any]]:
    """Return the model and the settings that Ray's LLMConfig contains."""
    loading, name = llm_config.model_loading_config, llm_config.model_id
    source = loading.model_source or loading.model_id
    if not isinstance(source, str):
        raise ConfigError(f"model_source must be a directory or a Hugging Face id, got {source!r}.")
    settings = dict(llm_config.engine_kwargs)
    settings.setdefault("served_model_name", (name,))
    return source, settings
