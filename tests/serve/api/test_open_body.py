"""Unknown fields of a body: ignored and named in a header, or refused in strict mode."""

from typing import Any

import pytest
from starlette.testclient import TestClient

HEADER = "X-Quire-Ignored-Fields"
COMPLETION = {"prompt": "Once", "max_tokens": 2, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0}
TOKENS = {"tokens": [10, 11]}
BODIES = [
    ("/v1/completions", COMPLETION),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 2, "temperature": 0}),
    ("/tokenize", {"prompt": "Once"}),
    ("/detokenize", TOKENS),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_unknown_fields_are_named_and_refused_only_in_strict_mode(
    api: TestClient, strict: TestClient, path: str, body: dict[str, Any]
) -> None:
    more = body | {"provider": {"order": [1]}, "länge": None}
    known, answer = api.post(path, json=body), api.post(path, json=more)
    assert answer.status_code == 200
    assert answer.headers[HEADER] == "provider, l%C3%A4nge"
    assert HEADER not in known.headers
    refused = strict.post(path, json=more)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "provider" and "no field 'provider'; remove it" in error["message"]
    assert strict.post(path, json=body).status_code == 200


def test_unknown_fields_of_a_stream_are_named_in_its_headers(api: TestClient) -> None:
    body = COMPLETION | {"stream": True, "stream_options": {"include_usage": True, "more": 1}}
    answer = api.post("/v1/completions", json=body | {"x" * 200: 1})
    assert answer.status_code == 200 and answer.headers[HEADER] == "x" * 200
    assert '"usage":{' in answer.text


LONG = [f"{i:02}" + "x" * 198 for i in range(100)]
ODD = [" a ", "b\x7f", "c,d", "\r\nSet-Cookie: e", "50%", "\x00"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (LONG, ", ".join(LONG[:5]) + ", 95 more"),
        (["\n" * 200, "\n" * 201], "%0A" * 200 + ", 1 more"),
        (ODD, "%20a%20, b%7F, c%2Cd, %0D%0ASet-Cookie:%20e, 50%25, %00"),
        (["a", ""], 'a, ""'),
    ],
)
def test_ignored_fields_header_is_short_and_escaped(
    api: TestClient, names: list[str], expected: str
) -> None:
    answer = api.post("/v1/completions", json=COMPLETION | dict.fromkeys(names, 1))
    assert answer.status_code == 200 and answer.headers[HEADER] == expected


def test_error_suggests_the_intended_field(api: TestClient) -> None:
    answer = api.post("/v1/chat/completions", json={"mesages": CHAT["messages"]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert "messages is required; add it. Is 'mesages'" in error["message"]
    assert answer.headers[HEADER] == "mesages"
    error = api.post("/v1/completions", json={"promt": "a"}).json()["error"]
    assert error["param"] == "prompt" and "Is 'promt'" in error["message"]
    error = api.post("/v1/completions", json={"other": "a"}).json()["error"]
    assert "Is " not in error["message"]


def test_native_endpoints_are_always_strict(api: TestClient) -> None:
    answer = api.post("/v1/prefixes", json={"prompt": "Once", "provider": 1})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "provider"
