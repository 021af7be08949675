"""Consistency checks between ranks of a model: version, settings and files must be the same."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from quire.base.settings.config import EngineConfig, flat_settings
from quire.base.settings.secrets import public_value
from quire.base.version import QUIRE_VERSION
from quire.models.checkpoint.source import ModelSource, load_format_of
from quire.spec.gguf.container import gguf_parts, is_gguf

OWN = ("node_rank",)  # settings that differ on each machine
# Settings that may differ from machine 0's.
OF_MACHINE = (*OWN, "device", "master_addr", "master_port", "node_wait_s")
MASKED = "masked"  # key of a masked value, next to its digest


def facts_of(config: EngineConfig, source: ModelSource) -> dict[str, str]:
    """Return digests of version, settings and model files; error messages show their names."""
    settings = {k: v for k, v in flat_settings(config).items() if k not in OWN and k != "model"}
    is_dummy = load_format_of(config, source) == "dummy"
    return {
        "version": QUIRE_VERSION,
        "settings": _digest(json.dumps(settings, sort_keys=True, default=str).encode()),
        "model": _digest(*_files(source.directory, is_dummy)),
    }


def given_settings_of(config: EngineConfig, names: Iterable[str]) -> dict[str, str]:
    """Return a machine's given settings as JSON by name, without settings that may differ between
    machines. A setting with a secret is shown as its masked value and a digest."""
    flat = flat_settings(config)
    return {
        name: _comparable(flat[name]) for name in names if name in flat and name not in OF_MACHINE
    }


def contradictions(config: EngineConfig, given: Mapping[str, str]) -> str:
    """Describe the given settings of a machine that differ from machine 0's config; empty without
    differences."""
    flat = flat_settings(config)
    found = []
    for name, there in given.items():
        here = _comparable(flat.get(name))
        if there == here:
            continue
        if _shown(there) == _shown(here):
            found.append(f"{name} has a different secret there than on machine 0")
        else:
            found.append(f"{name} is {_shown(there)} there and {_shown(here)} on machine 0")
    return ", ".join(found)


def _comparable(value: object) -> str:
    """Return a setting as JSON. A secret is masked and gets a digest. The digest is expensive to
    compute, so that trying many weak secrets takes too long."""
    shown, text = public_value(value), json.dumps(value, default=str)
    if shown == value:
        return text
    digest = hashlib.scrypt(text.encode(), salt=b"quire settings", n=1 << 14, r=8, p=1, dklen=16)
    return json.dumps({MASKED: shown, "digest": digest.hex()})


def _shown(text: str) -> str:
    """Return a comparable setting as errors may show it, without digest."""
    value = json.loads(text)
    if isinstance(value, dict) and MASKED in value:
        return json.dumps(value[MASKED])
    return "not set" if value is None else text


def different(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Name the facts that differ; empty if all are equal."""
    return " and ".join(name for name in here if here[name] != there.get(name))


def _files(directory: Path, is_dummy: bool) -> list[bytes]:
    """Identify a model's files by its config and the weights' names and sizes."""
    if is_gguf(directory):
        return [f"{part.name} {part.stat().st_size}".encode() for part in gguf_parts(directory)]
    weights = [] if is_dummy else sorted(directory.glob("*.safetensors"))
    sizes = [f"{path.name} {path.stat().st_size}".encode() for path in weights]
    config = directory / "config.json"
    return [config.read_bytes() if config.exists() else b"", *sizes]


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
