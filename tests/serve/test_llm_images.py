"""`LLM` and `AsyncLLM` put images into their requests, or reject them by the call's name."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.base.errors import RequestError
from quire.base.messages import Request
from quire.base.settings.config import ModelConfig
from quire.engine.start.text import build_text_side
from quire.models.checkpoint.source import ModelSource
from quire.serve.media.local_media import LocalMedia
from quire.serve.python.beam_search import BeamSearchParams
from tests.render.media.test_processors import picture
from tests.support.render.tiny_tokenizers import text_part, write_vision_model

PICTURE, OTHER = picture(60, 50), picture(50, 60, 1)
TEXT = {
    "vocab_size": 320, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 256,
}  # fmt: skip
TOWER = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 20,
    "num_attention_heads": 2, "num_hidden_layers": 1, "patch_size": 14, "image_size": 56,
}  # fmt: skip
PARTS = [{"type": "image_pil", "image_pil": PICTURE}, text_part("and"),
         {"type": "image", "image": np.asarray(OTHER)}]  # fmt: skip
CONVERSATION = [{"role": "user", "content": PARTS}]
PROMPT = {
    "prompt": "ab<start_of_image>cd<start_of_image>",
    "multi_modal_data": {"image": [PICTURE, OTHER]},
    "cache_salt": "of somebody",
}
PARAMS = SamplingParams(max_tokens=2)


class Checked(Exception):
    """Holds the request that the engine was to check."""

    def __init__(self, request: Request) -> None:
        self.request = request


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_vision_model(tmp_path_factory.mktemp("model"), "gemma3")
    config = {"model_type": "gemma3", "text_config": TEXT, "vision_config": TOWER,
              "mm_tokens_per_image": 4, "dtype": "float32"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:
    settings: dict[str, Any] = {"load_format": "dummy", "max_model_len": 256}
    with LLM(str(folder), disable_log_stats=True, kv_cache_memory_bytes=4 << 20, **settings) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Return an LLM whose engine only checks requests."""

    def check(request: Request) -> None:
        raise Checked(request)

    monkeypatch.setattr(shared.engine.client, "check", check)
    return shared


def request_of(call: Callable[[], Any]) -> Request:
    with pytest.raises(Checked) as caught:
        call()
    return caught.value.request


CALLS: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate(PROMPT, PARAMS, False),
    "chat": lambda llm: llm.chat(CONVERSATION, PARAMS, False),
    "stream": lambda llm: next(llm.stream(CONVERSATION, PARAMS)),
    "pin": lambda llm: llm.pin_prefix(CONVERSATION),
}


@pytest.mark.parametrize("name", CALLS)
def test_requests_have_the_items_of_their_images(llm: LLM, name: str) -> None:
    request = request_of(lambda: CALLS[name](llm))
    media = llm.engine.renderer.media
    assert media is not None
    items = [media.image(np.asarray(each)).items[0] for each in (PICTURE, OTHER)]
    assert [item.at(0) for item in request.media] == items
    token_id = llm.get_tokenizer().token_id("<image_soft_token>")
    for item in request.media:
        assert request.prompt_token_ids[item.start : item.end] == [token_id] * 4
    assert request.cache_salt == ("of somebody" if name == "generate" else "")


def test_each_prompt_has_its_own_images(llm: LLM) -> None:
    prompts = ["text only", {"prompt": "<start_of_image>", "multi_modal_data": {"image": OTHER}}]
    assert request_of(lambda: llm.generate(prompts, PARAMS, False)).media == ()
    assert len(request_of(lambda: llm.generate(prompts[::-1], PARAMS, False)).media) == 1


REFUSED: dict[str, Callable[[LLM], Any]] = {
    "beam search": lambda llm: llm.beam_search(PROMPT, BeamSearchParams(2, 2)),
    "a session": lambda llm: llm.session().append(CONVERSATION),
    "a model that pools": lambda llm: llm.embed(PROMPT),
}


@pytest.mark.parametrize("feature", REFUSED)
def test_unsupported_calls_reject_images_by_name(shared: LLM, feature: str) -> None:
    with pytest.raises(RequestError, match=f"{feature} does not accept images or videos"):
        REFUSED[feature](shared)


def test_generate_with_beam_search_rejects_images(shared: LLM) -> None:
    params = SamplingParams(n=2, use_beam_search=True, max_tokens=2)
    with pytest.raises(RequestError, match="beam search does not accept images"):
        shared.generate(PROMPT, params, False)


def test_missing_images_and_unsupported_options_are_rejected(shared: LLM) -> None:
    with pytest.raises(
        RequestError,
        match="'<start_of_image>' in the prompt is 2, and the number of its images is 1",
    ):
        shared.generate(PROMPT | {"multi_modal_data": {"image": PICTURE}}, PARAMS, False)
    with pytest.raises(RequestError, match="mm_processor_kwargs is not supported"):
        shared.generate(PROMPT | {"mm_processor_kwargs": {"a": 1}}, PARAMS, False)
    with pytest.raises(RequestError, match="file: URLs are not allowed"):
        part = {"type": "image_url", "image_url": {"url": "/tmp/a.png"}}
        shared.chat([{"role": "user", "content": [part]}], PARAMS, False)


def test_async_prompts_are_rendered_with_their_images(
    folder: Path, shared: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use the text side of an AsyncLLM without its process."""
    engine = AsyncLLM.__new__(AsyncLLM)
    engine._prepare(str(folder), {"allowed_local_media_path": str(folder)})
    text = build_text_side(engine._config.model, ModelSource(folder, "dummy", "tiny"))
    engine._media = LocalMedia(text.renderer, *engine._media_settings)
    monkeypatch.setattr(AsyncLLM, "_text", text)
    prompt = asyncio.run(engine._render(CONVERSATION))
    taken, media = LocalMedia(shared.engine.renderer).take(CONVERSATION)
    expected = shared.engine.renderer.render(taken, media=media)
    assert (prompt.token_ids, prompt.media) == (expected.token_ids, expected.media)
    (folder / "a.png").write_bytes(b"no image")
    wrong = {"prompt": "<start_of_image>", "multi_modal_data": {"image": str(folder / "a.png")}}
    with pytest.raises(RequestError, match=r"image\[0\]: the image is in none of the formats"):
        asyncio.run(engine._render(wrong))


def test_model_without_its_vision_tower_rejects_images(folder: Path) -> None:
    """A class of transformers runs only the text part."""
    source = ModelSource(folder, "dummy", "tiny")
    made = [
        build_text_side(ModelConfig(model=str(folder), model_impl=impl), source).renderer
        for impl in ("auto", "transformers")
    ]
    assert [renderer.media is None for renderer in made] == [False, True]
    with pytest.raises(RequestError, match="this model does not accept images"):
        LocalMedia(made[1]).take(CONVERSATION)
