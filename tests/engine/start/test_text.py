"""The text side of an engine prepares images if the model's files support it."""

import json
import logging
from pathlib import Path

import pytest

from quire.base.settings.config import ModelConfig
from quire.engine.start.text import build_text_side
from quire.models.checkpoint.source import ModelSource
from quire.render.renderer import Renderer
from tests.support.render.tiny_tokenizers import write_vision_model


def renderer_of(folder: Path) -> Renderer:
    source = ModelSource(folder, "dummy", folder.name)
    return build_text_side(ModelConfig(model=str(folder)), source).renderer


def test_model_with_a_vision_tower_accepts_images(tmp_path: Path) -> None:
    media = renderer_of(write_vision_model(tmp_path, "qwen2_5_vl")).media
    assert media is not None and media.placeholders.kinds == ("image", "video")


def test_model_without_a_vision_tower_accepts_no_images(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path, "gemma3")
    (folder / "config.json").write_text('{"model_type": "gemma3_text"}')
    assert renderer_of(folder).media is None


@pytest.mark.parametrize("fault", ["tokens", "settings"])
def test_unusable_image_files_leave_a_text_only_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    folder = write_vision_model(tmp_path, "llava")
    if fault == "tokens":
        config = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen2_vl"}
        (folder / "config.json").write_text(json.dumps(config))
    else:
        (folder / "preprocessor_config.json").write_text('{"image_mean": [1]}')
    with caplog.at_level(logging.WARNING):
        assert renderer_of(folder).media is None
    assert "images are not accepted" in caplog.text
