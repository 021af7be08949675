"""A model's directory with other values in its config.json: `hf_overrides`.

The changed copy is a directory of links to the model's files beside a config.json of its own, so
that whoever reads the model, in whichever process, sees the same. Its name is a digest of all that
it is made of; it stays in the user's cache for the next start.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError, ModelError
from quire.base.gguf import is_gguf
from quire.base.json_file import read_object
from quire.base.user_cache import user_cache

CONFIG = "config.json"
MOST_KEPT = 64  # directories; the oldest go
UNFINISHED = ".tmp"


def overridden(directory: Path, overrides: Mapping[str, Any]) -> Path:
    """Return a directory like this one, with these values in its config.json. Objects in objects
    are merged, null is a value like others. Raises ConfigError for a GGUF file, which has no
    config.json, and ModelError without one."""
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
    place = user_cache("overrides") / name
    if not place.is_dir():
        _make(place, files, text)
    return place


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with other values; of an object in it, those that are named."""
    found = dict(config)
    for name, value in overrides.items():
        before = found.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            value = merged(before, value)
        found[name] = value
    return found


def _make(place: Path, files: list[Path], config: str) -> None:
    """Make the directory at once, whoever else does the same."""
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_room(place.parent)
        made = Path(tempfile.mkdtemp(UNFINISHED, dir=place.parent))
        for path in files:
            (made / path.name).symlink_to(path.resolve())
        (made / CONFIG).write_text(config, "utf-8")
        try:
            made.rename(place)
        except OSError:  # it is there meanwhile
            shutil.rmtree(made)
            if not place.is_dir():
                raise
    except OSError as error:
        raise ConfigError(
            f"hf_overrides needs a directory in {place.parent}: {error.strerror or error}. Set"
            " XDG_CACHE_HOME to a writable directory."
        ) from error


def _make_room(parent: Path) -> None:
    """Remove the oldest directories: links and one small file each."""
    found = sorted(parent.iterdir(), key=lambda path: path.lstat().st_mtime)
    for path in found[: max(0, len(found) + 1 - MOST_KEPT)]:
        shutil.rmtree(path, ignore_errors=True)


def _change_of(path: Path) -> int:
    with contextlib.suppress(OSError):  # a link to nothing
        return os.stat(path).st_mtime_ns
    return 0
