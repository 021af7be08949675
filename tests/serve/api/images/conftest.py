"""Apps over an API that takes images."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.engine.start.build import Engine
from quire.serve.api.app import create_app
from quire.serve.api.context import ApiContext
from tests.support.serve.image_api import image_context

MakeImageContext = Callable[..., ApiContext]


@pytest.fixture(scope="session")
def images(engine: Engine) -> MakeImageContext:
    """A context of a server whose model takes images: images(limit_mm_per_prompt=...)."""

    def make(**server: Any) -> ApiContext:
        return image_context(engine, **server)

    return make


@pytest.fixture(scope="session")
def seeing(images: MakeImageContext) -> Iterator[TestClient]:
    """A client of an app that takes images. Tests leave its context as it is."""
    with TestClient(create_app(images()), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def context(seeing: TestClient) -> ApiContext:
    """The context of `seeing`."""
    found: ApiContext = seeing.app.state.context  # type: ignore[attr-defined]
    return found
