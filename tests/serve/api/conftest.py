"""One engine with the demo model for all tests of the API: in-process clients and a real server.

Contexts in this thread share one engine, so only one of them may generate at a time.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from quire.base.settings.config import ServerConfig, config_from_flat
from quire.engine.start.build import Engine, build_engine
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from quire.serve.server import ApiServer, uvicorn_config
from tests.support.serve.fake_client import FakeClient

MODEL = "demo"
MakeContext = Callable[..., ApiContext]


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    built = small_engine()
    yield built
    built.client.close()


def small_engine(**settings: Any) -> Engine:
    return build_engine(
        config_from_flat(
            model=MODEL,
            max_num_seqs=8,
            max_model_len=512,
            max_num_batched_tokens=256,
            kv_cache_memory_bytes=16 << 20,
            disable_log_stats=True,
            **settings,
        )
    )


@pytest.fixture(scope="session")
def make_context(engine: Engine) -> MakeContext:
    """A context over the shared engine, with a client of its own: make_context(api_key=("k",))."""

    def make(**server: Any) -> ApiContext:
        names = server.get("served_model_name") or (MODEL,)
        client = FakeClient(engine)
        config = ServerConfig(**server)
        return ApiContext(client, engine.renderer, engine.requests, names, config, 1_700_000_000)

    return make


@pytest.fixture(scope="session")
def shared_app(make_context: MakeContext) -> FastAPI:
    """With its first request an app gets its routes ready, which takes longer than most tests."""
    return create_app(make_context())


@pytest.fixture
def api_context(make_context: MakeContext, shared_app: FastAPI) -> ApiContext:
    """Of the `api` fixture's app, and as new for each test, which may change it."""
    context: ApiContext = shared_app.state.context
    context.__dict__ = vars(make_context())
    return context


@pytest.fixture
def api(api_context: ApiContext, shared_app: FastAPI) -> Iterator[TestClient]:
    """An HTTP client (httpx) over an app in this process."""
    with TestClient(shared_app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def strict(make_context: MakeContext) -> Iterator[TestClient]:
    """As `api`, of a server with --strict-fields."""
    app = create_app(make_context(strict_fields=True))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="session")
def server_context(make_context: MakeContext) -> ApiContext:
    """Of the server behind `server_url`; a test that changes it must change it back.

    It has an engine of its own: its thread may still end a request when the next test begins.
    """
    context = make_context()
    context.client = FakeClient(small_engine())
    return context


@pytest.fixture(scope="session")
def server_url(server_context: ApiContext) -> Iterator[str]:
    """http://127.0.0.1:<port> of uvicorn in a thread. No key is needed."""
    with serving(server_context) as url:
        yield url


@pytest.fixture(scope="session")
def openai_client(server_url: str) -> Iterator[openai.OpenAI]:
    """The official client; it does not retry, so that an error is seen at once."""
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0) as client:
        yield client


class serving:
    """`with serving(context) as url`: uvicorn in a thread, on a free port."""

    def __init__(self, context: ApiContext, listener: socket.socket | None = None) -> None:
        # Listening before the thread starts: early connections wait, and nobody has to poll.
        self._socket = listener or socket.create_server(("127.0.0.1", 0))
        self._server = ApiServer(uvicorn_config(context, "info"))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )

    def __enter__(self) -> str:
        self._thread.start()
        port = 0 if self._socket.family == socket.AF_UNIX else self._socket.getsockname()[1]
        return f"http://127.0.0.1:{port}"

    def __exit__(self, *unused: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=30)
        self._socket.close()
