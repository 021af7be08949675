"""Finds models that take images, and reads the files that configure their preprocessing."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.base.plugins import IMAGE_PROCESSORS, is_installed
from quire.render.tokens.tokenizer_files import read_json
from quire.spec.media_families import FAMILIES

QWEN = tuple(name for name, family in FAMILIES.items() if family.has_mrope)
QWEN3 = ("qwen3_vl", "qwen3_vl_moe")


@dataclass(frozen=True)
class ModelFiles:
    """The contents of a model's files; a missing file is an empty object."""

    config: dict[str, Any]  # config.json
    preprocessor: dict[str, Any] = field(default_factory=dict)  # preprocessor_config.json
    processor: dict[str, Any] = field(default_factory=dict)  # processor_config.json
    video: dict[str, Any] = field(default_factory=dict)  # video_preprocessor_config.json


def read_model_files(directory: Path) -> ModelFiles:
    """Read the files of a model directory. Raises ModelError for a file without a JSON object."""
    files = [directory / "config.json", *processor_files(directory)]
    return ModelFiles(*(read_json(path) for path in files))


def processor_files(directory: Path) -> list[Path]:
    """Return the paths of the files that configure image processors, whether they exist or not."""
    names = ("preprocessor_config", "processor_config", "video_preprocessor_config")
    return [directory / f"{name}.json" for name in names]


def takes_images(directory: Path) -> bool:
    """Return whether a model has a vision tower, and an image processor for it exists."""
    if not directory.is_dir():
        return False
    config = read_json(directory / "config.json")
    model_type = config.get("model_type")
    if not isinstance(config.get("vision_config"), dict) or not isinstance(model_type, str):
        return False
    return is_known(model_type)


def is_known(model_type: str) -> bool:
    """Return whether quire or an installed package has an image processor for a model type."""
    return model_type in FAMILIES or is_installed(IMAGE_PROCESSORS, model_type, FAMILIES)
