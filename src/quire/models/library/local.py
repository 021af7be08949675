"""Models that other programs have downloaded: the folders of Ollama and LM Studio. Only read.

    Ollama:     manifests/HOST/OWNER/NAME/TAG (JSON), blobs/sha256-HEX
    LM Studio:  PUBLISHER/REPOSITORY/FILE.gguf

Manifests are not trusted: digests and sizes are checked before a file is used.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.base.errors import ModelNotFound
from quire.models.library.gguf_choice import GGUFCandidate, candidates_of

OLLAMA, LM_STUDIO = "Ollama", "LM Studio"
REGISTRY, LIBRARY, LATEST = "registry.ollama.ai", "library", "latest"
MODEL_LAYER = "application/vnd.ollama.image.model"
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
WORD = re.compile(r"[A-Za-z0-9][\w.-]*")
MAX_MANIFEST_BYTES = 1 << 20
MAX_FILES = 10_000  # files of a folder that are looked at


@dataclass(frozen=True)
class LocalModel:
    """A model of another program. name: as that program calls it. path: its (first) GGUF file."""

    name: str
    program: str
    path: Path
    num_bytes: int


def ollama_folders() -> list[Path]:
    """Return the existing folders of Ollama: OLLAMA_MODELS, the user's, the system service's."""
    given = os.environ.get("OLLAMA_MODELS")
    places = [given] if given else []
    places += ["~/.ollama/models", "/usr/share/ollama/.ollama/models"]
    return [path for path in map(_expanded, places) if _is_readable(path / "manifests")]


def lm_studio_folders() -> list[Path]:
    """Return the existing folders of LM Studio, newest layout first."""
    places = ("~/.lmstudio/models", "~/.cache/lm-studio/models")
    return [path for path in map(_expanded, places) if _is_readable(path)]


def find_ollama(name: str) -> LocalModel | None:
    """Return Ollama's model of a name such as `llama3.2`, `llama3.2:1b` or `hf.co/org/repo:Q4_0`;
    None if Ollama has no such model. Raises ModelNotFound if its files are incomplete."""
    path, _, tag = name.partition(":")
    words = path.split("/")
    words = [*(REGISTRY, LIBRARY)[: max(0, 3 - len(words))], *words]
    parts = [*words, tag or LATEST]
    if len(words) != 3 or not all(WORD.fullmatch(each) for each in parts):
        return None
    for folder in ollama_folders():
        manifest = folder.joinpath("manifests", *parts)
        if manifest.is_file():
            return _ollama_model(folder, manifest, name)
    return None


def find_lm_studio(name: str) -> list[GGUFCandidate]:
    """Return LM Studio's GGUF models of PUBLISHER/REPOSITORY, with absolute paths."""
    words = name.split("/")
    if len(words) != 2 or not all(WORD.fullmatch(each) for each in words):
        return []
    for folder in lm_studio_folders():
        if found := directory_candidates(folder / name):
            return found
    return []


def directory_candidates(directory: Path) -> list[GGUFCandidate]:
    """Return the GGUF models of a directory, with whole paths as names of files."""
    return candidates_of({str(path): _size(path) for path in sorted(directory.glob("*.[gG]*"))})


def local_models() -> list[LocalModel]:
    """List the models of all programs, by program and name. Skip incomplete models."""
    return [*_ollama_models(), *_lm_studio_models()]


def _ollama_models() -> Iterator[LocalModel]:
    for folder in ollama_folders():
        manifests = folder / "manifests"
        for path in _files_below(manifests, "*/*/*/*"):
            host, owner, name, tag = path.relative_to(manifests).parts
            words = (name,) if (host, owner) == (REGISTRY, LIBRARY) else (owner, name)
            words = words if host == REGISTRY else (host, *words)
            try:
                yield _ollama_model(folder, path, f"{'/'.join(words)}:{tag}")
            except ModelNotFound:
                continue


def _lm_studio_models() -> Iterator[LocalModel]:
    for folder in lm_studio_folders():
        for directory in sorted({path.parent for path in _files_below(folder, "*/*/*.gguf")}):
            name = directory.relative_to(folder).as_posix()
            for each in directory_candidates(directory):
                full = f"{name}:{each.label}"
                yield LocalModel(full, LM_STUDIO, Path(each.files[0]), each.num_bytes)


def _ollama_model(folder: Path, manifest: Path, name: str) -> LocalModel:
    """Read a manifest. Raises ModelNotFound if it has no usable model."""
    problem = f"Ollama's model {name} cannot be used: "
    advice = f"Run `ollama pull {name}`, or give a path of a GGUF file."
    try:
        with manifest.open("rb") as file:
            layers = json.loads(file.read(MAX_MANIFEST_BYTES))["layers"]
        found = [_blob(layer) for layer in layers if layer["mediaType"] == MODEL_LAYER]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        reason = f"{manifest} is not a valid manifest ({type(error).__name__})."
        raise ModelNotFound(f"{problem}{reason} {advice}") from error
    if len(found) != 1:
        reason = f"it has {len(found)} files of weights, and quire reads one."
        raise ModelNotFound(f"{problem}{reason} {advice}")
    digest, num_bytes = found[0]
    path = folder / "blobs" / f"sha256-{digest}"
    if not path.is_file() or path.stat().st_size != num_bytes:
        raise ModelNotFound(f"{problem}its file {path} is missing or incomplete. {advice}")
    return LocalModel(name, OLLAMA, path, num_bytes)


def _blob(layer: dict[str, Any]) -> tuple[str, int]:
    """Return the digest and the size of a layer. Raises ValueError for an invalid digest."""
    found = DIGEST.fullmatch(layer["digest"])
    if found is None:
        raise ValueError("not a digest")
    return found[1], int(layer["size"])


def _files_below(folder: Path, pattern: str) -> list[Path]:
    found = []
    for path in folder.glob(pattern):
        if path.is_file():
            found.append(path)
        if len(found) == MAX_FILES:
            break
    return sorted(found)


def _expanded(place: str) -> Path:
    return Path(place).expanduser()


def _is_readable(path: Path) -> bool:
    return path.is_dir() and os.access(path, os.R_OK | os.X_OK)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # a broken link
        return 0
