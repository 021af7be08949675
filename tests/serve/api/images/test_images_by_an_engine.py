"""Images of requests to an engine with a vision tower: computed once, retained, forked."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.base.settings.config import ServerConfig, config_from_flat
from quire.engine.start.build import build_engine
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from tests.serve.api.images.conftest import chat_part, data_url, file_of, picture, text_part
from tests.support.render.tiny_tokenizers import write_vision_model
from tests.support.serve.fake_client import FakeClient

TEXT = {
    "vocab_size": 320, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 256,
}  # fmt: skip
TOWER = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 20,
    "num_attention_heads": 2, "num_hidden_layers": 1, "patch_size": 14, "image_size": 56,
}  # fmt: skip
PICTURE = chat_part(data_url(file_of(picture(56, 56))))


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = write_vision_model(tmp_path_factory.mktemp("model"), "gemma3")
    config = {"model_type": "gemma3", "text_config": TEXT, "vision_config": TOWER,
              "mm_tokens_per_image": 4, "dtype": "float32"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    engine = build_engine(
        config_from_flat(
            model=str(folder), load_format="dummy", kv_cache_memory_bytes=4 << 20, block_size=4,
            disable_log_stats=True,
        )
    )  # fmt: skip
    context = ApiContext(
        FakeClient(engine), engine.renderer, engine.requests, ("seeing",), ServerConfig(), 0
    )
    with TestClient(create_app(context)) as client:
        yield client
    engine.client.close()


def post_chat(api: TestClient, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": [text_part("see "), PICTURE, text_part(" there")]}]
    common = {"messages": messages, "temperature": 0, "max_tokens": 4, "ignore_eos": True}
    answer = api.post("/v1/chat/completions", json=common | fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_repeated_image_is_a_prefix_hit(api: TestClient) -> None:
    first, second = (post_chat(api, cache_salt="a") for _ in range(2))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= second["usage"]["prompt_tokens"] - 4
    assert second["choices"] == first["choices"]


def test_fork_cannot_start_inside_an_image(api: TestClient) -> None:
    source_id = post_chat(api, keep_s=60)["id"]
    tokens = api.get(f"/v1/requests/{source_id}/tokens").json()["token_ids"]
    inside = next(i for i in range(len(tokens)) if len(set(tokens[i : i + 4])) == 1) + 1
    body = {"max_tokens": 2, "at_token": inside}
    error = api.post(f"/v1/requests/{source_id}/fork", json=body).json()["error"]
    assert error["param"] == "at_token"
    assert f"token {inside} is inside the image" in error["message"]
    whole = post_chat(api, max_tokens=6)["choices"][0]["message"]["content"]
    body = {"max_tokens": 2, "messages": [{"role": "user", "content": [PICTURE]}]}
    error = api.post(f"/v1/requests/{source_id}/fork", json=body).json()["error"]
    assert error["message"].startswith("messages[0] has a part of type 'image_url', which is not")
    more = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    forked = api.post(f"/v1/requests/{source_id}/fork", json=more).json()["choices"][0]["text"]
    assert forked and whole.endswith(forked)
