"""Errors for clients: one shape, and never an accidental 500."""

import json
import logging
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from httpx2 import Response
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.testclient import TestClient

from quire.base.errors import ConfigError, EngineBusy, EngineDead, EngineError, RequestError
from quire.serve.bodies.validation_errors import invalid_request, shown
from quire.serve.errors import ApiError, ErrorResponse, as_api_error, error_body, own_fields

JSON = {"Content-Type": "application/json"}
DEEP = "[" * 900 + "]" * 900


def post(api: TestClient, body: str | bytes, path: str = "/tokenize") -> Response:
    return api.post(path, content=body, headers=JSON)


def error_of(response: Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ("{", None, "not valid JSON: Expecting property name"),
        ('{"prompt": "a",}', None, "at character"),
        (b'{"prompt": "\xff"}', None, "not UTF-8: byte 12"),
        ("", None, "the body is empty"),
        ("null", None, "must be a JSON object, got null"),
        ('"text"', None, 'must be a JSON object, got "text"'),
        ("[1, 2]", None, "must be a JSON object, got a list of 2"),
        ("[" * 100_000, None, "nested too deeply"),
        ('{"prompt": ' + "9" * 5000 + "}", None, "cannot be read as JSON"),
        ('{"prompt": 5}', "prompt", "prompt must be a string, got 5."),
        ('{"prompt": NaN}', "prompt", "prompt must be a string, got NaN."),
        ('{"prompt": DEEP}', "prompt", "got a list of 1"),
        ('{"prompt": "a\\ud800"}', None, "valid Unicode"),
        ("{}", "prompt", "give one of prompt (a text), messages"),
        ('{"prompt": "a", "messages": []}', "prompt", "got prompt and messages"),
        ('{"messages": []}', "messages", "messages is empty"),
        ('{"messages": "hello"}', "messages", 'must be a list, got "hello"'),
        ('{"messages": [1]}', "messages[0]", "messages[0] must be an object, got 1"),
        ('{"messages": [{"role": 5}]}', "messages[0]", "role"),
        ('{"messages": [{"role": "user", "content": DEEP}]}', "messages[0]", "nested"),
        (
            '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": DEEP}}',
            "chat_template_kwargs",
            "nested",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}], "chat_template": "/etc/passwd"}',
            "chat_template",
            "templates from requests are disabled",
        ),
        ('{"prompt": "a", "add_special_tokens": "perhaps"}', "add_special_tokens", "true or false"),
    ],
)
def test_invalid_bodies_give_400_naming_the_field(
    api: TestClient, body: str | bytes, param: str | None, message: str
) -> None:
    deep = body.replace("DEEP", DEEP) if isinstance(body, str) else body
    response = post(api, deep)
    assert response.status_code == 400
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"]
    assert len(error["message"]) < 500


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ('{"promt": "a"}', "promt", "no field 'promt'; did you mean 'prompt'?"),
        ('{"prompt": "a", "zzz": 1}', "zzz", "no field 'zzz'; remove it."),
        ('{"\\ud800": 1}', None, "valid Unicode"),
    ],
)
def test_strict_server_refuses_unknown_fields(
    strict: TestClient, body: str, param: str | None, message: str
) -> None:
    response = post(strict, body)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param and message in error["message"]


def test_many_unknown_fields_are_counted_not_described(strict: TestClient) -> None:
    """Describing a field costs a search for similar names."""
    body = json.dumps({"prompt": "a", **{f"k{i}": 1 for i in range(250)}})
    message = error_of(post(strict, body))["message"]
    assert "'k0'" in message and "242 more" in message


def test_all_wrong_fields_are_named_and_the_first_is_param(strict: TestClient) -> None:
    error = error_of(post(strict, '{"prompt": 5, "tools": {}, "model": [], "x": 1}'))
    assert error["param"] == "model"
    for part in ("model must be", "prompt must be", "tools must be", "no field 'x'"):
        assert part in error["message"]


def test_wrong_keys_and_values_of_an_object_are_distinguished(api: TestClient) -> None:
    body = '{"prompt": "a", "logit_bias": {"word": 1, "5": "x"}}'
    error = error_of(post(api, body, "/v1/completions"))
    assert error["param"] == "logit_bias.word"
    assert 'logit_bias.word must be an integer, got "word".' in error["message"]
    assert 'logit_bias[5] must be a number, got "x".' in error["message"]


def test_only_the_first_wrong_item_of_a_list_is_reported(api: TestClient) -> None:
    error = error_of(post(api, json.dumps({"tokens": ["a"] * 1000}), "/detokenize"))
    assert error["message"] == 'tokens[0] must be an integer, got "a".'


def test_other_content_types_are_refused(api: TestClient) -> None:
    response = api.post("/tokenize", data={"prompt": "a"})
    assert response.status_code == 415
    assert "Content-Type: application/json" in error_of(response)["message"]


def test_nul_characters_are_accepted_in_prompts(api: TestClient) -> None:
    tokens = post(api, '{"prompt": "a\\u0000b"}').json()["tokens"]
    assert post(api, json.dumps({"tokens": tokens}), "/detokenize").json() == {
        "prompt": "a\0b", "content": "a\0b",
    }  # fmt: skip


def test_unknown_paths_give_404_and_methods_405(api: TestClient) -> None:
    response = api.get("/v2/nothing")
    assert response.status_code == 404
    assert "/v2/nothing" in error_of(response)["message"]
    response = api.delete("/tokenize")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert "use POST" in error_of(response)["message"]


class Part(BaseModel):
    text: str


class Body(BaseModel):
    prompt: str | list[str] | list[int] | list[list[int]]
    parts: list[str | Part] = []
    count: int = Field(1, ge=1, le=9)
    share: float = Field(0.5, gt=0, allow_inf_nan=False)
    kind: str = Field("a", max_length=3)


def validation_message(body: dict[str, Any]) -> tuple[str, str | None]:
    with pytest.raises(ValidationError) as caught:
        Body.model_validate(body)
    errors = [{**item, "loc": ("body", *item["loc"])} for item in caught.value.errors()]
    error = invalid_request(RequestValidationError(errors), Request({"type": "http"}))
    return error.message, error.param


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "prompt is required; add it."),
        (
            {"prompt": {}},
            "prompt must be a string or a list of strings or a list of integers or a list of lists"
            " of integers, got an empty object.",
        ),
        ({"prompt": "a", "count": 10}, "count must be at most 9, got 10."),
        ({"prompt": "a", "count": 1.5}, "count must be an integer, got 1.5."),
        ({"prompt": "a", "share": "x" * 100}, f'share must be a number, got "{"x" * 60}...".'),
        ({"prompt": "a", "share": float("nan")}, "share must be a finite number, got NaN."),
        ({"prompt": "a", "kind": "abcd"}, 'kind must be of at most 3 characters, got "abcd".'),
        ({"prompt": "a", "parts": [{}]}, "parts[0] must be a string, got an empty object."),
    ],
)
def test_validation_messages_name_the_field_and_the_value(
    body: dict[str, Any], message: str
) -> None:
    text, param = validation_message(body)
    assert text.startswith(message)
    assert param == message.split(" ")[0]


def test_shown_values_are_shortened() -> None:
    assert shown("é" * 61) == f'"{"é" * 60}..."'
    assert shown(10**100) == "1" + "0" * 59
    assert shown({"a": "secret"}) == "an object"
    assert shown([1] * 1000) == "a list of 1000"


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (
            RequestError("temperature must be from 0 to 2, got 9.", "temperature"),
            400,
            "temperature",
        ),
        (RequestError("n=9 is more than max_num_seqs=8; ask for fewer.", "n"), 400, "n"),
        (RequestError("the prompt has 9 tokens; at most 8 are possible."), 400, None),
        (RequestError("seed must be right, which no message tells."), 400, None),
        (EngineDead("gone"), 503, None),
        (EngineError("a kernel at 0x7f00"), 500, None),
        (ConfigError("/etc/secret"), 500, None),
        (RecursionError(), 400, None),
        (ApiError(418, "tea", "teapot", "pot", "short"), 418, "pot"),
    ],
)
def test_errors_map_to_status_and_param(error: Exception, status: int, param: str | None) -> None:
    found, body = error_body(error)
    assert (found, body["error"]["param"]) == (status, param)


@pytest.mark.parametrize(
    ("error", "message", "param"),
    [
        (ApiError(400, "prompt: too long.", param="prompt"), "text: too long.", "text"),
        (RequestError("prompt_token_ids must be ids.", "prompt_token_ids"), "text must be ids.",
         "text"),
        (RequestError("prompt token id 9 is unknown.", "prompt"), "prompt token id 9 is unknown.",
         "text"),
        (RequestError("max_tokens=9: lower max_tokens.", "max_tokens"), "limit=9: lower limit.",
         "limit"),
        (RequestError("n=9 is too much.", "n"), "n=9 is too much.", "n"),
        (RequestError("min_tokens=9 must be at most max_tokens=5.", "min_tokens"),
         "min_tokens=9 must be at most limit=5.", "min_tokens"),
        (RequestError("prompt: has no room for max_tokens; shorten the prompt.", "prompt"),
         "text: has no room for limit; shorten the prompt.", "text"),
        (EngineBusy("full"), "full", None),
    ],
)  # fmt: skip
def test_errors_name_an_apis_own_fields(error: Exception, message: str, param: str | None) -> None:
    status = error_body(error)[0]
    kind = type(error) if message == str(error) and param != "text" else ApiError
    with pytest.raises(kind) as raised, own_fields({"prompt": "text", "max_tokens": "limit"}):
        raise error
    found = error_body(raised.value)
    assert found[0] == status
    assert (found[1]["error"]["message"], found[1]["error"]["param"]) == (message, param)


def test_unexpected_errors_are_logged_and_hidden_from_clients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR, "quire"):
        error = as_api_error(OSError("/home/someone/key.pem"), "req-1")
    assert error.status == 500
    assert "req-1" in error.message and "key.pem" not in error.message
    assert "key.pem" in caplog.text and "req-1" in caplog.text


def test_error_responses_encode_any_text() -> None:
    body = ErrorResponse({"error": "half a pair: \ud800, é"}).body
    assert json.loads(body) == {"error": "half a pair: \ud800, é"}
