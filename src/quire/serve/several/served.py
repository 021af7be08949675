"""Models of one server: settings for its processes, and the first lines of the server's log."""

import contextlib
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from quire.base.errors import ConfigError, ModelError, QuireError, RequestError
from quire.base.requests.pooling import CLASSIFY
from quire.base.settings.config import EngineConfig, ModelConfig, ServerConfig
from quire.base.settings.kv_events import parse_kv_events
from quire.base.settings.secrets import KEY_VARIABLES
from quire.engine.start.preflight import check_before_loading, check_conversations
from quire.models.checkpoint.source import ModelSource, resolve_source
from quire.spec.pooling_spec import pooling_of


class ApiModel(msgspec.Struct, frozen=True):
    """One model, as configured for API processes."""

    model: ModelConfig  # the model's settings
    names: tuple[str, ...]  # names that requests may use; if empty, the source's name
    cores: tuple[str, ...]  # paths of the cores' sockets


@dataclass(frozen=True)
class ServedModel:
    """One model with the settings of its engine."""

    engine: EngineConfig
    names: tuple[str, ...] = ()  # names that requests may use; if empty, the source's name
    own_pool_bytes: int | None = None  # size of a KV pool that was set for this model alone

    @property
    def name(self) -> str:
        """The first name, which is displayed."""
        return self.names[0]


def named(models: Sequence[ServedModel]) -> list[ServedModel]:
    """Find all models, and give default names to models without names. Raise ConfigError for two
    models of one name, and the errors of `resolve_source`."""
    found = []
    for model in models:
        source = resolve_source(model.engine.model)  # downloads, or fails, only once
        _check(model.engine, source)
        found.append(replace(model, names=model.names or (source.name,)))
    owners: dict[str, str] = {}
    for model in found:
        path = model.engine.model.model
        for name in model.names:
            if name in owners:
                raise ConfigError(
                    f"two models are called {name!r} ({owners[name]} and {path}); give one another"
                    f" name, such as OTHER={path}."
                )
            owners[name] = path
    return found


def _check(engine: EngineConfig, source: ModelSource) -> None:
    try:
        check_before_loading(engine, source)
    except (ConfigError, ModelError) as error:
        raise type(error)(f"model {engine.model.model}: {error}") from error


def check_together(models: Sequence[ServedModel], server: ServerConfig) -> None:
    """Raise ConfigError for settings that several models of one server cannot have."""
    if server.served_model_name and len(models) > 1:
        raise ConfigError(
            f"served_model_name={' '.join(server.served_model_name)} is for one model, and"
            f" {len(models)} are served; give each its name as NAME=MODEL."
        )
    if server.lora_modules or server.lora_roots:
        raise ConfigError(
            "lora_modules and lora_roots are for a server of one model that stays loaded; remove"
            " them, or start a server for each model."
        )
    for model in models:
        parallel = model.engine.parallel
        for field, value in (
            ("data_parallel_size", parallel.data_parallel_size),
            ("nnodes", parallel.nnodes),
        ):
            if value > 1:
                raise ConfigError(
                    f"{field}={value} is for a server of one model that stays loaded; remove it,"
                    " or start a server for each model."
                )
        if model.engine.parallel.node_rank > 0:
            raise ConfigError("node_rank is for a server of one model that stays loaded.")
    events = [parse_kv_events(model.engine.kv_events_config) for model in models]
    endpoints = [each.endpoint for each in events if each.is_on]
    if len(set(endpoints)) < len(endpoints):
        raise ConfigError(
            f"kv_events_config: several models cannot publish at {endpoints[0]}; give each its own"
            " endpoint, in a configuration file with `models`."
        )


def own_record(model: ServedModel) -> ServedModel:
    """Return the model with a directory of its own for its recording."""
    engine = model.engine
    if engine.record is None:
        return model
    directory = Path(engine.record) / model.name.replace("/", "--")
    return replace(model, engine=replace(engine, record=str(directory)))


@dataclass(frozen=True)
class FirstRequest:
    """A request that a model can answer: path and JSON body."""

    path: str
    body: dict[str, object]


def first_request(model: ServedModel, source: ModelSource) -> FirstRequest:
    """Return an example request for a model: a chat, or another request that the model supports."""
    name, settings = (model.names or (source.name,))[0], model.engine.model
    with contextlib.suppress(QuireError, OSError):  # loading the model reports the error
        pooling = pooling_of(source.directory, settings)
        if pooling is not None:
            path = "/classify" if pooling.task == CLASSIFY else "/v1/embeddings"
            return FirstRequest(path, {"model": name, "input": "Hello"})
        try:
            check_conversations(settings, source)
        except RequestError:  # no chat template
            body = {"model": name, "prompt": "Once upon a time", "max_tokens": 32}
            return FirstRequest("/v1/completions", body)
    messages = [{"role": "user", "content": "Hello"}]
    return FirstRequest("/v1/chat/completions", {"model": name, "messages": messages})


def start_lines(
    server: ServerConfig, address: object, first: FirstRequest, seconds: float | None = None
) -> Iterator[str]:
    """Yield log lines for a server that is ready: the URLs of API and page, and a command to paste.
    address: address of the listening socket, as `getsockname` returns it. seconds: time that the
    start took."""
    took = "" if seconds is None else f"; started in {seconds:.1f} s"
    curl, base = "curl", f"http://localhost{server.root_path}"
    if server.uds is None:
        assert isinstance(address, tuple)
        base = base_url(server, *address[:2])
        page = f", {base}/ (page)" if server.page else ""
        yield f"ready: {base}/v1 (API){page}{took}; Ctrl-C stops the server"
    else:
        curl = f"curl --unix-socket {shlex.quote(server.uds)}"
        yield f"ready: unix:{server.uds} with {base}/v1 (API){took}; Ctrl-C stops the server"
    key = ""
    if server.api_key:
        variable = next((name for name in KEY_VARIABLES if os.environ.get(name)), KEY_VARIABLES[0])
        key = f' -H "Authorization: Bearer ${variable}"'
    body = shlex.quote(json.dumps(first.body))
    yield f"try: {curl} {base}{first.path}{key} -H 'Content-Type: application/json' -d {body}"


def base_url(server: ServerConfig, host: str, port: int) -> str:
    """Return the URL of the server's root, for a client on this machine."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if server.ssl_certfile else "http"
    return f"{scheme}://{f'[{local}]' if ':' in local else local}:{port}{server.root_path}"
