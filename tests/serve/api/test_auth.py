"""API keys: access depends on the matched route, not on how the request spells it."""

import http.client
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.base.errors import ConfigError
from quire.base.settings.config import ServerConfig
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from quire.serve.http.auth import has_key
from tests.serve.api.conftest import MakeContext, serving

KEYS = ("first-key", "second-key")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"role": "user", "content": "Hi"}
PUBLIC = {
    ("GET", "/health"), ("GET", "/health/"), ("GET", "/ready"), ("GET", "/ping"), ("POST", "/ping"),
}  # fmt: skip


@pytest.fixture(scope="module")
def locked_context(make_context: MakeContext) -> ApiContext:
    return make_context(api_key=KEYS)


@pytest.fixture(scope="module")
def locked(locked_context: ApiContext) -> Iterator[TestClient]:
    with TestClient(create_app(locked_context), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def locked_address(locked_context: ApiContext) -> Iterator[str]:
    """host:port of a real server, for requests that client libraries cannot send."""
    with serving(locked_context) as url:
        yield url.removeprefix("http://")


def ask(api: TestClient, path: str, priority: int | None, key: str = "") -> Any:
    body: dict[str, Any] = {"max_tokens": 1}
    body |= {"prompt": [5]} if path == COMPLETIONS else {"messages": [HELLO]}
    body |= {} if priority is None else {"priority": priority}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return api.post(path, json=body, headers=headers)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_only_urgent_keys_may_set_a_negative_priority(make_context: MakeContext, path: str) -> None:
    context = make_context(api_key=KEYS, urgent_api_key=KEYS[1:])
    with TestClient(create_app(context)) as api:
        for key, priority, status in (
            (KEYS[0], -1, 403),
            (KEYS[0], 0, 200),
            (KEYS[0], None, 200),
            (KEYS[0], 5, 200),
            (KEYS[1], -5, 200),
            (KEYS[1], 0, 200),
        ):
            answer = ask(api, path, priority, key)
            assert answer.status_code == status, answer.text
            if status == 200:
                assert context.client.requests[-1].priority == (priority or 0)
                continue
            error = answer.json()["error"]
            assert (error["type"], error["param"]) == ("permission_error", "priority")
            assert error["code"] == "priority_not_allowed"
            assert "got -1" in error["message"] and "urgent_api_key" in error["message"]
            assert not context.client.requests


def test_no_key_is_urgent_by_default(locked: TestClient) -> None:
    assert ask(locked, COMPLETIONS, -1, KEYS[0]).status_code == 403


def test_negative_priority_is_allowed_without_keys(api: TestClient) -> None:
    assert ask(api, COMPLETIONS, -1).status_code == 200


def test_urgent_key_must_be_an_api_key_and_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="has 1 of 2 keys that are not in api_key") as refused:
        ServerConfig(api_key=("one",), urgent_api_key=("one", "s3cret"))
    assert "s3cret" not in str(refused.value)
    with pytest.raises(ConfigError, match="pin_share must be in"):
        ServerConfig(pin_share=0.0)


def test_server_without_keys_is_open(api: TestClient) -> None:
    assert api.get("/v1/models").status_code == 200


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_each_key_is_accepted(locked: TestClient, scheme: str, key: str) -> None:
    headers = {"Authorization": f"{scheme} {key}"}
    assert locked.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Bearer first-key2",
        "Bearer first-ke",
        "Bearer FIRST-KEY",
        "Bearer first-key,second-key",
        "Bearer first-key second-key",
        "first-key",
        "Basic first-key",
        "Bearer \u00ff".encode("latin-1"),
    ],
)
def test_other_authorization_headers_give_401(
    locked: TestClient, value: str | bytes | None
) -> None:
    response = locked.get("/v1/models", headers={} if value is None else {"Authorization": value})
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert error["type"] == "authentication_error"
    assert error["code"] == "invalid_api_key"
    assert "Authorization: Bearer" in error["message"]
    assert "first" not in error["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("x-api-key", "second-key")], 200),
        ([("x-api-key", "third-key")], 401),
        ([("x-api-key", "Bearer first-key")], 401),
        ([("x-api-key", "")], 401),
        ([("x-api-key", "first-key"), ("x-api-key", "second-key")], 401),
        # Authorization takes precedence over x-api-key.
        ([("x-api-key", "third-key"), ("Authorization", "Bearer first-key")], 200),
        ([("x-api-key", "first-key"), ("Authorization", "Bearer third-key")], 401),
        ([("x-api-key", "first-key"), ("Authorization", "Basic first-key")], 401),
    ],
)
def test_x_api_key_counts_only_without_authorization(
    locked: TestClient, headers: list[tuple[str, str]], status: int
) -> None:
    assert locked.get("/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize("query", ["?api_key=first-key", "?key=first-key"])
def test_keys_in_queries_cookies_and_other_headers_are_ignored(
    locked: TestClient, query: str
) -> None:
    headers = {"Api-Key": "first-key", "Cookie": "api_key=first-key"}
    assert locked.get(f"/v1/models{query}", headers=headers).status_code == 401


def test_every_route_except_public_ones_needs_a_key(locked: TestClient) -> None:
    """The routes come from the schema, so that new ones are included."""
    schema = locked.get("/openapi.json", headers={"Authorization": "Bearer first-key"}).json()
    routes = {
        (method.upper(), path.replace("{name}", "demo"))
        for path, methods in schema["paths"].items()
        for method in methods
    } | {("GET", "/openapi.json")}
    assert routes > PUBLIC
    for method, path in routes:
        response = locked.request(method, path)
        expected = 200 if (method, path) in PUBLIC else 401
        assert response.status_code == expected, (method, path)


def test_body_is_not_parsed_without_a_key(locked: TestClient) -> None:
    """Invalid bodies give 401, not 400."""
    for body in (b"{", b"[" * 100_000, b'{"promt": 1}'):
        headers = {"Content-Type": "application/json"}
        assert locked.post("/tokenize", content=body, headers=headers).status_code == 401


@pytest.mark.parametrize(
    "target",
    [
        "//v1/models",
        "/v1//models",
        "/health/../v1/models",
        "/v1/../v1/models",
        "/health/..%2fv1/models",
        "/%76%31/models",
        "/v1%2fmodels",
        "/V1/MODELS",
        "/v1/models/",
        "/v1/models?x=/health",
        "/v1/models#/health",
        "/v1/models;/health",
        "/v1/models%00",
        "/metrics/../health/../metrics",
        "http://localhost/health/../v1/models",
        "http://localhost/v1/models",
    ],
)
@pytest.mark.parametrize(
    "host", ["localhost", "localhost/health?", "a/health#", "", "x@y:1/health"]
)
def test_no_spelling_of_path_or_host_bypasses_the_key(
    locked_address: str, target: str, host: str
) -> None:
    connection = http.client.HTTPConnection(locked_address, timeout=30)
    connection.putrequest("GET", target, skip_host=True)
    connection.putheader("Host", host)
    connection.endheaders()
    response = connection.getresponse()
    body = response.read()
    connection.close()
    assert response.status in (400, 401, 404)
    assert b"max_model_len" not in body and b"quire:" not in body


def test_two_authorization_headers_are_refused() -> None:
    good = (b"authorization", b"Bearer first-key")
    assert has_key({"headers": [good]}, KEYS)
    assert not has_key({"headers": [good, good]}, KEYS)
    assert not has_key({"headers": [(b"authorization", b"Bearer x"), good]}, KEYS)
