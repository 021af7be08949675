"""What must be the same for all ranks of a model: version, settings, files."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from quire.base.config import EngineConfig, flat_settings
from quire.base.gguf import is_gguf
from quire.base.version import QUIRE_VERSION
from quire.models.source import ModelSource, load_format_of

OWN = ("node_rank",)  # settings that each machine has for itself


def facts_of(config: EngineConfig, source: ModelSource) -> dict[str, str]:
    """Return digests by the names that an error says."""
    settings = {k: v for k, v in flat_settings(config).items() if k not in OWN and k != "model"}
    is_dummy = load_format_of(config, source) == "dummy"
    return {
        "version": QUIRE_VERSION,
        "settings": _digest(json.dumps(settings, sort_keys=True, default=str).encode()),
        "model": _digest(*_files(source.directory, is_dummy)),
    }


def different(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Name what is not the same; empty if all is."""
    return " and ".join(name for name in here if here[name] != there.get(name))


def _files(directory: Path, is_dummy: bool) -> list[bytes]:
    """Tell a model's files apart, without reading weights: its config, names and sizes."""
    if is_gguf(directory):
        return [f"{directory.name} {directory.stat().st_size}".encode()]
    weights = [] if is_dummy else sorted(directory.glob("*.safetensors"))
    sizes = [f"{path.name} {path.stat().st_size}".encode() for path in weights]
    config = directory / "config.json"
    return [config.read_bytes() if config.exists() else b"", *sizes]


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
