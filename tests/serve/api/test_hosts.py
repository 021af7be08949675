"""Names that a server answers to: a page that rebinds its own to this machine gets nothing."""

import socket
from typing import Any

import pytest
from starlette.testclient import TestClient, WebSocketDenialResponse

from quire.base.errors import ConfigError
from quire.base.settings.config import ServerConfig
from quire.serve.app import create_app
from quire.serve.http.origins import checks_hosts
from tests.serve.api.conftest import MakeContext, serving

HERE = "http://127.0.0.1:8000"
OURS = ("127.0.0.1", "127.0.0.1:8000", "localhost", "LOCALHOST:8000", "localhost.", "[::1]:80",
        "a.localhost", "192.168.1.7:8000", "[FE80::1]", "localhost:")  # fmt: skip
OTHERS = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example",
          "[evil.example]", "", "127.0.0.1@evil.example", "0x7f.1")  # fmt: skip
# Neither an address nor a name, though each begins or ends like one
MALFORMED = ("[::1].evil.example", "[::1]evil.example:80", "localhost:80@evil.example",
             "localhost:evil.example", "127.0.0.1:80:80", "[127.0.0.1]", "127.0.0.1]", "[::1",
             "::1", "[::1%evil.example]", "localhost..", ".localhost", "a..localhost", "127.0.0.1.",
             "localhost:123456", "localhost:\u00b2")  # fmt: skip


def client_of(make_context: MakeContext, **settings: Any) -> TestClient:
    return TestClient(create_app(make_context(**settings)), base_url=HERE)


@pytest.mark.parametrize("host", OURS)
def test_addresses_and_localhost(make_context: MakeContext, host: str) -> None:
    answer = client_of(make_context).get("/v1/models", headers={"Host": host})
    assert answer.status_code == 200


@pytest.mark.parametrize("host", [*OTHERS, *MALFORMED])
def test_other_names(make_context: MakeContext, host: str) -> None:
    client = client_of(make_context)
    for path in ("/v1/models", "/", "/health"):
        answer = client.get(path, headers={"Host": host.encode("latin-1")})
        assert answer.status_code == 403 and answer.headers["x-request-id"]
        error = answer.json()["error"]
        assert error["code"] == "host_not_allowed" and "allowed_hosts" in error["message"]


def test_names_that_are_allowed(make_context: MakeContext) -> None:
    client = client_of(make_context, allowed_hosts=("Box.example",))
    for host, status in (("box.example:1", 200), ("localhost", 200), ("evil.example", 403)):
        assert client.get("/v1/models", headers={"Host": host}).status_code == status


def test_the_name_that_the_server_listens_on(make_context: MakeContext) -> None:
    client = client_of(make_context, host="Box.example.", allowed_hosts=("other.example",))
    for host, status in (("box.example:1", 200), ("box.example.", 200), ("evil.example", 403)):
        assert client.get("/v1/models", headers={"Host": host}).status_code == status


@pytest.mark.parametrize(
    ("here", "status"), [("http://127.0.1.1:8000", 403), ("http://192.168.1.7:8000", 200)]
)
def test_a_name_that_the_server_listens_on_may_mean_this_machine(
    make_context: MakeContext, here: str, status: int
) -> None:
    """As Debian's /etc/hosts has it: the address of the connection tells."""
    client = TestClient(create_app(make_context(host="box")), base_url=here)
    assert client.get("/v1/models", headers={"Host": "evil.example"}).status_code == status
    assert client.get("/v1/models", headers={"Host": "box:8000"}).status_code == 200


def test_errors_have_their_paths_form(make_context: MakeContext) -> None:
    answer = client_of(make_context).post("/v1/messages", headers={"Host": "evil.example"}, json={})
    assert answer.status_code == 403 and answer.json()["type"] == "error"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"host": "::1"}, True),
        ({"host": "localhost"}, True),
        ({"host": "Box.localhost."}, True),
        ({"host": "box"}, True),  # where it means the loopback interface
        ({"host": "box", "api_key": ("k",)}, False),
        ({"api_key": ("k",)}, False),
        ({"host": "0.0.0.0"}, False),
        ({"host": "0.0.0.0", "allowed_hosts": ("a",)}, True),
        ({"api_key": ("k",), "allowed_hosts": ("a",)}, True),
        ({"allowed_hosts": ("*",)}, False),
    ],
)
def test_when_names_are_looked_at(settings: dict[str, Any], expected: bool) -> None:
    assert checks_hosts(ServerConfig(**settings)) == expected


@pytest.mark.parametrize("wrong", ["http://a", "a:80", "", "a/b"])
def test_names_have_neither_scheme_nor_port(wrong: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        ServerConfig(allowed_hosts=(wrong,))


def test_handshakes(make_context: MakeContext) -> None:
    client = client_of(make_context)
    with (
        pytest.raises(WebSocketDenialResponse) as refused,
        client.websocket_connect("ws://127.0.0.1:8000/v1/stream", headers={"Host": "evil.example"}),
    ):
        pass
    assert refused.value.status_code == 403
    assert refused.value.json()["error"]["code"] == "host_not_allowed"


def over_a_socket(url: str, host: str | None, *more: str) -> str:
    """Return the head of the answer to a request that is written by hand. host: None sends no Host
    header, which HTTP/1.0 allows."""
    address, port = url.removeprefix("http://").split(":")
    first = ["GET /v1/models HTTP/1.0"]
    if host is not None:
        first = ["GET /v1/models HTTP/1.1", f"Host: {host}"]
    lines = [*first, "Connection: close", *more]
    with socket.create_connection((address, int(port)), timeout=30) as line:
        line.sendall("\r\n".join([*lines, "", ""]).encode())
        return line.makefile("rb").read().decode().split("\r\n")[0]


def test_through_uvicorn(make_context: MakeContext) -> None:
    """Where the address of a connection is a real one, also of a WebSocket's handshake."""
    upgrade = ("Upgrade: websocket", "Sec-WebSocket-Version: 13",
               "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")  # fmt: skip
    with serving(make_context()) as url:
        assert " 200 " in over_a_socket(url, url.removeprefix("http://"))
        assert " 200 " in over_a_socket(url, None)
        assert " 403 " in over_a_socket(url, "evil.example")
        assert " 403 " in over_a_socket(url, "[::1].evil.example")
        assert " 403 " in over_a_socket(url, "evil.example", *upgrade)
