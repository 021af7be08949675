"""HEAD is GET without its body; a 405 names the allowed methods."""

import http.client
from urllib.parse import urlsplit

import pytest
from starlette.testclient import TestClient

from tests.serve.api.conftest import MODEL

JSON_SCHEMA = "/openapi.json"


def readable(api: TestClient) -> list[str]:
    """Return all GET paths, from the server's own OpenAPI document."""
    paths = api.get(JSON_SCHEMA).json()["paths"]
    found = [path.replace("{name}", MODEL) for path in paths if "get" in paths[path]]
    assert {"/health", "/metrics", "/v1/models", "/v1/models/demo"} <= set(found)
    return [*found, JSON_SCHEMA, "/docs", "/v1/nothing"]


ENDLESS = "/v1/engine/live"


def test_head_has_the_status_and_headers_of_get(api: TestClient) -> None:
    paths = readable(api)
    paths.remove(ENDLESS)
    for path in paths:
        got, head = api.get(path), api.head(path)
        assert (head.status_code, head.content) == (got.status_code, b"")
        for name in ("content-type", "content-length"):
            assert head.headers.get(name) == got.headers.get(name)


def test_head_of_an_endless_stream_ends(server_url: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(server_url).netloc, timeout=30)
    for _ in range(2):  # on one connection
        connection.request("HEAD", ENDLESS)
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b"")
        assert response.headers["Content-Type"].startswith("text/event-stream")
    connection.close()


def test_connection_is_reusable_after_head(server_url: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(server_url).netloc, timeout=30)
    for method in ("HEAD", "GET", "HEAD"):
        connection.request(method, "/version")
        response = connection.getresponse()
        assert response.status == 200
        assert bool(response.read()) == (method == "GET")
    connection.close()


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/prefixes", "GET, HEAD, POST"),
        ("PATCH", "/v1/prefixes/prefix-1", "GET, HEAD, DELETE"),
        ("OPTIONS", "/v1/models", "GET, HEAD"),
        ("TRACE", "/ping", "GET, HEAD, POST"),
        ("GET", "/v1/completions", "POST"),
        ("HEAD", "/v1/completions", "POST"),
        ("DELETE", "/docs", "GET, HEAD"),
    ],
)
def test_wrong_method_is_a_405_with_the_allowed_methods(
    api: TestClient, method: str, path: str, allowed: str
) -> None:
    response = api.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"] == allowed
    if method != "HEAD":
        assert allowed in response.json()["error"]["message"]
