"""The body's constraint fields become StructuredOutputsParams, which responses then match."""

import json
import os
import re
import select
import signal
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.base.requests.structured_outputs import StructuredOutputsParams
from quire.render.grammars.grammars import CHECKS, Grammars
from quire.serve.bodies.constraints import structured_outputs_of
from quire.serve.bodies.protocol import CompletionRequest
from quire.serve.context import ApiContext
from quire.serve.errors import ApiError

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}


def converted(**fields: Any) -> tuple[StructuredOutputsParams | None, bool, str]:
    return structured_outputs_of(CompletionRequest.model_validate({"prompt": "Hi", **fields}))


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"response_format": None}, {"response_format": {"type": "text"}},
        {"structured_outputs": {}}, {"structured_outputs": {"json": None}},
        {"guided_decoding_backend": "xgrammar"},
    ],
)  # fmt: skip
def test_neutral_fields_give_no_constraint(fields: dict[str, Any]) -> None:
    assert converted(**fields)[0] is None


def test_response_format_becomes_a_constraint() -> None:
    def of(**more: Any) -> Any:
        return converted(response_format={"type": "json_schema", "json_schema": more})

    same = StructuredOutputsParams(json=SCHEMA)
    assert of(name="x", schema=SCHEMA) == (same, False, "response_format")
    assert of(name="x", schema=SCHEMA, strict=True, description="d")[1] is True
    found = of(name="x", schema=SCHEMA, strict=None)[0]
    assert list(found.json["properties"]) == ["b", "a"]
    wanted, strict, field = converted(response_format={"type": "json_object"})
    assert wanted == StructuredOutputsParams(json_object=True) and not strict
    wanted, _, _ = converted(response_format=TAG)
    assert wanted is not None and json.loads(wanted.structural_tag or "") == TAG


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": "{}"}, {"json": "{}"}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        (
            {"guided_json": {}, "guided_whitespace_pattern": " ?"},
            {"json": {}, "whitespace_pattern": " ?"},
        ),
    ],
)
def test_guided_fields_become_constraints(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    found, strict, field = converted(**fields)
    assert (found, strict) == (StructuredOutputsParams(**wanted), False)
    assert field == next(iter(fields))


@pytest.mark.parametrize(
    ("fields", "words", "param"),
    [
        ({"response_format": {"type": "xml"}}, "text, json_object", "response_format"),
        ({"response_format": {"type": "json_schema"}}, ".json_schema is", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "json_schema.name", "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": 1,
                                                                        "schema": {}}}},
            "json_schema.strict", "response_format",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format and structured_outputs exclude", "structured_outputs",
        ),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "got json and regex",
         "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "got none", "structured_outputs"),
        ({"structured_outputs": {"regexp": " "}}, "regexp", "structured_outputs"),
        ({"structured_outputs": {"choice": "ab"}}, "choice must be a list", "structured_outputs"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json and guided_regex", "guided_regex"),
        ({"guided_json": {}, "structured_outputs": {"regex": "a"}}, "exclude", "guided_json"),
    ],
)  # fmt: skip
def test_errors_name_the_wrong_field(fields: dict[str, Any], words: str, param: str) -> None:
    with pytest.raises(ApiError, match=words) as raised:
        converted(**fields)
    assert (raised.value.status, raised.value.param) == (400, param)


# ---- whole requests --------------------------------------------------------------------------

NUMBER = {"type": "integer", "minimum": 10, "maximum": 99}


def post(api: TestClient, **fields: Any) -> Any:
    return api.post("/v1/completions", json={"max_tokens": 40, "temperature": 1.5, **fields})


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True,
                                                                     "schema": NUMBER}}}, r"\d\d"),
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
        ({"structured_outputs": {"structural_tag": TAG | {"format": {"type": "const_string",
                                                                     "value": "so"}}}}, "so"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "a"{2,3} "."'}, r"aaa?\."),
    ],
)  # fmt: skip
def test_every_choice_matches_the_constraint(
    api: TestClient, fields: dict[str, Any], pattern: str
) -> None:
    answer = post(api, prompt=["One", "Two"], n=2, **fields).json()
    assert len(answer["choices"]) == 4
    for choice in answer["choices"]:
        assert re.fullmatch(pattern, choice["text"])
        assert choice["finish_reason"] == "stop"


def test_streamed_text_matches_the_constraint(api: TestClient) -> None:
    lines = post(api, prompt="One", stream=True, guided_regex="[0-9]{9}").text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert re.fullmatch("[0-9]{9}", "".join(c["choices"][0]["text"] for c in chunks))


def test_unsupported_keywords_are_reported_or_refused_if_strict(api: TestClient) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 2}

    def of(strict: bool) -> Any:
        wanted = {"name": "n", "schema": schema, "strict": strict}
        return post(
            api, prompt="Hi", response_format={"type": "json_schema", "json_schema": wanted}
        )

    lenient, strict = of(False), of(True)
    assert lenient.status_code == 200
    assert "uniqueItems" in lenient.headers["x-quire-grammar-warnings"]
    assert strict.status_code == 400
    assert "uniqueItems" in strict.json()["error"]["message"]
    assert strict.json()["error"]["param"] == "response_format"
    assert "x-quire-grammar-warnings" not in post(api, prompt="Hi", guided_choice=["a"]).headers


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_overloaded_grammar_check_is_a_503_not_a_400(
    api: TestClient, api_context: ApiContext, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A stopped check process gives a 503; afterwards a wrong grammar gets its own error."""
    grammars = Grammars(replace(CHECKS, answer_s=0.05))
    monkeypatch.setattr(api_context.renderer, "grammars", grammars)
    grammars.prepare()
    [process] = grammars._jobs._idle
    select.select([process._socket], [], [])
    os.kill(process.pid, signal.SIGSTOP)
    prompt_fields = (
        {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    )
    body: dict[str, Any] = {"model": "demo", "guided_choice": ["yes", "no"], **prompt_fields}
    answer = api.post(path, json=body)
    assert answer.status_code == 503, answer.text
    assert answer.headers["retry-after"]
    assert "too little processor time" in answer.json()["error"]["message"]
    quick = Grammars(replace(CHECKS, cpu_s=0.3))
    monkeypatch.setattr(api_context.renderer, "grammars", quick)
    wrong = api.post(path, json=body | {"guided_choice": None, "guided_regex": "(a"})
    assert wrong.status_code == 400 and "unclosed group" in wrong.text
    exploding = {"type": "integer", "multipleOf": 999_983}
    heavy = api.post(path, json=body | {"guided_choice": None, "guided_json": exploding})
    assert heavy.status_code == 400 and "processor time" in heavy.text


def test_large_constraint_for_many_prompts_is_refused(api: TestClient) -> None:
    """The engine request of every prompt would hold a copy of it."""
    choice = [f"choice {i}" for i in range(10_000)]
    answer = post(api, prompt=["x"] * 20, guided_choice=choice)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "guided_choice"
    assert "for each of 20 prompts" in answer.json()["error"]["message"]
