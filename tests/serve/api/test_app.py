"""Properties of all routes: request ids, CORS, and the modules that an API process imports."""

import subprocess
import sys

import pytest
from starlette.routing import Match
from starlette.testclient import TestClient
from starlette.types import Scope

from quire.serve.app import _routes, create_app
from tests.serve.api.conftest import MakeContext


def test_api_process_imports_no_torch_no_engine_and_builds_no_body() -> None:
    code = """
import sys
import quire.serve.server
from quire.serve.bodies.protocol import ChatCompletionRequest
parts = ("torch", "quire.scheduler", "quire.runner", "quire.ops", "quire.engine.loop")
print([name for name in parts if name in sys.modules], ChatCompletionRequest.__pydantic_complete__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"


@pytest.mark.parametrize("value", ["mine-1", "a" * 128, "~!{}"])
def test_request_id_of_the_client_is_echoed(api: TestClient, value: str) -> None:
    for path in ("/health", "/nothing", "/v1/models"):
        response = api.get(path, headers={"X-Request-Id": value})
        assert response.headers.get_list("x-request-id") == [value]


@pytest.mark.parametrize("value", ["", "a" * 129, "a b", "a\tb", b"\xff"])
def test_invalid_request_id_is_replaced(api: TestClient, value: str | bytes) -> None:
    first = api.get("/health", headers={"X-Request-Id": value}).headers["x-request-id"]
    second = api.get("/health", headers={"X-Request-Id": value}).headers["x-request-id"]
    assert first.startswith("req-") and second.startswith("req-")
    assert first != second


def test_cors_headers_are_sent_only_to_allowed_origins(
    api: TestClient, make_context: MakeContext
) -> None:
    origin = {"Origin": "https://chat.example"}
    assert "access-control-allow-origin" not in api.get("/health", headers=origin).headers
    context = make_context(allowed_origins=("https://chat.example",), api_key=("k",))
    open_to_one = TestClient(create_app(context))
    response = open_to_one.get("/v1/models", headers=origin)
    assert response.status_code == 401  # the page may read the error
    assert response.headers["access-control-allow-origin"] == "https://chat.example"
    preflight = open_to_one.options(
        "/v1/chat/completions",
        headers=origin
        | {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "Authorization",
        },
    )
    assert preflight.status_code == 200
    other = open_to_one.get("/health", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
def test_generating_routes_are_among_the_first_ten(path: str) -> None:
    scope: Scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": []}
    routes = _routes(has_page=True, has_docs=True)
    first = next(i for i, route in enumerate(routes) if route.matches(scope)[0] is Match.FULL)
    assert first < 10
