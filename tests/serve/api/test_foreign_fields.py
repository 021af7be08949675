"""Other engines' fields: a field that changes the text is accepted or refused, never ignored
(`serve/bodies/foreign_fields.py`)."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from quire import SamplingParams
from quire.base.errors import RequestError
from quire.serve.anthropic.protocol import MessagesRequest
from quire.serve.bodies.foreign_fields import FOREIGN, HARMLESS, check_foreign
from quire.serve.bodies.open_body import IGNORED_HEADER, OpenBody
from quire.serve.bodies.protocol import ChatCompletionRequest, CompletionRequest
from quire.serve.errors import ApiError
from quire.serve.responses.body import ResponsesRequest

MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, tuple[type[OpenBody], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "Hi", "max_tokens": 4}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": MESSAGES, "max_tokens": 4}),
    "/v1/responses": (ResponsesRequest, {"input": "Hi", "max_output_tokens": 4}),
    "/v1/messages": (MessagesRequest, {"messages": MESSAGES, "max_tokens": 4}),
}
HARMLESS_FIELDS = {name: 3 for names in HARMLESS for name in names.split()}
UNUSUAL = {"b": 1}  # neutral for no field


def foreign_to(kind: type[OpenBody]) -> list[str]:
    return [name for name in FOREIGN if name not in kind.model_fields]


@pytest.mark.parametrize("path", BODIES)
def test_fields_that_would_change_the_text_are_refused(api: TestClient, path: str) -> None:
    kind, body = BODIES[path]
    names = foreign_to(kind)
    assert len(names) > 40
    for name in names:
        refused = api.post(path, json=body | {name: UNUSUAL})
        assert refused.status_code == 400, (name, refused.text)
        # /v1/messages names its own field for output formats.
        begins = (f"{name}=", "output_config.format=")
        assert refused.json()["error"]["message"].startswith(begins), refused.text


@pytest.mark.parametrize("path", BODIES)
def test_neutral_values_and_harmless_fields_are_accepted(api: TestClient, path: str) -> None:
    kind, body = BODIES[path]
    neutral = {name: (FOREIGN[name].values or (None,))[-1] for name in foreign_to(kind)}
    answer = api.post(path, json=body | neutral | HARMLESS_FIELDS)
    assert answer.status_code == 200, answer.text
    assert "mirostat" in answer.headers[IGNORED_HEADER]


def test_neutral_values_distinguish_booleans_from_numbers() -> None:
    check_foreign({"mirostat": 0}, ("mirostat",))
    for name, value in (("mirostat", True), ("do_sample", 1), ("typical_p", 0.9)):
        with pytest.raises(ApiError, match=f"^{name}="):
            check_foreign({name: value}, (name,))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "field",
    [
        {"grammar": 'root ::= "yes" | "no"'},
        {"ebnf": 'root ::= "yes" | "no"'},
        {"regex": "yes|no"},
        {"json_schema": {"enum": ["yes", "no"]}},
    ],
    ids=lambda field: next(iter(field)),
)
def test_constraints_in_other_engines_fields_hold(
    api: TestClient, path: str, field: dict[str, Any]
) -> None:
    answer = api.post(path, json=BODIES[path][1] | {"max_tokens": 8} | field)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert text.strip('"') in ("yes", "no")


def test_two_constraints_exclude_each_other(api: TestClient) -> None:
    body = {"prompt": "Hi", "grammar": 'root ::= "a"', "ebnf": 'root ::= "b"'}
    refused = api.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert "grammar and ebnf exclude each other" in refused.text
    body = {"prompt": "Hi", "guided_json": {}, "grammar": 'root ::= "a"'}
    refused = api.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert "guided_json and grammar exclude each other" in refused.text
    body = {"prompt": "Hi", "regex": "a", "response_format": {"type": "json_object"}}
    refused = api.post("/v1/completions", json=body)
    assert refused.status_code == 400 and "exclude each other" in refused.text


def test_whitespace_pattern_without_guided_json_is_refused(api: TestClient) -> None:
    for more in ({}, {"response_format": {"type": "json_object"}}):
        refused = api.post(
            "/v1/completions", json={"prompt": "Hi", "guided_whitespace_pattern": " ?"} | more
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "guided_whitespace_pattern"


def test_extra_args_of_the_python_api_reject_unknown_names() -> None:
    with pytest.raises(RequestError, match=r"extra_args\['grammar'\] is unknown"):
        SamplingParams(extra_args={"grammar": "root ::= 'a'"})
    assert SamplingParams(extra_args={"kv_transfer_params": {}}).extra_args is not None
