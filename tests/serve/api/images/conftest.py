"""An API over the demo model that pretends to take images: the engine itself gets only text.

One of the demo tokenizer's tokens is the placeholder, so that image spans are in the vocabulary.
"""

import base64
import io
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from quire.base.messages import Request
from quire.base.requests.outputs import RequestOutput
from quire.base.settings.config import ServerConfig
from quire.engine.client.request_maker import RequestMaker
from quire.engine.start.build import Engine
from quire.render.media.media_renderer import MediaRenderer
from quire.render.media.placeholders import Placeholder, Placeholders
from quire.render.media.processors import MediaSettings
from quire.render.renderer import Renderer
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from tests.support.serve.fake_client import FakeClient

MARK = "<|endoftext|>"
MARK_ID = 0
# Images of 28 x 28 pixels have one token.
SETTINGS = MediaSettings("qwen2_vl", {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 16})
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'image' %}<|endoftext|>{% else %}"
    "{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class BlindClient(FakeClient):
    """A FakeClient whose engine gets no items: the demo model has no vision tower."""

    async def generate(
        self, request: Request, prompt_text: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        blind = msgspec.structs.replace(request, media=())
        async for output in super().generate(blind, prompt_text):
            if self.requests and self.requests[-1] is blind:
                self.requests[-1] = request
            yield output


def image_context(engine: Engine, **server: Any) -> ApiContext:
    """Return a context of a server whose model takes images."""
    tokenizer = engine.renderer.tokenizer
    assert tokenizer is not None
    media = MediaRenderer(SETTINGS, Placeholders({"image": Placeholder(MARK, MARK)}, tokenizer))
    renderer = Renderer(tokenizer, TEMPLATE, media=media)
    requests: RequestMaker = engine.requests
    config = ServerConfig(**server)
    return ApiContext(BlindClient(engine), renderer, requests, ("demo",), config, 1_700_000_000)


def picture(height: int = 28, width: int = 28, seed: int = 0) -> Image.Image:
    """Return a picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def file_of(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """Return the bytes of an image file."""
    data = io.BytesIO()
    image.save(data, format, **options)
    return data.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def chat_part(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


MakeImageContext = Callable[..., ApiContext]


@pytest.fixture(scope="session")
def images(engine: Engine) -> MakeImageContext:
    """A context of a server whose model takes images: images(limit_mm_per_prompt=...)."""

    def make(**server: Any) -> ApiContext:
        return image_context(engine, **server)

    return make


@pytest.fixture(scope="session")
def seeing(images: MakeImageContext) -> Iterator[TestClient]:
    """A client of an app that takes images. Tests leave its context as it is."""
    with TestClient(create_app(images()), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def context(seeing: TestClient) -> ApiContext:
    """The context of `seeing`."""
    found: ApiContext = seeing.app.state.context  # type: ignore[attr-defined]
    return found
