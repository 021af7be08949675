"""The endpoints of pooling models, with small encoders."""

from collections.abc import Iterator

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.serve.api.test_embeddings import ask, serving_model, vectors
from tests.support.models.encoder_checkpoints import (
    encoder_checkpoint,
    inputs_of,
    logits_of,
    states_of,
)

QUERY = "a quick fox"
DOCUMENTS = ["The lazy dog sleeps on.", "keys and values in blocks", "the quick brown fox jumps"]


@pytest.fixture(scope="module")
def scorer() -> Iterator[TestClient]:
    with serving_model(encoder_checkpoint("bert", 1), dtype="float64") as app:
        yield app


def wanted_scores() -> np.ndarray:
    folder = encoder_checkpoint("bert", 1)
    inputs = inputs_of(folder, [(QUERY, each) for each in DOCUMENTS])
    return 1 / (1 + np.exp(-np.concatenate(logits_of(folder, inputs))))


def test_score_and_rerank_equal_the_reference(scorer: TestClient) -> None:
    wanted = wanted_scores()
    found = ask(scorer, "/score", text_1=QUERY, text_2=DOCUMENTS)
    scores = [each["score"] for each in found["data"]]
    np.testing.assert_allclose(scores, wanted, rtol=1e-10)
    ranked = ask(scorer, "/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=2)
    order = np.argsort(-wanted).tolist()
    assert [each["index"] for each in ranked["results"]] == order[:2]
    assert ranked["results"][0]["relevance_score"] == pytest.approx(wanted.max(), rel=1e-10)


def test_scorer_refuses_generation_and_embeddings(scorer: TestClient) -> None:
    messages = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    bodies = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}
    for path in (*bodies, "/v1/chat/completions", "/v1/messages"):
        body = bodies.get(path, messages)
        assert "this engine returns embeddings" in ask(scorer, path, 400, **body)["message"], path
    assert "gives classes, not embeddings" in ask(scorer, status=400, input="a")["message"]


def test_embeddings_and_classes_equal_the_reference() -> None:
    folder = encoder_checkpoint("xlm-roberta")
    states = states_of(folder, inputs_of(folder, DOCUMENTS))
    with serving_model(folder, dtype="float64") as app:
        found = vectors(ask(app, input=DOCUMENTS))
    wanted = [each[0] / np.linalg.norm(each[0]) for each in states]
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-10)
    folder = encoder_checkpoint("modernbert", 3)
    logits = np.array(logits_of(folder, inputs_of(folder, DOCUMENTS)))
    with serving_model(folder, dtype="float64") as app:
        classes = ask(app, "/classify", input=DOCUMENTS)["data"]
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose([each["probs"] for each in classes], shares, rtol=1e-9)
    assert [each["label"] for each in classes] == [f"LABEL_{i}" for i in logits.argmax(1)]
