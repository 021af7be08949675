"""An image processor of another package: the example of docs/extend, installed unchanged."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from quire.base.errors import ModelError
from quire.base.plugins import IMAGE_PROCESSORS
from quire.render.media.image_files import ImageLimits
from quire.render.media.media_renderer import MediaRenderer
from quire.render.media.media_worker import pack_job, unpack_answer, work
from quire.render.media.model_files import takes_images
from quire.render.renderer import Renderer
from quire.render.tokens.tokenizer import Tokenizer
from tests.render.media.test_processors import encoded, picture
from tests.support.plugin_site import Site
from tests.support.render.tiny_tokenizers import IMAGE_PART, write_vision_model

SOURCE = picture(50, 40)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    return Site(folder)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the files of a model of type `stamps`."""
    folder = write_vision_model(tmp_path / "model", "llava")
    config = {"model_type": "stamps", "vision_config": {"image_size": 32}}
    (folder / "config.json").write_text(json.dumps(config))
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<stamp>"])
    backend.save(str(folder / "tokenizer.json"))
    return folder


def test_image_processor_plugin_prepares_images(site: Site, model: Path) -> None:
    assert not takes_images(model)
    with pytest.raises(ModelError, match=r"type 'stamps'; .*llava_next"):
        MediaRenderer.from_directory(model, Tokenizer.from_directory(model))
    site.install_example("quire_stamps")
    assert takes_images(model)
    tokenizer = Tokenizer.from_directory(model)
    media = MediaRenderer.from_directory(model, tokenizer)
    prepared = media.image(np.asarray(SOURCE))
    template = "{% for p in messages[0].content %}{{ p.text or '<stamp>' }}{% endfor %}!"
    conversation = [{"role": "user", "content": [IMAGE_PART, IMAGE_PART]}]
    prompt = Renderer(tokenizer, template, media=media).render(conversation, media=[prepared] * 2)
    assert prompt.token_ids[:-1] == [tokenizer.token_id("<stamp>")] * 8
    assert [(item.start, item.shape, item.grid) for item in prompt.media] == [
        (0, (1, 32, 32, 3), (1, 1)),
        (4, (1, 32, 32, 3), (1, 1)),
    ]


def test_decoding_process_uses_the_plugin(site: Site, model: Path) -> None:
    site.install_example("quire_stamps")
    media = MediaRenderer.from_directory(model, Tokenizer.from_directory(model))
    answer = work(pack_job(encoded(SOURCE), media.settings, ImageLimits()))
    [item] = media.image(np.asarray(SOURCE)).items
    image = unpack_answer(answer, np.frombuffer(item.table, np.float32).reshape(3, 256))
    assert (image.pixels.tobytes(), image.num_tokens) == (item.pixels, 4)


def test_plugin_class_without_a_placeholder_is_rejected(site: Site, model: Path) -> None:
    source = "class Odd:\n    def process(self, image): ...\n"
    site.install("odd-images", IMAGE_PROCESSORS, "stamps", "odd_images:Odd", source)
    with pytest.raises(ModelError, match="cannot be used: it has no placeholder"):
        MediaRenderer.from_directory(model, Tokenizer.from_directory(model))
