"""Hooks change and end responses in the same way as chats."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.serve.app import create_app
from quire.serve.hooks.hooks import Hooks
from tests.serve.api.conftest import MakeContext
from tests.serve.api.test_hooks import Ending, Prompts, Upper
from tests.support.serve.direct_engine import text_of
from tests.support.serve.official_types import (
    PATH,
    QUESTION,
    TOOLS,
    asked,
    error_of,
    streamed,
    text_in,
)

STORY = [{"role": "user", "content": "Tell me a story."}]
Hooked = Callable[..., TestClient]


@pytest.fixture
def hooked(make_context: MakeContext) -> Iterator[Hooked]:
    """Return a function that makes a client of a server with the given hooks."""
    made: list[tuple[TestClient, Hooks]] = []

    def make(*hooks: Any) -> TestClient:
        context = make_context()
        context.hooks = Hooks(hooks)
        client = TestClient(create_app(context), raise_server_exceptions=False)
        client.__enter__()
        made.append((client, context.hooks))
        return client

    yield make
    for client, hooks in made:
        client.__exit__(None, None, None)
        hooks.close()


def test_hooks_change_or_refuse_prompts(hooked: Hooked) -> None:
    api = hooked(Prompts())
    assert text_in(asked(api, input="Tell me a war.")) == text_of(STORY, max_tokens=24)
    assert error_of(api, input="A forbidden tale.")["code"] == "content_filter"


def test_hooks_change_output_text(hooked: Hooked) -> None:
    api = hooked(Upper())
    expected = text_of(STORY, max_tokens=24).upper()
    assert text_in(asked(api, input="Tell me a story.")) == expected
    assert text_in(streamed(api, input="Tell me a story.")[-1]["response"]) == expected


def test_hooks_end_a_response(hooked: Hooked) -> None:
    api = hooked(Ending(after=0))
    last = streamed(api, input="Tell me a story.")[-1]
    assert last["type"] == "response.incomplete"
    response = last["response"]
    assert response["incomplete_details"] == {"reason": "content_filter"}
    assert text_of(STORY, max_tokens=24).startswith(text_in(response))
    assert api.get(f"{PATH}/{response['id']}").json() == response


def test_hooks_see_whole_tool_calls(hooked: Hooked) -> None:
    seen: list[Any] = []

    class Calls:
        def on_tool_call(self, call: Any) -> None:
            seen.append((call.name, call.arguments))

    events = streamed(hooked(Calls()), input=QUESTION, tools=TOOLS, max_output_tokens=60)
    [item] = events[-1]["response"]["output"]
    assert seen == [(item["name"], item["arguments"])]
