"""The base class of clients that wrap another client: `engine/client/async_client.py`."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, cast

import pytest

from quire.engine.client.async_client import AsyncClient, ForwardingClient

MEMBERS = [name for name in vars(AsyncClient) if not name.startswith("_")]
PROPERTIES = [name for name in MEMBERS if isinstance(vars(AsyncClient)[name], property)]
SILENT = ("check", "append", "steer", "close", "keep", "rewind", "reset_prefix_cache")
METHODS = [name for name in MEMBERS if inspect.isfunction(vars(AsyncClient)[name])]


class Recorder:
    """Records the arguments of its last call by name, and returns the name of the method."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        given = vars(AsyncClient)[name]
        if isinstance(given, property):
            return f"its {name}"
        return self._recording(name, given)

    def _recording(self, name: str, given: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            bound = inspect.signature(given).bind(self, *args, **more)
            self.arguments = {each: bound.arguments[each] for each in list(bound.arguments)[1:]}
            return name

        async def call_async(*args: Any, **more: Any) -> Any:
            return call(*args, **more)

        return call_async if inspect.iscoroutinefunction(given) else call


@pytest.mark.parametrize("name", METHODS)
def test_each_call_is_forwarded_with_its_arguments(name: str) -> None:
    names = list(inspect.signature(vars(AsyncClient)[name]).parameters)[1:]
    arguments = {each: f"its {each}" for each in names}
    recorder = Recorder()
    found = getattr(ForwardingClient(cast(AsyncClient, recorder)), name)(**arguments)
    if inspect.isawaitable(found):
        found = asyncio.run(_result(found))
    assert recorder.arguments == arguments
    assert found == (None if name in SILENT else name)


async def _result(found: Any) -> Any:
    return await found


@pytest.mark.parametrize("name", PROPERTIES)
def test_each_property_is_forwarded(name: str) -> None:
    assert getattr(ForwardingClient(cast(AsyncClient, Recorder())), name) == f"its {name}"


def test_the_whole_interface_is_covered() -> None:
    assert set(MEMBERS) == set(PROPERTIES) | set(METHODS) and len(METHODS) > 10
