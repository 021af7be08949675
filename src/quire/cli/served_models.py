"""The models that `quire serve` is asked for: MODEL or NAME=MODEL as words, or a list in a file."""

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
    """One of several models. names: what requests may call it, its own if empty. settings: of this
    model alone, which win over those of all."""

    model: str
    names: tuple[str, ...] = ()
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


def entry_of(word: str) -> ModelEntry:
    """Return what MODEL or NAME=MODEL asks for. A path that exists is a path, whatever is in it."""
    name, sign, model = word.partition("=")
    if not sign or "/" in name or Path(word).exists():
        return ModelEntry(word)
    if not name or not model:
        raise ConfigError(f"a model must be given as MODEL or NAME=MODEL, got {word!r}.")
    return ModelEntry(model, (name,))


def join_models(settings: dict[str, Given], words: Sequence[str]) -> None:
    """Replace the models of a file by the words of the command line. Raise ConfigError if both one
    model and several are given."""
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
    """Return the models. given: several; engine: settings of all of them. Raises ConfigError."""
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
