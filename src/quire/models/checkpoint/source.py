"""Find a model: in a directory, a GGUF file, the package (demo model, named shapes), or on the hub.

The models that Ollama and LM Studio have downloaded are found by their names there.

No torch here: the API process resolves a model as well, for its tokenizer.

`hf_overrides` changes values in a model's config.json. The changed copy is a directory of links to
the model's files, with its own config.json, so that every process reads the same values. Its name
is a digest of its contents. It stays in the user's cache for the next start.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError, ModelError, ModelNotFound
from quire.base.files import user_cache
from quire.base.settings.config import EngineConfig, ModelConfig
from quire.base.settings.fields import json_object
from quire.models.checkpoint.files import weight_files
from quire.models.library.gguf_choice import (
    GGUFCandidate,
    best_choice,
    machine_memory_bytes,
    named_choice,
)
from quire.models.library.hub_model import HubRequest, hub_model
from quire.models.library.local import directory_candidates, find_lm_studio, find_ollama
from quire.spec.config_fields import read_object
from quire.spec.gguf.container import gguf_parts, is_gguf, part_of

CONFIG = "config.json"
MAX_DIRECTORIES = 64  # maximum number of directories; the oldest are removed
UNFINISHED = ".tmp"


def overridden(directory: Path, overrides: Mapping[str, Any]) -> Path:
    """Return a copy of a model's directory with these values in its config.json. Nested objects are
    merged; null replaces a value. Raises ConfigError for a GGUF file, and ModelError if the
    directory has no config.json."""
    if is_gguf(directory):
        raise ConfigError(
            f"hf_overrides changes config.json, but {directory} is a GGUF file without one; remove"
            " it."
        )
    try:
        config = read_object(directory / CONFIG)
    except FileNotFoundError as error:
        raise ModelError(f"{directory} has no {CONFIG} for hf_overrides to change.") from error
    text = json.dumps(merged(config, overrides), indent=2)
    home = directory.resolve()
    files = sorted(path for path in home.iterdir() if path.name != CONFIG)
    facts = [str(home), text, *(f"{path.name} {_change_of(path)}" for path in files)]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
    target = user_cache("overrides") / name
    if not target.is_dir():
        _make(target, files, text)
    return target


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config with these values. Nested objects are merged."""
    found = dict(config)
    for name, value in overrides.items():
        before = found.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            value = merged(before, value)
        found[name] = value
    return found


def _make(target: Path, files: list[Path], config: str) -> None:
    """Create the directory atomically, because other processes may create it as well."""
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_room(target.parent)
        made = Path(tempfile.mkdtemp(UNFINISHED, dir=target.parent))
        for path in files:
            (made / path.name).symlink_to(path.resolve())
        (made / CONFIG).write_text(config, "utf-8")
        try:
            made.rename(target)
        except OSError:  # another process may have created it
            shutil.rmtree(made)
            if not target.is_dir():
                raise
    except OSError as error:
        raise ConfigError(
            f"hf_overrides needs a directory in {target.parent}: {error.strerror or error}. Set"
            " XDG_CACHE_HOME to a writable directory."
        ) from error


def _make_room(parent: Path) -> None:
    """Remove the oldest directories: links and one small file each."""
    found = sorted(parent.iterdir(), key=lambda path: path.lstat().st_mtime)
    for path in found[: max(0, len(found) + 1 - MAX_DIRECTORIES)]:
        shutil.rmtree(path, ignore_errors=True)


def _change_of(path: Path) -> int:
    with contextlib.suppress(OSError):  # a broken link
        return os.stat(path).st_mtime_ns
    return 0


DEMO = "demo"
SHAPE_PREFIX = "shape:"

# Patterns of files to download from the hub: never pickled weights, never code.
TEXT_FILES = ("*.json", "*.txt", "*.model", "*.jinja")  # config and tokenizer
ALL_FILES = ("*.safetensors", *TEXT_FILES)
CONFIG_ONLY = ("config.json",)
# A second copy of the weights, in the original format of the model's authors.
UNUSED_PATTERNS = ["consolidated*", "original/*"]

_WHAT_TO_DO = (
    "Give a local directory, a GGUF file, a Hugging Face id that this machine can reach, a name of"
    " `quire list`, or `demo`."
)


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine.

    directory: directory with config.json, and the weights unless load_format is `dummy`; or a GGUF
    file, which holds both. load_format: format that the setting `auto` stands for. name: display
    name.
    """

    directory: Path
    load_format: str
    name: str


def resolve_source(
    model: ModelConfig, *, progress: bool = True, files: tuple[str, ...] = ALL_FILES
) -> ModelSource:
    """Find the configured model as `resolve_model` does, and apply `hf_overrides` to its
    config."""
    source = resolve_model(model.model, model.revision, progress=progress, files=files)
    overrides = json_object("hf_overrides", model.hf_overrides)
    if not overrides:
        return source
    return replace(source, directory=overridden(source.directory, overrides))


def resolve_model(
    name: str,
    revision: str | None = None,
    *,
    progress: bool = True,
    files: tuple[str, ...] = ALL_FILES,
    refresh: bool = False,
) -> ModelSource:
    """Find the model, downloading it if it is a hub id. progress: whether to show progress bars.

    files: patterns of the files to download; TEXT_FILES and CONFIG_ONLY exclude the weights.
    refresh: whether to look for a newer revision on the hub and verify checksums.

    Raises ModelNotFound if the model does not exist, and ModelError for an unknown shape.
    """
    if name == DEMO:
        return ModelSource(_packaged("quire", "demo"), "auto", DEMO)
    if name.startswith(SHAPE_PREFIX):
        return _shape(name)
    path = Path(name).expanduser()
    if path.exists():
        return _from_path(name, path)
    if revision is None and (found := _of_other_programs(name)):
        return found
    plain = name.removeprefix("https://").removeprefix("huggingface.co/").removeprefix("hf.co/")
    if not _looks_like_hub_id(plain):
        raise ModelNotFound(f"there is no directory {name}. {_WHAT_TO_DO}")
    request = HubRequest(plain, revision, files, _is_whole, UNUSED_PATTERNS, progress, refresh)
    return ModelSource(hub_model(request, _WHAT_TO_DO), "auto", plain)


def _is_whole(directory: Path) -> bool:
    """Return whether a directory has all weight files of a checkpoint."""
    try:
        return bool(weight_files(directory))
    except ModelError:
        return False


def _from_path(name: str, path: Path) -> ModelSource:
    """Return the source of a directory or a GGUF file. Raises ModelNotFound for another file."""
    if path.is_dir():
        candidates = [] if (path / CONFIG).exists() else directory_candidates(path)
        if not candidates:
            return ModelSource(path, "auto", path.resolve().name)
        return _gguf(_best(candidates, name))
    if is_gguf(path):
        return _gguf(gguf_parts(path)[0])
    raise ModelNotFound(
        f"{name} is a file; a model is a directory with a config.json, or a GGUF file."
    )


def _gguf(path: Path) -> ModelSource:
    """Return the source of a GGUF file, which is the first part of a split model."""
    part = part_of(path.name)
    return ModelSource(path, "auto", path.stem if part is None else part.prefix)


def _of_other_programs(name: str) -> ModelSource | None:
    """Return a model that Ollama or LM Studio has downloaded; None if neither has."""
    if (model := find_ollama(name)) is not None:
        return ModelSource(model.path, "auto", name)
    repo, _, tag = name.partition(":")
    candidates = find_lm_studio(repo)
    if tag:
        with contextlib.suppress(ModelNotFound):  # the hub may have it
            found = named_choice(candidates, tag, repo).candidate
            return ModelSource(Path(found.files[0]), "auto", name)
        return None
    return ModelSource(_best(candidates, name), "auto", name) if candidates else None


def _best(candidates: list[GGUFCandidate], where: str) -> Path:
    """Return the best file for this machine. Raises ModelError if none fits."""
    if len(candidates) == 1:
        return Path(candidates[0].files[0])
    return Path(best_choice(candidates, machine_memory_bytes(), where).candidate.files[0])


def load_format_of(config: EngineConfig, source: ModelSource) -> str:
    """Return the load format: the setting, or the source's format if the setting is `auto`."""
    given = config.model.load_format
    return source.load_format if given == "auto" else given


def shape_names() -> list[str]:
    """List the names that `shape:NAME` accepts."""
    return sorted(path.name for path in _packaged("quire.models", "shapes").iterdir())


def _shape(name: str) -> ModelSource:
    """Return the source of a named shape, which has a config and random weights."""
    shape = name.removeprefix(SHAPE_PREFIX)
    if shape not in shape_names():
        known = ", ".join(shape_names())
        raise ModelError(f"there is no shape {shape!r}; the shapes are {known}.")
    return ModelSource(_packaged("quire.models", "shapes") / shape, "dummy", name)


def _packaged(package: str, directory: str) -> Path:
    return Path(str(resources.files(package).joinpath(directory)))


def _looks_like_hub_id(name: str) -> bool:
    """Return whether a name has the form NAME or OWNER/NAME and is not a path."""
    return name.count("/") <= 1 and not name.startswith((".", "/", "~")) and "\\" not in name
