"""/score and /rerank with a small cross-encoder and with an embedding model."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.serve.api.test_embeddings import ask, serving_model, vectors
from tests.support.models.pooling_checkpoints import class_logits, pooling_checkpoint

QUERY, DOCUMENTS = "a fox", ["The capital of France is", "a dog and a cat", "a fox"]
SCORE_PATHS = ["/score", "/v1/score"]
RERANK_PATHS = ["/rerank", "/v1/rerank", "/v2/rerank"]


@pytest.fixture(scope="module")
def embedder() -> Iterator[TestClient]:
    with serving_model(pooling_checkpoint("embed")) as app:
        yield app


@pytest.fixture(scope="module")
def scorer() -> Iterator[TestClient]:
    with serving_model(pooling_checkpoint("classify", num_labels=1)) as app:
        yield app


def scores(answer: Any) -> list[float]:
    assert all(item["object"] == "score" for item in answer["data"])
    return [item["score"] for item in answer["data"]]


def test_cross_encoder_scores_the_joined_texts(scorer: TestClient) -> None:
    ids = [ask(scorer, "/tokenize", prompt=text)["tokens"] for text in (QUERY, *DOCUMENTS)]
    logits = class_logits(pooling_checkpoint("classify", 1), [ids[0] + each for each in ids[1:]])
    wanted = [1 / (1 + np.exp(-each[0])) for each in logits]
    for path in SCORE_PATHS:
        found = ask(scorer, path, text_1=QUERY, text_2=DOCUMENTS)
        np.testing.assert_allclose(scores(found), wanted, rtol=1e-4)
    assert found["usage"]["prompt_tokens"] == sum(len(ids[0]) + len(each) for each in ids[1:])
    same = [ask(scorer, "/score", **{one: [QUERY] * 3, two: DOCUMENTS}) for one, two in (
        ("queries", "documents"), ("data_1", "data_2"),
    )]  # fmt: skip
    assert scores(same[0]) == scores(same[1]) == scores(found)


def test_embedding_scores_are_cosine_similarities(embedder: TestClient) -> None:
    units = vectors(ask(embedder, input=[QUERY, *DOCUMENTS]))
    found = scores(ask(embedder, "/score", text_1=QUERY, text_2=DOCUMENTS))
    np.testing.assert_allclose(found, units[1:] @ units[0], rtol=1e-9)
    assert found[2] == pytest.approx(1)


@pytest.mark.parametrize("kind", ["embedder", "scorer"])
def test_rerank_orders_documents_by_score(kind: str, request: pytest.FixtureRequest) -> None:
    app = request.getfixturevalue(kind)
    each = scores(ask(app, "/score", text_1=QUERY, text_2=DOCUMENTS))
    for path in RERANK_PATHS:
        documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
        found = ask(app, path, query=QUERY, documents=documents)["results"]
        assert [item["index"] for item in found] == sorted(range(3), key=lambda i: -each[i])
        for item in found:
            assert item["relevance_score"] == each[item["index"]]
            assert item["document"] == {"text": DOCUMENTS[item["index"]]}
    best = ask(app, "/rerank", query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=False)
    assert best["results"] == [{name: found[0][name] for name in ("index", "relevance_score")}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {}, "text_1"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"queries": "a", "text_2": "b"}, "documents"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": [[1, 2]]}, "text_2"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents"),
        ("/score", {"queries": "a", "data_2": "b"}, "documents"),
        (
            "/rerank",
            {"query": "a", "documents": ["b"], "max_tokens_per_doc": -2},
            "max_tokens_per_doc",
        ),
    ],
)
def test_wrong_bodies_are_refused(
    scorer: TestClient, path: str, body: dict[str, Any], param: str
) -> None:
    assert ask(scorer, path, 400, **body)["param"] == param


def test_multi_class_and_generative_models_give_no_scores(api: TestClient) -> None:
    with serving_model(pooling_checkpoint("classify")) as app:
        error = ask(app, "/score", 400, text_1="a", text_2="b")
        assert "this model has 3 classes" in error["message"]
    assert ask(api, "/rerank", 400, query="a", documents=["b"])["code"] == "wrong_runner"
