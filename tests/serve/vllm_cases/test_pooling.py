"""Embeddings, classes, scores"""

import base64
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.serve.api.test_embeddings import ask, vectors
from tests.support.serve.vllm_cases import ASK, Asked, differs

TEXT = "The best thing is that it is small"
TEXTS = ["a fox", "The capital of France is", "a dog and a cat"]


def score(app: TestClient, *names: str, **body: Any) -> list[float]:
    found = ask(app, "/score", **body)
    assert found["object"] == "list" and found["id"]
    return [each["score"] for each in found["data"]]


def test_text(embedder: TestClient) -> None:
    """a text has one embedding, and a usage without an answer's tokens"""
    found = ask(embedder, input=TEXT, encoding_format="float")
    assert len(found["data"]) == 1 and len(vectors(found)[0]) == 32
    usage = found["usage"]
    assert usage["completion_tokens"] == 0 and usage["total_tokens"] == usage["prompt_tokens"]


def test_ids(embedder: TestClient) -> None:
    """so have its token ids"""
    ids = ask(embedder, "/tokenize", prompt=TEXT)["tokens"]
    as_ids, as_text = (vectors(ask(embedder, input=each)) for each in (ids, TEXT))
    np.testing.assert_array_equal(as_ids, as_text)


def test_batch(embedder: TestClient) -> None:
    """a list of texts or of ids has as many, in its order"""
    found = ask(embedder, input=[TEXT] * 10)
    assert [each["index"] for each in found["data"]] == list(range(10))
    one = ask(embedder, input=TEXT)["usage"]["prompt_tokens"]
    assert found["usage"]["prompt_tokens"] == 10 * one
    assert len(ask(embedder, input=[[1, 2, 3], [4, 5]])["data"]) == 2


def test_base64(embedder: TestClient) -> None:
    """base64 holds the same float32 numbers"""
    packed = ask(embedder, input=TEXTS, encoding_format="base64")["data"]
    plain = vectors(ask(embedder, input=TEXTS, encoding_format="float"))
    for each, numbers in zip(packed, plain, strict=True):
        found = np.frombuffer(base64.b64decode(each["embedding"]), "<f4")
        np.testing.assert_allclose(found, numbers, rtol=1e-6)


def test_encoding(embedder: TestClient) -> None:
    """another encoding is refused"""
    assert ask(embedder, status=400, input=TEXT, encoding_format="hex")["param"]


def test_truncation(embedder: TestClient) -> None:
    """truncate_prompt_tokens keeps as many"""
    for given in (TEXT, list(range(1, 30))):
        found = ask(embedder, input=given, truncate_prompt_tokens=4)
        assert found["usage"]["prompt_tokens"] == 4


def test_truncation_too_long(embedder: TestClient) -> None:
    """more than the model takes is refused"""
    error = ask(embedder, status=400, input=TEXT, truncate_prompt_tokens=8193)
    assert error["param"] == "truncate_prompt_tokens"


def test_too_long(embedder: TestClient) -> None:
    """so is a text that is longer than it takes"""
    assert "64" in ask(embedder, status=400, input=TEXT * 50)["message"]


def test_normalized(embedder: TestClient) -> None:
    """embeddings have length 1 unless use_activation says otherwise"""
    default, on, off = (
        vectors(ask(embedder, input=TEXT, use_activation=each))[0] for each in (None, True, False)
    )
    np.testing.assert_array_equal(default, on)
    np.testing.assert_allclose(off / np.linalg.norm(off), on, rtol=1e-6)


@differs("the first dimensions, normalised; vLLM allows this only if the config does")
def test_dimensions(embedder: TestClient) -> None:
    """embeddings with fewer dimensions"""
    few, whole = (vectors(ask(embedder, input=TEXT, dimensions=each))[0] for each in (16, None))
    np.testing.assert_allclose(few, whole[:16] / np.linalg.norm(whole[:16]), rtol=1e-6)


def test_more_dimensions(embedder: TestClient) -> None:
    """more than a model has are refused"""
    assert ask(embedder, status=400, input=TEXT, dimensions=100)["param"] == "dimensions"


@pytest.mark.parametrize("given", [None, "", [], [[]], {"a": 1}])
def test_nothing(embedder: TestClient, given: Any) -> None:
    """nothing, and neither text nor ids, are refused"""
    assert ask(embedder, status=400, input=given)["param"].startswith("input")


def test_unknown_tokens(embedder: TestClient) -> None:
    """so are ids outside the vocabulary"""
    assert "vocabulary" in ask(embedder, status=400, input=[10**6])["message"]


def test_conversation(embedder: TestClient) -> None:
    """a conversation has the embedding of the text that the template makes of it"""
    text = f"user: {ASK[0]['content']}\n"
    for begins, end in ((False, ""), (True, "assistant:")):
        as_chat = ask(embedder, messages=ASK, add_generation_prompt=begins)
        as_text = ask(embedder, input=text + end, add_special_tokens=False)
        assert as_chat["usage"]["prompt_tokens"] == as_text["usage"]["prompt_tokens"]
        np.testing.assert_array_equal(vectors(as_chat), vectors(as_text))


def test_conversation_with_special_tokens(embedder: TestClient) -> None:
    """to which add_special_tokens adds those of a text"""
    as_chat = ask(embedder, messages=ASK, add_special_tokens=True)
    as_text = ask(embedder, input=f"user: {ASK[0]['content']}\n")
    np.testing.assert_array_equal(vectors(as_chat), vectors(as_text))


def test_conversation_both_ends(embedder: TestClient) -> None:
    """one cannot be gone on with and an answer begun"""
    more = {"add_generation_prompt": True, "continue_final_message": True}
    error = ask(embedder, status=400, messages=ASK, **more)
    assert "continue_final_message" in error["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/classify"])
def test_wrong_conversation(embedder: TestClient, classifier: TestClient, path: str) -> None:
    """no messages, and messages beside an input, are refused"""
    app = classifier if path == "/classify" else embedder
    for body in ({"messages": []}, {"messages": ASK, "input": "a"}):
        assert ask(app, path, 400, **body)["param"] == "messages"


def test_class_of_a_conversation(classifier: TestClient) -> None:
    """/classify tells the classes of a conversation"""
    text = f"user: {ASK[0]['content']}\n"
    as_chat = ask(classifier, "/classify", messages=ASK)["data"]
    as_text = ask(classifier, "/classify", input=text, add_special_tokens=False)["data"]
    assert as_chat == as_text


def test_model_that_writes(asked: Asked) -> None:
    """a model that writes has no embeddings"""
    assert asked.post("/v1/embeddings", 400, input=TEXT)["message"]


def test_writing(embedder: TestClient) -> None:
    """and one that embeds writes nothing"""
    assert ask(embedder, "/v1/completions", 400, prompt=TEXT)["message"]


def test_classes(classifier: TestClient) -> None:
    """/classify tells the label, the probabilities and their number"""
    found = ask(classifier, "/classify", input=TEXTS)
    for index, each in enumerate(found["data"]):
        assert each["index"] == index and each["num_classes"] == len(each["probs"]) == 3
        assert sum(each["probs"]) == pytest.approx(1)
        assert each["label"] == f"LABEL_{int(np.argmax(each['probs']))}"


def test_class_of_ids(classifier: TestClient) -> None:
    """also of token ids"""
    assert len(ask(classifier, "/classify", input=[1, 2, 3])["data"]) == 1


def test_class_truncation(classifier: TestClient) -> None:
    """and truncates"""
    found = ask(classifier, "/classify", input=TEXT, truncate_prompt_tokens=3)
    assert found["usage"]["prompt_tokens"] == 3
    wrong = ask(classifier, "/classify", 400, input=TEXT, truncate_prompt_tokens=513)
    assert wrong["param"] == "truncate_prompt_tokens"


def test_class_activation(classifier: TestClient) -> None:
    """use_activation false gives the numbers before softmax"""
    on, off = (
        np.array(ask(classifier, "/classify", input=TEXT, use_activation=each)["data"][0]["probs"])
        for each in (True, False)
    )
    np.testing.assert_allclose(np.exp(off) / np.exp(off).sum(), on, rtol=1e-5)


@pytest.mark.parametrize("given", ["", []])
def test_class_of_nothing(classifier: TestClient, given: Any) -> None:
    """nothing is refused"""
    assert ask(classifier, "/classify", 400, input=given)["param"].startswith("input")


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"),
                                   ("data_1", "data_2"), ("queries", "items")])  # fmt: skip
def test_score_names(scorer: TestClient, names: tuple[str, str]) -> None:
    """/score takes text_1 with text_2, data_1 with data_2, queries with documents or items"""
    first, second = names
    one = score(scorer, **{first: TEXT, second: TEXTS[0]})
    several = score(scorer, **{first: TEXT, second: TEXTS})
    assert len(one) == 1 and len(several) == 3 and several[0] == pytest.approx(one[0])


def test_score_pairs(scorer: TestClient) -> None:
    """as many with as many are pairs"""
    pairs = score(scorer, text_1=TEXTS[:2], text_2=TEXTS[1:])
    alone = [score(scorer, text_1=TEXTS[i], text_2=TEXTS[i + 1])[0] for i in range(2)]
    np.testing.assert_allclose(pairs, alone, rtol=1e-6)


def test_score_of_different_numbers(scorer: TestClient) -> None:
    """two with three are refused"""
    assert ask(scorer, "/score", 400, text_1=TEXTS[:2], text_2=TEXTS)["message"]


def test_score_too_long(scorer: TestClient) -> None:
    """a pair that is longer than the model takes is refused, and a truncation to more"""
    assert ask(scorer, "/score", 400, text_1=TEXT * 20, text_2=TEXTS)["message"]
    more = {"text_1": TEXT * 20, "text_2": TEXTS, "truncate_prompt_tokens": 101}
    assert ask(scorer, "/score", 400, **more)["param"] == "truncate_prompt_tokens"


def test_score_by_embeddings(embedder: TestClient) -> None:
    """of a model that embeds a score is the cosine"""
    [found] = score(embedder, text_1=TEXTS[0], text_2=TEXTS[1])
    one, two = vectors(ask(embedder, input=TEXTS[:2]))
    assert found == pytest.approx(float(one @ two))


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(scorer: TestClient, path: str) -> None:
    """/rerank puts documents in the order of their scores"""
    found = ask(scorer, path, query=TEXT, documents=TEXTS)
    scores = [each["relevance_score"] for each in found["results"]]
    assert scores == sorted(scores, reverse=True) and found["usage"]["prompt_tokens"] > 0
    of_each = score(scorer, text_1=TEXT, text_2=TEXTS)
    for each in found["results"]:
        assert each["relevance_score"] == pytest.approx(of_each[each["index"]])
        assert each["document"]["text"] == TEXTS[each["index"]]


def test_rerank_top_n(scorer: TestClient) -> None:
    """top_n shows the best"""
    found = ask(scorer, "/rerank", query=TEXT, documents=TEXTS)["results"]
    assert ask(scorer, "/rerank", query=TEXT, documents=TEXTS, top_n=2)["results"] == found[:2]


def test_rerank_too_long(scorer: TestClient) -> None:
    """a query that is longer than the model takes is refused"""
    assert "64" in ask(scorer, "/rerank", 400, query=TEXT * 20, documents=TEXTS)["message"]


def test_rerank_activation(scorer: TestClient) -> None:
    """use_activation false gives the numbers before sigmoid"""
    given = {"query": TEXT, "documents": TEXTS}
    default, on, off = (
        np.array([each["relevance_score"] for each in found["results"]])
        for found in (
            ask(scorer, "/rerank", use_activation=how, **given) for how in (None, True, False)
        )
    )
    np.testing.assert_array_equal(default, on)
    np.testing.assert_allclose(1 / (1 + np.exp(-off)), on, rtol=1e-5)


@pytest.mark.parametrize("model", ["scorer", "embedder"])
def test_rerank_max_tokens_per_doc(model: str, request: pytest.FixtureRequest) -> None:
    """max_tokens_per_doc cuts each document, so that a longer one is as its beginning"""
    app = request.getfixturevalue(model)
    ids = ask(app, "/tokenize", prompt=TEXT, add_special_tokens=False)["tokens"]
    head = ask(app, "/detokenize", tokens=ids[:5])["prompt"]
    given = {"query": "a", "documents": [TEXT * 9], "max_tokens_per_doc": 5}
    cut, short = ask(app, "/rerank", **given), ask(app, "/rerank", query="a", documents=[head])
    assert cut["usage"] == short["usage"]
    assert cut["results"][0]["relevance_score"] == pytest.approx(
        short["results"][0]["relevance_score"]
    )
