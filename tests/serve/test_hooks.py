"""Hooks in order: their inputs, the accepted parts of their results, and clients' errors."""

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quire.base.errors import ConfigError, HookFailed, RequestError
from quire.base.requests.hooks import EndRequest, HookCall, HookContext, HookPiece, HookRequest
from quire.serve.hooks.hooks import Hooks, RequestHooks

REQUEST = HookRequest(HookContext("", "", ""), prompt="hello")


class Adding:
    """Adds its word to each text, and counts its calls in the request's state."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.counts: list[int] = []

    def _count(self, context: HookContext) -> None:
        context.state["count"] = context.state.get("count", 0) + 1
        self.counts.append(context.state["count"])

    def before_admission(self, request: HookRequest) -> HookRequest:
        self._count(request.context)
        return replace(request, prompt=f"{request.prompt} {self.word}")

    async def on_output(self, piece: HookPiece) -> HookPiece:
        self._count(piece.context)
        return replace(piece, text=f"{piece.text} {self.word}")

    def on_tool_call(self, call: HookCall) -> HookCall:
        self._count(call.context)
        return replace(call, name=f"{call.name} {self.word}", arguments=call.arguments + "!")


class Raising:
    def __init__(self, what: Callable[[], Any]) -> None:
        self.what = what

    def on_output(self, piece: HookPiece) -> Any:
        return self.what()


def opened(*hooks: Any, timeout_s: float = 30.0) -> RequestHooks:
    return Hooks(hooks, timeout_s).open("id-1", "key 2", "demo")


def piece_of(hooks: RequestHooks) -> str:
    return asyncio.run(hooks.on_output(0, "content", "text", False))


def failure_of(hooks: RequestHooks) -> HookFailed:
    with pytest.raises(HookFailed) as failed:
        piece_of(hooks)
    return failed.value


def raises(error: BaseException) -> Any:
    raise error


def test_each_hook_gets_the_result_of_the_previous_one() -> None:
    async def main() -> None:
        hooks = opened(Adding("a"), Adding("b"))
        assert (await hooks.before_admission(REQUEST)).prompt == "hello a b"
        assert await hooks.on_output(1, "reasoning", "x", True) == "x a b"
        assert await hooks.on_tool_call(1, "call", "f", "{}") == ("f a b", "{}!!")

    asyncio.run(main())


def test_state_belongs_to_one_hook_and_one_request() -> None:
    first, second = Adding("a"), Adding("b")
    hooks = Hooks([first, second])
    one, other = (hooks.open(name, "", "m") for name in "xy")

    async def main() -> None:
        for request in (one, other, one):
            await request.on_output(0, "content", "t", False)

    asyncio.run(main())
    assert first.counts == second.counts == [1, 1, 2]


def test_hooks_get_immutable_requests_pieces_and_calls() -> None:
    seen: list[Any] = []

    class Looking:
        before_admission = on_output = on_tool_call = staticmethod(seen.append)

    async def main() -> None:
        hooks = opened(Looking())
        assert await hooks.before_admission(REQUEST) == replace(REQUEST, context=seen[0].context)
        assert await hooks.on_output(3, "reasoning", "t", True) == "t"
        assert await hooks.on_tool_call(2, "id", "f", "{") == ("f", "{")

    asyncio.run(main())
    context = HookContext("id-1", "key 2", "demo")
    assert seen == [
        replace(REQUEST, context=context),
        HookPiece(context, 3, "reasoning", "t", True),
        HookCall(context, 2, "id", "f", "{"),
    ]
    with pytest.raises(dataclasses.FrozenInstanceError):
        seen[1].text = "x"


def test_texts_include_all_that_may_reach_the_model() -> None:
    messages = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": [{"type": "text", "text": "two"}]},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": '{"a": "three"}'}}]},
    ]
    template = {"tools": [{"function": {"parameters": {"four": {"enum": ["five", 6]}}}}]}
    request = HookRequest(HookContext("", "", ""), messages, template=template)
    found = [text for text in request.texts if text in {"one", "two", "four", "five"}]
    assert found == ["one", "two", "four", "five"]
    assert '{"a": "three"}' in request.texts
    assert REQUEST.texts == ["hello"]


def test_only_the_text_of_a_changed_piece_is_used() -> None:
    def change(piece: HookPiece) -> HookPiece:
        return replace(piece, text="new", choice=7, is_last=True)

    class Changing:
        on_output = staticmethod(change)

    seen: list[HookPiece] = []

    class Looking:
        on_output = staticmethod(seen.append)

    assert piece_of(opened(Changing(), Looking())) == "new"
    assert (seen[0].choice, seen[0].is_last) == (0, False)


def test_hook_ends_the_request() -> None:
    ending, after = Raising(lambda: raises(EndRequest("not \ud800 here"))), Adding("b")
    with pytest.raises(EndRequest) as ended:
        piece_of(opened(Adding("a"), ending, after))
    assert ended.value.reason == "not ? here"
    assert after.counts == []


def test_end_before_admission_is_a_request_error() -> None:
    class Ending:
        async def before_admission(self, request: HookRequest) -> None:
            raise EndRequest(f"no {request.prompt}s")

    with pytest.raises(RequestError, match="^no hellos$") as refused:
        asyncio.run(opened(Ending()).before_admission(REQUEST))
    assert refused.value.code == "content_filter"


@pytest.mark.parametrize(
    ("what", "logged"),
    [
        (lambda: raises(ValueError("a secret path")), "a secret path"),
        (lambda: raises(SystemExit(3)), "SystemExit: 3"),
        (lambda: raises(asyncio.CancelledError()), "CancelledError"),
        (lambda: "a text", "must return None or a HookPiece, got a str"),
        (
            lambda: HookPiece(REQUEST.context, 0, "content", None, True),
            "must be a text, got a None",
        ),
        (lambda: HookPiece(REQUEST.context, 0, "content", "\ud800", True), "UnicodeEncodeError"),
    ],
)
def test_hook_faults_are_logged_and_hidden_from_clients(
    what: Callable[[], Any], logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    after = Adding("b")
    with caplog.at_level(logging.ERROR):
        failed = failure_of(opened(Raising(what), after))
    assert failed.code == "hook_failed"
    assert str(failed) == (
        "a hook of this server failed on this request; its log says why, under id-1."
    )
    assert "Raising.on_output on request id-1" in caplog.text and logged in caplog.text
    assert after.counts == []


def test_hanging_hook_times_out(caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Event()
    failed = failure_of(opened(Raising(go.wait), timeout_s=0.05))
    go.set()
    assert failed.code == "hook_timed_out" and "longer than 0.05 s" in str(failed)
    assert "Raising.on_output on request id-1 took longer" in caplog.text


@pytest.mark.parametrize(
    "changes", [{"messages": []}, {"messages": "x"}, {"messages": [3]}],
)  # fmt: skip
def test_hook_must_return_valid_messages(changes: dict[str, Any]) -> None:
    class Changing:
        def before_admission(self, request: HookRequest) -> HookRequest:
            return replace(request, **changes)

    original = replace(REQUEST, prompt=None, messages=[{"role": "user", "content": "x"}])
    with pytest.raises(HookFailed):
        asyncio.run(opened(Changing()).before_admission(original))


def test_changed_prompt_drops_its_token_ids() -> None:
    original = replace(REQUEST, prompt_token_ids=[1, 2])

    async def main(**changes: Any) -> HookRequest:
        class Changing:
            def before_admission(self, request: HookRequest) -> HookRequest:
                return replace(request, **changes)

        return await opened(Changing()).before_admission(original)

    assert asyncio.run(main()).prompt_token_ids == [1, 2]
    assert asyncio.run(main(prompt="new")).prompt_token_ids is None
    with pytest.raises(HookFailed):
        asyncio.run(main(prompt_token_ids=[3]))


@pytest.mark.parametrize("what", [object(), Adding, 5])
def test_object_without_hook_methods_is_rejected(what: Any) -> None:
    with pytest.raises(ConfigError, match="is not a hook: it must be an object with one of the"):
        Hooks([what])


def test_unknown_hook_name_is_rejected() -> None:
    with pytest.raises(ConfigError, match="there is no hook 'unheard'"):
        Hooks(["unheard"])
