"""The models of `quire serve`: MODEL or NAME=MODEL as words, or a list in a file."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.base.settings.config import ServerConfig, config_from_flat
from quire.cli.settings import FLAG, Given
from quire.serve.several.served import ServedModel


@dataclasses.dataclass(frozen=True)
class ModelEntry:
    """One of several models."""

    model: str
    names: tuple[str, ...] = ()  # names in requests; empty for the model's own
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # override all models' ones


def entry_of(word: str) -> ModelEntry:
    """Parse MODEL or NAME=MODEL. A word that is an existing path is always a path."""
    name, sign, model = word.partition("=")
    if not sign or "/" in name or Path(word).exists():
        return ModelEntry(word)
    if not name or not model:
        raise ConfigError(f"a model must be given as MODEL or NAME=MODEL, got {word!r}.")
    return ModelEntry(model, (name,))


def join_models(settings: dict[str, Given], words: Sequence[str]) -> None:
    """Replace a file's models by the command line's. Raises ConfigError if both one model and
    several are given."""
    entries = [entry_of(word) for word in words]
    flag = settings.get("model")
    if flag is not None and flag.origin == FLAG and entries:
        if [entry.model for entry in entries] != [flag.value] or entries[0].names:
            raise ConfigError(
                f"there are two models, {' '.join(words)!r} and --model {flag.value!r}; give all"
                " models without --model."
            )
        entries = []
    if len(entries) == 1 and not entries[0].names:
        settings["model"] = flag = Given(entries[0].model, FLAG)
    elif entries:
        settings.pop("model", None)
        settings["models"] = Given(tuple(entries), FLAG)
        return
    if flag is not None and "models" in settings:
        if flag.origin != FLAG:
            raise ConfigError(f"{flag.origin} has both model and models; remove one.")
        del settings["models"]


def served_models(
    given: Given | None, engine: dict[str, Any], server: ServerConfig
) -> list[ServedModel]:
    """Return the models to serve. Raises ConfigError.

    given: several models, if given. engine: settings for all models."""
    if given is None:
        return [ServedModel(config_from_flat(**engine), server.served_model_name)]
    entries: Sequence[ModelEntry] = given.value
    models = []
    for entry in entries:
        settings = engine | entry.settings | {"model": entry.model}
        pool = entry.settings.get("kv_cache_memory_bytes")
        try:
            models.append(ServedModel(config_from_flat(**settings), entry.names, pool))
        except ConfigError as error:
            raise ConfigError(f"model {entry.model}: {error}") from error
    if len(models) == 1 and server.served_model_name:
        models = [dataclasses.replace(models[0], names=server.served_model_name)]
    return models
