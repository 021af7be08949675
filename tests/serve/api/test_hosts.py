"""Host names that a server accepts, to protect against DNS rebinding."""

import socket
from typing import Any

import pytest
from starlette.testclient import TestClient, WebSocketDenialResponse

from quire.base.errors import ConfigError
from quire.base.settings.config import ServerConfig
from quire.serve.app import create_app
from quire.serve.http.origins import checks_hosts
from tests.serve.api.conftest import MakeContext, serving

BASE_URL = "http://127.0.0.1:8000"
ACCEPTED = ("127.0.0.1", "127.0.0.1:8000", "localhost", "LOCALHOST:8000", "localhost.", "[::1]:80",
            "a.localhost", "192.168.1.7:8000", "[FE80::1]", "localhost:")  # fmt: skip
REFUSED = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example",
           "[evil.example]", "", "127.0.0.1@evil.example", "0x7f.1")  # fmt: skip
# Neither an address nor a name, although each begins or ends like one
MALFORMED = ("[::1].evil.example", "[::1]evil.example:80", "localhost:80@evil.example",
             "localhost:evil.example", "127.0.0.1:80:80", "[127.0.0.1]", "127.0.0.1]", "[::1",
             "::1", "[::1%evil.example]", "localhost..", ".localhost", "a..localhost", "127.0.0.1.",
             "localhost:123456", "localhost:\u00b2")  # fmt: skip


def client_of(make_context: MakeContext, **settings: Any) -> TestClient:
    return TestClient(create_app(make_context(**settings)), base_url=BASE_URL)


@pytest.mark.parametrize("host", ACCEPTED)
def test_addresses_and_localhost_are_accepted(make_context: MakeContext, host: str) -> None:
    answer = client_of(make_context).get("/v1/models", headers={"Host": host})
    assert answer.status_code == 200


@pytest.mark.parametrize("host", [*REFUSED, *MALFORMED])
def test_other_hosts_are_refused(make_context: MakeContext, host: str) -> None:
    client = client_of(make_context)
    for path in ("/v1/models", "/", "/health"):
        answer = client.get(path, headers={"Host": host.encode("latin-1")})
        assert answer.status_code == 403 and answer.headers["x-request-id"]
        error = answer.json()["error"]
        assert error["code"] == "host_not_allowed" and "allowed_hosts" in error["message"]


def test_allowed_hosts_are_accepted(make_context: MakeContext) -> None:
    client = client_of(make_context, allowed_hosts=("Box.example",))
    for host, status in (("box.example:1", 200), ("localhost", 200), ("evil.example", 403)):
        assert client.get("/v1/models", headers={"Host": host}).status_code == status


def test_name_of_the_listening_host_is_accepted(make_context: MakeContext) -> None:
    client = client_of(make_context, host="Box.example.", allowed_hosts=("other.example",))
    for host, status in (("box.example:1", 200), ("box.example.", 200), ("evil.example", 403)):
        assert client.get("/v1/models", headers={"Host": host}).status_code == status


@pytest.mark.parametrize(
    ("own_url", "status"), [("http://127.0.1.1:8000", 403), ("http://192.168.1.7:8000", 200)]
)
def test_hosts_are_checked_if_the_listening_name_is_loopback(
    make_context: MakeContext, own_url: str, status: int
) -> None:
    """Debian maps the machine's name to 127.0.1.1, so the connection's address decides."""
    client = TestClient(create_app(make_context(host="box")), base_url=own_url)
    assert client.get("/v1/models", headers={"Host": "evil.example"}).status_code == status
    assert client.get("/v1/models", headers={"Host": "box:8000"}).status_code == 200


def test_refusal_has_the_error_format_of_the_endpoint(make_context: MakeContext) -> None:
    answer = client_of(make_context).post("/v1/messages", headers={"Host": "evil.example"}, json={})
    assert answer.status_code == 403 and answer.json()["type"] == "error"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"host": "::1"}, True),
        ({"host": "localhost"}, True),
        ({"host": "Box.localhost."}, True),
        ({"host": "box"}, True),  # if it resolves to the loopback interface
        ({"host": "box", "api_key": ("k",)}, False),
        ({"api_key": ("k",)}, False),
        ({"host": "0.0.0.0"}, False),
        ({"host": "0.0.0.0", "allowed_hosts": ("a",)}, True),
        ({"api_key": ("k",), "allowed_hosts": ("a",)}, True),
        ({"allowed_hosts": ("*",)}, False),
    ],
)
def test_settings_decide_whether_hosts_are_checked(
    settings: dict[str, Any], expected: bool
) -> None:
    assert checks_hosts(ServerConfig(**settings)) == expected


@pytest.mark.parametrize("wrong", ["http://a", "a:80", "", "a/b"])
def test_allowed_hosts_have_neither_scheme_nor_port(wrong: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        ServerConfig(allowed_hosts=(wrong,))


def test_websocket_handshakes_check_the_host(make_context: MakeContext) -> None:
    client = client_of(make_context)
    with (
        pytest.raises(WebSocketDenialResponse) as refused,
        client.websocket_connect("ws://127.0.0.1:8000/v1/stream", headers={"Host": "evil.example"}),
    ):
        pass
    assert refused.value.status_code == 403
    assert refused.value.json()["error"]["code"] == "host_not_allowed"


def over_a_socket(url: str, host: str | None, *more: str) -> str:
    """Send a request that is written by hand, and return the status line. host: None sends no Host
    header, which HTTP/1.0 allows."""
    address, port = url.removeprefix("http://").split(":")
    first = ["GET /v1/models HTTP/1.0"]
    if host is not None:
        first = ["GET /v1/models HTTP/1.1", f"Host: {host}"]
    lines = [*first, "Connection: close", *more]
    with socket.create_connection((address, int(port)), timeout=30) as line:
        line.sendall("\r\n".join([*lines, "", ""]).encode())
        return line.makefile("rb").read().decode().split("\r\n")[0]


def test_hosts_are_checked_on_real_connections(make_context: MakeContext) -> None:
    """Over real sockets, including the handshake of a WebSocket."""
    upgrade = ("Upgrade: websocket", "Sec-WebSocket-Version: 13",
               "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")  # fmt: skip
    with serving(make_context()) as url:
        assert " 200 " in over_a_socket(url, url.removeprefix("http://"))
        assert " 200 " in over_a_socket(url, None)
        assert " 403 " in over_a_socket(url, "evil.example")
        assert " 403 " in over_a_socket(url, "[::1].evil.example")
        assert " 403 " in over_a_socket(url, "evil.example", *upgrade)
