"""/v1/embeddings and /classify with small pooling models, and with a generating model.

Covers `serve/openai/pooled.py`, `serve/bodies/pooling_protocol.py`.
"""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

from quire.base.requests.hooks import EndRequest, HookRequest
from quire.base.settings.config import ServerConfig, config_from_flat
from quire.engine.start.build import build_engine
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from quire.serve.hooks.hooks import Hooks
from tests.support.models.pooling_checkpoints import pooling_checkpoint
from tests.support.serve.fake_client import FakeClient

TEXTS = ["a fox", "The capital of France is", "a dog and a cat"]


@contextmanager
def serving_model(
    folder: Path, hooks: Hooks | None = None, **settings: Any
) -> Iterator[TestClient]:
    config = config_from_flat(
        model=str(folder), disable_log_stats=True, kv_cache_memory_bytes=1 << 20, **settings
    )
    engine = build_engine(config)
    client = FakeClient(engine)
    names, server = ("small",), ServerConfig()
    context = ApiContext(client, engine.renderer, engine.requests, names, server, 0, hooks=hooks)
    try:
        with TestClient(create_app(context), raise_server_exceptions=False) as app:
            yield app
    finally:
        engine.client.close()


@pytest.fixture(scope="module")
def embedder() -> Iterator[TestClient]:
    with serving_model(pooling_checkpoint("embed"), max_model_len=64) as app:
        yield app


@pytest.fixture(scope="module")
def classifier() -> Iterator[TestClient]:
    with serving_model(pooling_checkpoint("classify")) as app:
        yield app


def ask(app: TestClient, path: str = "/v1/embeddings", status: int = 200, **body: Any) -> Any:
    answer = app.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]


def vectors(answer: Any) -> np.ndarray:
    return np.array([item["embedding"] for item in answer["data"]])


def test_each_input_has_an_embedding_of_norm_one(embedder: TestClient) -> None:
    found = ask(embedder, input=TEXTS, model="small")
    assert [item["index"] for item in found["data"]] == [0, 1, 2]
    assert found["object"] == "list" and found["model"] == "small"
    assert found["id"].startswith("embd-")
    np.testing.assert_allclose(np.linalg.norm(vectors(found), axis=1), 1, rtol=1e-12)
    usage = found["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] > 10
    one = vectors(ask(embedder, input=TEXTS[1]))
    assert np.array_equal(one[0], vectors(found)[1])


def test_token_ids_give_the_embedding_of_their_text(embedder: TestClient) -> None:
    ids = [ask(embedder, "/tokenize", prompt=text)["tokens"] for text in TEXTS]
    texts = vectors(ask(embedder, input=TEXTS))
    assert np.array_equal(vectors(ask(embedder, input=ids)), texts)
    assert np.array_equal(vectors(ask(embedder, input=ids[0])), texts[:1])


def test_dimensions_truncate_and_renormalize_and_base64_is_equal(embedder: TestClient) -> None:
    raw = vectors(ask(embedder, input=TEXTS, use_activation=False))
    assert not np.allclose(np.linalg.norm(raw, axis=1), 1)
    few = vectors(ask(embedder, input=TEXTS, dimensions=4))
    wanted = raw[:, :4] / np.linalg.norm(raw[:, :4], axis=1, keepdims=True)
    np.testing.assert_allclose(few, wanted, rtol=1e-12)
    packed = ask(embedder, input=TEXTS, dimensions=4, encoding_format="base64")
    for item, vector in zip(packed["data"], wanted, strict=True):
        numbers = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
        np.testing.assert_allclose(numbers, vector, rtol=1e-6)


def test_openai_client_reads_base64_embeddings(embedder: TestClient) -> None:
    """It requests base64 by default."""
    client = openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=embedder)
    found = client.embeddings.create(model="small", input=TEXTS)
    wanted = vectors(ask(embedder, input=TEXTS))
    np.testing.assert_allclose([item.embedding for item in found.data], wanted, rtol=1e-6)


def test_long_inputs_are_refused_or_truncated(embedder: TestClient) -> None:
    long = "a fox and " * 100
    error = ask(embedder, status=400, input=[TEXTS[0], long])
    assert error["param"] == "input" and error["code"] == "context_length_exceeded"
    found = ask(embedder, input=long, truncate_prompt_tokens=-1)
    assert found["usage"]["prompt_tokens"] == 64
    ids = ask(embedder, "/tokenize", prompt=long, status=200)["tokens"]
    for side, kept in (("right", ids[:9]), ("left", ids[-9:])):
        cut = ask(embedder, input=long, truncate_prompt_tokens=9, truncation_side=side)
        assert np.array_equal(vectors(cut), vectors(ask(embedder, input=kept)))


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "input is required"),
        ({"input": []}, "input", "not empty"),
        ({"input": [[]]}, "input", "non-empty list"),
        ({"input": [{}]}, "input", "must be a text"),
        ({"input": "a", "dimensions": 33}, "dimensions", "from 1 to 32"),
        ({"input": "a", "dimensions": 0}, "dimensions", "1"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "float32"),
        ({"input": [99999]}, "input", "not in the vocabulary"),
        ({"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "at most"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
    ],
)
def test_invalid_bodies_give_400_naming_the_field(
    embedder: TestClient, body: dict[str, Any], param: str, words: str
) -> None:
    error = ask(embedder, status=400, **body)
    assert words in error["message"]
    assert error["param"] == param


def test_classify_returns_labels_and_probabilities(classifier: TestClient) -> None:
    found = ask(classifier, "/classify", input=TEXTS)
    for item in found["data"]:
        assert item["num_classes"] == 3
        assert sum(item["probs"]) == pytest.approx(1, abs=1e-12)
        assert item["label"] == f"LABEL_{np.argmax(item['probs'])}"
    raw = ask(classifier, "/classify", input=TEXTS, use_activation=False)["data"][0]["probs"]
    weights = np.exp(raw)
    np.testing.assert_allclose(found["data"][0]["probs"], weights / weights.sum(), rtol=1e-9)


def test_models_refuse_endpoints_of_other_model_types(
    embedder: TestClient, classifier: TestClient, api: TestClient
) -> None:
    for app, path in ((classifier, "/v1/embeddings"), (embedder, "/classify")):
        assert ask(app, path, 400, input="a")["code"] == "wrong_runner"
    for path in ("/v1/embeddings", "/classify"):
        error = ask(api, path, 400, input="a")
        assert "generates text" in error["message"] and "--runner pooling" in error["message"]
    error = ask(embedder, "/v1/completions", 400, prompt="a")
    assert "this engine returns embeddings" in error["message"]
    assert ask(embedder, "/v1/chat/completions", 400, messages=[{"role": "user", "content": "a"}])


class Censor:
    """Refuses prompts with "dog", and replaces "a fox" with "a cat"."""

    def before_admission(self, request: HookRequest) -> HookRequest | None:
        if "dog" in (request.prompt or ""):
            raise EndRequest("no dogs")
        if request.prompt == "a fox":
            return type(request)(request.context, prompt="a cat")
        return None


def test_hooks_filter_the_inputs() -> None:
    hooks = Hooks([Censor()])
    with serving_model(pooling_checkpoint("embed"), hooks) as app:
        fox, cat = vectors(ask(app, input=["a fox", "a cat"]))
        assert np.array_equal(fox, cat)
        assert "no dogs" in ask(app, status=400, input=["a cat", "a dog"])["message"]
        assert "no dogs" in ask(app, "/score", 400, text_1="a cat", text_2="a dog")["message"]
