"""The models of one server, and what its processes are told of each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from quire.base.config import EngineConfig, ModelConfig, ServerConfig
from quire.base.errors import ConfigError, ModelError
from quire.base.kv_events import parse_kv_events
from quire.engine.start.preflight import check_before_loading
from quire.models.source import ModelSource, resolve_source


class ApiModel(msgspec.Struct, frozen=True):
    """What API processes are told of a model. names: what requests may call it, the source's name
    if empty; cores: paths of their sockets."""

    model: ModelConfig
    names: tuple[str, ...]
    cores: tuple[str, ...]


@dataclass(frozen=True)
class ServedModel:
    """names: what requests may call it; empty is the name of its source. own_pool_bytes: of a KV
    pool that was given to this model alone."""

    engine: EngineConfig
    names: tuple[str, ...] = ()
    own_pool_bytes: int | None = None

    @property
    def name(self) -> str:
        """The first name, which is shown."""
        return self.names[0]


def named(models: Sequence[ServedModel]) -> list[ServedModel]:
    """Find all models, and name those that have no name. Raise ConfigError for two of one name, and
    what `resolve_source` raises."""
    found = []
    for model in models:
        source = resolve_source(model.engine.model)  # downloads, and fails, only once
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
    """Return a model that keeps a recording of its own."""
    engine = model.engine
    if engine.record is None:
        return model
    directory = Path(engine.record) / model.name.replace("/", "--")
    return replace(model, engine=replace(engine, record=str(directory)))
