"""Requests from other sites' pages are refused on every route that changes something."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.testclient import TestClient

from quire.serve.app import create_app
from quire.serve.http.origins import SAFE_METHODS
from quire.serve.native.refused import REFUSED
from tests.serve.api.conftest import MakeContext

HERE = "http://127.0.0.1:8000"
EVIL, FRIEND = "https://evil.example", "https://app.example"
FOREIGN = (
    {"Origin": EVIL},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:9000"},
    {"Origin": "http://127.0.0.1"},
    {"Origin": "http://[broken"},
    {"Origin": EVIL, "Sec-Fetch-Site": "cross-site"},
    {"Origin": HERE, "Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "odd"},
    {"Origin": EVIL, "Sec-Fetch-Site": "none"},
)
OWN = (
    {},
    {"Origin": HERE},
    {"Origin": HERE, "Sec-Fetch-Site": "same-origin"},
    {"Origin": "https://behind.proxy", "Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "none"},
)
# Every GET route. Add one only if its handler changes nothing.
READS = {
    "/api/ps", "/api/tags", "/api/version", "/models", "/props", "/slots",
    "/", "/page/{name}", "/docs", "/openapi.json", "/health", "/ready", "/ping", "/load",
    "/version", "/metrics", "/v1/models", "/v1/models/{name:path}", "/tokenizer_info",
    "/v1/requests", "/v1/requests/{request_id}", "/v1/requests/{request_id}/tokens",
    "/v1/prefixes", "/v1/prefixes/{prefix_id}", "/v1/engine/live", "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/input_items", "/v1/files", "/v1/files/{file_id}",
    "/v1/files/{file_id}/content", "/v1/batches", "/v1/batches/{batch_id}",
    "/model_info", "/get_model_info", "/server_info", "/get_server_info", "/health_generate",
    "/api/v0/models", "/api/v0/models/{name:path}", "/is_paused", "/is_sleeping", "/lora-adapters",
    "/health/", "/get_world_size", "/get_world_size/",
    *(f"{path}{below}" for path in REFUSED for below in ("", "/{rest:path}")),
}  # fmt: skip


@pytest.fixture(scope="module")
def app(make_context: MakeContext) -> FastAPI:
    return create_app(make_context())


@pytest.fixture(scope="module")
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, base_url=HERE) as client:
        yield client


def table(routes: Iterable[Any]) -> Iterator[APIRoute]:
    """Yield every HTTP route of an app, those of included routers too."""
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        elif not isinstance(route, APIWebSocketRoute):
            yield from table(route.original_router.routes)


def changing(app: FastAPI) -> list[tuple[str, str]]:
    """Return every method and path of the app that may change something."""
    return [
        (method, re.sub(r"\{[^}]*\}", "x", route.path))
        for route in table(app.routes)
        for method in sorted(route.methods - set(SAFE_METHODS))
    ]


def test_every_changing_route_refuses_other_origins(app: FastAPI, client: TestClient) -> None:
    routes = changing(app)
    assert ("POST", "/abort_requests") in routes and len(routes) >= 20
    for method, path in (*routes, ("POST", "/nowhere"), ("PATCH", "/health"), ("TRACE", "/")):
        answer = client.request(method, path, headers={"Origin": EVIL})
        assert answer.status_code == 403, (method, path, answer.text)
        assert "allowed-origins" in answer.text and answer.headers["x-request-id"]


def test_all_get_routes_are_listed(app: FastAPI) -> None:
    reads = {route.path for route in table(app.routes) if "GET" in route.methods}
    assert reads == READS


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_other_sites_may_read_but_not_change(client: TestClient, headers: dict[str, str]) -> None:
    answer = client.post("/abort_requests", headers=headers)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "origin_not_allowed"
    assert client.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("headers", OWN, ids=str)
def test_own_page_and_other_clients_are_accepted(
    client: TestClient, headers: dict[str, str]
) -> None:
    assert client.post("/abort_requests", headers=headers).status_code == 200


def test_allowed_origins_are_accepted(make_context: MakeContext) -> None:
    with TestClient(create_app(make_context(allowed_origins=(FRIEND,))), base_url=HERE) as client:
        site = {"Sec-Fetch-Site": "cross-site"}
        friend = client.post("/abort_requests", headers={"Origin": FRIEND, **site})
        assert friend.status_code == 200
        assert friend.headers["access-control-allow-origin"] == FRIEND
        assert client.post("/abort_requests", headers={"Origin": EVIL, **site}).status_code == 403
        both = [("Origin", FRIEND), ("Origin", EVIL)]
        assert client.post("/abort_requests", headers=both).status_code == 403
        preflight = {"Origin": FRIEND, "Access-Control-Request-Method": "POST"}
        assert client.options("/abort_requests", headers=preflight).status_code == 200
    with TestClient(create_app(make_context(allowed_origins=("*",))), base_url=HERE) as client:
        assert client.post("/abort_requests", headers={"Origin": EVIL, **site}).status_code == 200


def test_origins_may_omit_default_ports(make_context: MakeContext) -> None:
    with TestClient(create_app(make_context()), base_url="http://localhost") as client:
        for origin in ("http://localhost", "http://localhost:80", "http://LOCALHOST"):
            assert client.post("/abort_requests", headers={"Origin": origin}).status_code == 200
