"""What a report says beside its numbers: versions, machine, model and settings."""

from importlib import metadata
from typing import Any

from quire.base.config import EngineConfig, public_settings
from quire.base.model_spec import ModelSpec
from quire.base.version import QUIRE_VERSION
from quire.models.source import ModelSource
from quire.tools.report import machine_facts

PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "triton")
SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
DIGITS = 16  # of the config's digest


def facts_of(
    config: EngineConfig, source: ModelSource, spec: ModelSpec, reference_dtype: str
) -> dict[str, dict[str, Any]]:
    """Collect them by section and name."""
    sizes = {name: getattr(spec, name) for name in SIZES}
    return {
        "versions": {"quire": QUIRE_VERSION, **{name: _version(name) for name in PACKAGES}},
        "machine": machine_facts(),
        "model": {
            "name": source.name,
            "type": spec.model_type,
            "class of": spec.implementation,
            **sizes,
            "config": spec.identity[:DIGITS],
            "reference": f"transformers in {reference_dtype}, eager attention",
        },
        "settings": _given(config),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _given(config: EngineConfig) -> dict[str, Any]:
    """Return the settings that are not the defaults."""
    defaults, given = public_settings(EngineConfig()), public_settings(config)
    return {name: value for name, value in given.items() if value != defaults[name]}
