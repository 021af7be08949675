"""Odd values in every field of every body give a 4xx or a response, and leave the engine idle.

Fields are read from the schema, so that new ones are covered. Each field gets some of the values in
turn; the slow run gives it all of them.
"""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.serve.context import ApiContext

USER = {"role": "user", "content": "hi"}
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [5]},
}
ODD = [
    None, True, -1, 0.5, 10**30, -(10**30), 2**63, 1e300, float("nan"), float("inf"), "", "\x00",
    "\ud800", [], {}, [None], ["\ud800"], [-1, 10**30], [[]], [{}], {"1": 1e300}, {"type": "x"},
]  # fmt: skip


@pytest.mark.parametrize("step", [22, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", BASES)
def test_odd_values_never_cause_a_server_error(
    api: TestClient, api_context: ApiContext, path: str, step: int
) -> None:
    for number, field in enumerate(fields_of(api, path)):
        for value in ODD[number % step :: step]:
            body = json.dumps({**BASES[path], field: value})
            response = api.post(path, content=body, headers={"Content-Type": "application/json"})
            assert response.status_code < 500, (body, response.text)
            if response.status_code == 400:
                error = response.json()["error"]
                assert "Error" not in error["message"], (body, error)  # no library's exception
            if response.status_code == 200 and body.find('"stream": true') < 0:
                assert not response.json().get("error")
    assert api_context.client.num_unfinished == 0
    assert api_context.num_open == 0


def fields_of(api: TestClient, path: str) -> list[str]:
    schema = api.get("/openapi.json").json()
    content = schema["paths"][path]["post"]["requestBody"]["content"]
    name = content["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
    return list(schema["components"]["schemas"][name]["properties"])
