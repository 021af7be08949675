"""Hooks that act on a running request: pause, priority, and a second model that verifies.

Covers `serve/pipeline/hook_actions.py`.
"""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.base.errors import RequestError
from quire.base.requests.hooks import (
    EndRequest,
    HookContext,
    HookPiece,
    HookRequest,
)
from quire.scheduler.core.sequence import State
from quire.serve.context import ApiContext
from tests.serve.api.test_hooks import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    MESSAGES,
    idle,
    post,
    shown,
    stream,
    text_by_index,
    use,
)
from tests.support.code_blocks import ROOT, blocks_of
from tests.support.processes.servers import wait_until
from tests.support.serve.direct_engine import text_of

__all__ = ["idle"]
pytestmark = pytest.mark.usefixtures("idle")

PAGE = ROOT / "docs" / "extend" / "hooks.md"
PROMPT = "Once upon a time"
CASES = [(CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": PROMPT})]
FILTERED = {"finish_reason": "content_filter", "stop_reason": "not verified"}


LONG = 300  # tokens, so that generation still runs when a hook acts


def text_to(body: dict[str, Any], num_tokens: int = 24) -> str:
    """Return the text of an engine without hooks."""
    prompt = MESSAGES if "messages" in body else PROMPT
    return text_of(prompt, max_tokens=num_tokens, ignore_eos=True)


class AtPiece:
    """A hook that acts at one piece of a response."""

    def __init__(self, number: int) -> None:
        self._number = number

    async def on_output(self, piece: HookPiece) -> None:
        count = piece.context.state["count"] = piece.context.state.get("count", 0) + 1
        if count == self._number:
            await self.act(piece.context)

    async def act(self, context: HookContext) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(("path", "body"), CASES)
def test_paused_request_computes_nothing_and_resumes_unchanged(
    api: TestClient, api_context: ApiContext, path: str, body: dict[str, Any]
) -> None:
    scheduler = api_context.client.engine.client.core.scheduler
    known: list[int] = []

    class Pausing(AtPiece):
        async def act(self, context: HookContext) -> None:
            sequence = scheduler.lifecycle.sequences[context.request_id]
            context.actions.pause(300.0)
            await asyncio.to_thread(wait_until, lambda: sequence.state is State.PARKED)
            known.append(sequence.num_known_tokens)
            answer = await context.actions.ask("demo", "Meanwhile", max_tokens=4)
            assert answer and scheduler.num_running == 0
            known.append(sequence.num_known_tokens)
            context.actions.resume()

    use(api_context, Pausing(2))
    chunks, _ = stream(api, path, body | GREEDY | {"max_tokens": LONG})
    assert text_by_index(chunks) == {0: text_to(body, LONG)}
    assert len(known) == 2 and known[0] == known[1]


def test_pause_ends_after_its_time(api: TestClient, api_context: ApiContext) -> None:
    class Pausing(AtPiece):
        async def act(self, context: HookContext) -> None:
            context.actions.pause(0.05)

    use(api_context, Pausing(1))
    chunks, _ = stream(api, CHAT, {"messages": MESSAGES} | GREEDY)
    assert text_by_index(chunks) == {0: text_to({"messages": MESSAGES})}


@pytest.mark.parametrize(("path", "body"), CASES)
def test_hook_sets_the_priority_before_and_after_admission(
    api: TestClient, api_context: ApiContext, path: str, body: dict[str, Any]
) -> None:
    scheduler = api_context.client.engine.client.core.scheduler
    seen: list[int] = []

    class Urgent(AtPiece):
        def before_admission(self, request: HookRequest) -> None:
            request.context.actions.set_priority(7)

        async def act(self, context: HookContext) -> None:
            sequence = scheduler.lifecycle.sequences[context.request_id]
            seen.append(sequence.priority)
            context.actions.set_priority(-3)
            await asyncio.to_thread(wait_until, lambda: sequence.priority == -3)
            seen.append(sequence.priority)

    use(api_context, Urgent(1))
    stream(api, path, body | GREEDY | {"priority": 1})
    assert seen == [7, -3]
    assert api_context.client.requests[-1].priority == 7


def test_a_hook_sets_the_priority_of_a_prompt_in_pieces(
    api: TestClient, api_context: ApiContext
) -> None:
    class Urgent:
        def before_admission(self, request: HookRequest) -> None:
            request.context.actions.set_priority(5)

    use(api_context, Urgent())
    with api.websocket_connect("/v1/stream") as socket:
        start = {"type": "start", "prompt": PROMPT, "last": True, "max_tokens": 2, "priority": 1}
        socket.send_json(start)
        while socket.receive_json()["type"] != "done":
            pass
    assert api_context.client.requests[-1].priority == 5


class Verifier:
    """A hook that releases a response if a second request agrees."""

    def __init__(self, verdict: str, **params: Any) -> None:
        self.verdict, self.params = verdict, params
        self.replies: list[str] = []
        self.num_admitted = 0

    def before_admission(self, request: HookRequest) -> None:
        self.num_admitted += 1

    async def on_output(self, piece: HookPiece) -> HookPiece:
        state = piece.context.state
        state["text"] = state.get("text", "") + piece.text
        if not piece.is_last:
            return replace(piece, text="")
        question = [{"role": "user", "content": f"Is this fine? {state['text'][:20]}"}]
        self.replies.append(await piece.context.actions.ask("demo", question, **self.params))
        if self.verdict not in self.replies[-1]:
            raise EndRequest("not verified")
        return replace(piece, text=state["text"])


@pytest.mark.parametrize(("path", "body"), CASES)
def test_verifier_releases_or_ends_the_response(
    api: TestClient, api_context: ApiContext, path: str, body: dict[str, Any]
) -> None:
    agreeing = Verifier("", max_tokens=6, temperature=0)
    use(api_context, agreeing)
    whole = text_to(body)
    assert shown(post(api, path, body | GREEDY)["choices"][0]) == whole
    assert text_by_index(stream(api, path, body | GREEDY)[0]) == {0: whole}
    question = [{"role": "user", "content": f"Is this fine? {whole[:20]}"}]
    assert agreeing.replies == [text_of(question, max_tokens=6)] * 2
    assert agreeing.num_admitted == 2  # the verifier's own requests pass no hooks

    use(api_context, Verifier("never", max_tokens=6, temperature=0))
    chunks, sent = stream(api, path, body | GREEDY)
    assert chunks[-1]["choices"][0] | FILTERED == chunks[-1]["choices"][0]
    assert whole[:12] not in sent and text_by_index(chunks) == {0: ""}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_documented_verifier_works(api: TestClient, api_context: ApiContext, path: str) -> None:
    """Each verdict that the model may choose is followed."""
    [block] = [each for each in blocks_of(PAGE) if "class Verifier" in each.text]
    page: dict[str, Any] = {}
    exec(block.text, page)
    page["GUARD"] = "demo"
    body = dict(CASES)[path] | GREEDY
    found = set()
    for verdicts in (["safe", "unsafe"], ["unsafe"], ["safe"]):
        page["VERDICTS"] = verdicts
        use(api_context, page["Verifier"]())
        [choice] = post(api, path, body)["choices"]
        is_shown = shown(choice) == text_to(body)
        assert is_shown or (choice["finish_reason"], shown(choice)) == ("content_filter", "")
        found.add((len(verdicts) > 1 or verdicts[0], is_shown))
    assert {("unsafe", False), ("safe", True)} <= found


@pytest.mark.parametrize(
    "params",
    [
        {"model": "unknown"},
        {"temperature": 9},
        {"no_such_field": 1},
        {"max_tokens": 9999},
        {"n": 2},
        {"stream": True},
    ],
)
def test_invalid_verifier_request_fails_the_request(
    api: TestClient, api_context: ApiContext, params: dict[str, Any]
) -> None:
    failures: list[Exception] = []

    class Asking:
        async def on_output(self, piece: HookPiece) -> None:
            model = params.get("model", "demo")
            rest = {name: value for name, value in params.items() if name != "model"}
            try:
                await piece.context.actions.ask(model, PROMPT, **rest)
            except Exception as error:
                failures.append(error)
                raise

    use(api_context, Asking())
    answer = api.post(CHAT, json={"messages": MESSAGES} | GREEDY)
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "hook_failed"
    [failure] = failures
    assert isinstance(failure, RequestError)


def test_slow_verifier_times_out_and_its_request_is_aborted(
    api: TestClient, api_context: ApiContext
) -> None:
    client = api_context.client

    class Slow:
        async def on_output(self, piece: HookPiece) -> None:
            client.hold()
            await piece.context.actions.ask("demo", PROMPT, max_tokens=400, ignore_eos=True)

    use(api_context, Slow(), timeout_s=0.2)
    try:
        answer = api.post(CHAT, json={"messages": MESSAGES} | GREEDY)
    finally:
        client.release()
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "hook_timed_out"
    wait_until(lambda: client.num_unfinished == 0)
