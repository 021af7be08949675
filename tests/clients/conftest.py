"""The servers for a client's cases: with the demo model, and with random weights."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.given import Served, served


@pytest.fixture(params=["demo", "random"])
def server(request: pytest.FixtureRequest) -> Served:
    return served(request.param)


@pytest.fixture
def demo() -> Served:
    """The demo model that comes with quire."""
    return served("demo")


@pytest.fixture
def thinker() -> Served:
    """The model with random weights, which reasons if `enable_thinking` is set."""
    return served("random")


@pytest.fixture
def seeing() -> Served:
    """The model with random weights that reads images."""
    return served("seeing")


@pytest.fixture
def adapted() -> Served:
    """The demo model with the adapter `poems`."""
    return served("adapted")


@pytest.fixture(scope="session")
def run() -> Iterator[Any]:
    """Run coroutines in one loop, because clients keep their connections."""
    with asyncio.Runner() as runner:
        yield runner.run
