"""A response's JSON through hooks: changed text, withheld text, and the report of the end."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quire.base.requests.hooks import EndRequest, HookCall, HookPiece
from quire.serve.hooks.hooks import Hooks
from quire.serve.pipeline.hooked_answer import HookedAnswer, Json

SECRET = "swordfish"


class Filtering:
    """A hook that ends requests at the secret, upper-cases other text, and records its input."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str, str, bool]] = []

    def on_output(self, piece: HookPiece) -> HookPiece:
        self.seen.append((piece.choice, piece.kind, piece.text, piece.is_last))
        if SECRET in piece.text:
            raise EndRequest("no fish here")
        return replace(piece, text=piece.text.upper())


class Watching(Filtering):
    def on_output(self, piece: HookPiece) -> None:  # type: ignore[override]
        super().on_output(piece)


class Calls:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str]] = []

    def on_tool_call(self, call: HookCall) -> HookCall | None:
        self.seen.append((call.call_id, call.name, call.arguments))
        if call.name == "delete":
            raise EndRequest("nothing is deleted here")
        return replace(call, arguments="{}") if call.name == "spy" else None


class Sentences:
    """A hook that withholds text until a full stop."""

    def on_output(self, piece: HookPiece) -> HookPiece:
        state = piece.context.state
        text = state.pop(piece.kind, "") + piece.text
        at = len(text) if piece.is_last else text.rfind(".") + 1
        state[piece.kind] = text[at:]
        return replace(piece, text=text[:at])


def hooked(*hooks: Any, n: int = 1) -> HookedAnswer:
    return HookedAnswer([Hooks(hooks).open("id", "", "m")], [n])


def delta(index: int = 0, finish: str | None = None, extra: Json | None = None, **it: Any) -> Json:
    choice = {"index": index, "delta": it, "logprobs": None, "finish_reason": finish}
    return {"choices": [choice | (extra or {})]}


def text(text: str, finish: str | None = None, index: int = 0, **extra: Any) -> Json:
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
    return {"choices": [choice | {"stop_reason": None} | extra]}


def call_delta(index: int, arguments: str, name: str = "", call_id: str = "") -> Json:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    begins = {"id": call_id, "type": "function"} if call_id else {}
    return {"index": index, "function": function, **begins}


def streamed(answer: HookedAnswer, *steps: Json) -> list[Json]:
    """Return the choices that are sent. Each step is passed separately."""

    async def main() -> list[Json]:
        sent: list[Json] = []
        for step in steps:
            if answer.has_ended:
                break
            sent += await answer.chunks([step])
        return [choice for chunk in sent for choice in chunk["choices"]]

    return asyncio.run(main())


# ---- texts in a stream -------------------------------------------------------------------------


def test_hooks_see_each_piece_of_content_and_reasoning() -> None:
    hook = Filtering()
    sent = streamed(
        hooked(hook),
        delta(role="assistant", content=""),
        delta(reasoning="hm", reasoning_content="hm"),
        delta(content="yes"),
        delta(finish="stop"),
    )
    assert [choice["delta"] for choice in sent] == [
        {"role": "assistant", "content": ""},
        {"reasoning": "HM", "reasoning_content": "HM"},
        {"content": "YES"},
        {},
    ]
    assert hook.seen == [
        (0, "reasoning", "hm", False),
        (0, "content", "yes", False),
        (0, "reasoning", "", True),
        (0, "content", "", True),
    ]


def test_hooks_see_pieces_of_completions() -> None:
    hook = Filtering()
    answer = hooked(hook, n=2)
    sent = streamed(answer, text("a"), text("b", index=1), text("c", "length"))
    assert [(each["index"], each["text"]) for each in sent] == [(0, "A"), (1, "B"), (0, "C")]
    assert hook.seen[-1] == (0, "content", "c", True)


def test_hook_may_withhold_text() -> None:
    parts = ["One. T", "wo", ".", " Three"]
    pieces = [delta(content=part) for part in parts] + [delta(finish="stop")]
    sent = streamed(hooked(Sentences()), *pieces)
    shown = [choice["delta"].get("content") for choice in sent]
    assert shown == ["One.", " Two.", " Three"], "empty chunks are not sent"
    assert sent[-1]["finish_reason"] == "stop"
    sent = streamed(hooked(Sentences()), text("One. T"), text("wo"), text("", "stop"))
    assert [choice["text"] for choice in sent] == ["One.", " Two"]


def test_end_request_ends_all_choices_with_its_reason() -> None:
    answer = hooked(Filtering(), n=3)
    sent = streamed(
        answer,
        delta(0, role="assistant", content=""),
        delta(0, content="fine"),
        delta(1, "stop", role="assistant", content="done"),
        delta(0, content=f"the {SECRET} is"),
        delta(0, content="never"),
    )
    end = {"logprobs": None, "finish_reason": "content_filter", "stop_reason": "no fish here"}
    assert sent[-2:] == [
        {"index": 0, "delta": {}} | end,
        {"index": 2, "delta": {"role": "assistant", "content": ""}} | end,
    ]
    assert answer.has_ended and SECRET not in json.dumps(sent) and "NEVER" not in json.dumps(sent)
    sent = streamed(hooked(Filtering()), text("a"), text(SECRET))
    assert sent[-1] == {"index": 0, "text": ""} | end


# ---- logprobs and token ids --------------------------------------------------------------------


def logprobs_of(token: str) -> Json:
    return {"content": [{"token": token}], "refusal": None}


def test_logprobs_and_ids_are_withheld_until_the_end() -> None:
    """They may come before their text, which a hook can still refuse."""
    steps = [
        delta(extra={"logprobs": logprobs_of("a"), "token_ids": [1]}),
        delta(content="ab", extra={"logprobs": logprobs_of("b"), "token_ids": [2]}),
        delta(finish="stop", extra={"logprobs": logprobs_of("c"), "token_ids": [3]}),
    ]
    sent = streamed(hooked(Watching()), *steps)
    assert len(sent) == 2
    assert (sent[0]["logprobs"], list(sent[0]["token_ids"])) == (None, [])
    assert sent[1]["token_ids"] == [1, 2, 3]
    assert [each["token"] for each in sent[1]["logprobs"]["content"]] == ["a", "b", "c"]
    assert sent[1]["logprobs"]["refusal"] is None


def test_logprobs_of_completions_are_withheld_until_the_end() -> None:
    extra = [{"tokens": [token], "text_offset": [i]} for i, token in enumerate("ab")]
    steps = [text("a", logprobs=extra[0]), text("b", "stop", logprobs=extra[1])]
    sent = streamed(hooked(Watching()), *steps)
    assert sent[1]["logprobs"] == {"tokens": ["a", "b"], "text_offset": [0, 1]}


@pytest.mark.parametrize("changed_at", [0, 1, 2])
def test_logprobs_and_ids_of_a_changed_choice_are_dropped(changed_at: int) -> None:
    class Changing:
        def on_output(self, piece: HookPiece) -> HookPiece | None:
            return replace(piece, text="x") if piece.text == str(changed_at) else None

    steps = [
        delta(
            finish="stop" if i == 2 else None, content=str(i),
            extra={"logprobs": logprobs_of(str(i)), "token_ids": [i]},
        )
        for i in range(3)
    ]  # fmt: skip
    sent = streamed(hooked(Changing()), *steps)
    assert [choice["delta"]["content"] for choice in sent][changed_at] == "x"
    assert all(choice["logprobs"] is None and not choice["token_ids"] for choice in sent)


# ---- tool calls --------------------------------------------------------------------------------


def test_tool_calls_are_withheld_until_complete() -> None:
    hook = Calls()
    sent = streamed(
        hooked(hook),
        delta(role="assistant", content=""),
        delta(content="Let me see."),
        delta(tool_calls=[call_delta(0, "", "look", "call_1")], extra={"token_ids": [1]}),
        delta(tool_calls=[call_delta(0, '{"a"')]),
        delta(tool_calls=[call_delta(0, ": 1}"), call_delta(1, "{", "spy", "call_2")]),
        delta(tool_calls=[call_delta(1, '"b": 2}')]),
        delta(finish="tool_calls"),
    )
    calls = [call for choice in sent for call in choice["delta"].get("tool_calls", [])]
    assert calls == [
        {"index": 0, "id": "call_1", "type": "function",
         "function": {"name": "look", "arguments": '{"a": 1}'}},
        {"index": 1, "id": "call_2", "type": "function",
         "function": {"name": "spy", "arguments": "{}"}},
    ]  # fmt: skip
    assert hook.seen == [("call_1", "look", '{"a": 1}'), ("call_2", "spy", '{"b": 2}')]
    assert len(sent) == 4 and sent[-1]["finish_reason"] == "tool_calls"
    assert sent[1]["delta"] == {"content": "Let me see."}


def test_hook_may_end_the_request_at_a_tool_call() -> None:
    sent = streamed(
        hooked(Calls()),
        delta(role="assistant", content=""),
        delta(tool_calls=[call_delta(0, "{}", "look", "call_1")]),
        delta(tool_calls=[call_delta(1, '{"every": tr', "delete", "call_2")]),
        delta(tool_calls=[call_delta(1, "ue}")], finish="tool_calls"),
    )
    assert sent[-1]["finish_reason"] == "content_filter"
    assert sent[-1]["stop_reason"] == "nothing is deleted here"
    assert "look" in json.dumps(sent) and "every" not in json.dumps(sent)


def test_tool_calls_pass_unchanged_without_a_call_hook() -> None:
    step = delta(tool_calls=[call_delta(0, '{"a"', "look", "call_1")])
    expected = json.dumps(step["choices"][0])
    assert json.dumps(streamed(hooked(Filtering()), step)[0]) == expected


# ---- whole responses ---------------------------------------------------------------------------


def message(index: int, finish: str = "stop", **fields: Any) -> Json:
    it = {"role": "assistant", "refusal": None} | fields
    return {"index": index, "message": it, "logprobs": None, "finish_reason": finish}


def whole(answer: HookedAnswer, *choices: Json) -> list[Json]:
    async def main() -> list[Json]:
        return [await answer.whole(choice) for choice in choices]

    return asyncio.run(main())


def test_hooks_change_whole_messages() -> None:
    hook = Filtering()
    call = {"id": "c", "type": "function", "function": {"name": "spy", "arguments": '{"a": 1}'}}
    sent = whole(
        hooked(hook, Calls(), n=2),
        message(0, content="yes", reasoning="hm", reasoning_content="hm") | {"token_ids": [1]},
        message(1, "tool_calls", content=None, tool_calls=[call]) | {"logprobs": logprobs_of("x")},
    )
    assert sent[0]["message"]["content"] == "YES" and not sent[0]["token_ids"]
    assert sent[0]["message"]["reasoning"] == sent[0]["message"]["reasoning_content"] == "HM"
    assert sent[1]["message"]["tool_calls"][0]["function"] == {"name": "spy", "arguments": "{}"}
    assert sent[1]["message"]["content"] is None and sent[1]["logprobs"] is None
    assert hook.seen == [(0, "reasoning", "hm", True), (0, "content", "yes", True),
                         (1, "content", "", True)]  # fmt: skip


def test_unchanged_message_keeps_its_logprobs_and_ids() -> None:
    given = message(0, content="yes") | {"token_ids": [1], "logprobs": logprobs_of("yes")}
    expected = json.dumps(given)
    assert json.dumps(whole(hooked(Watching()), given)[0]) == expected


@pytest.mark.parametrize(
    "make", [lambda i, s: message(i, content=s), lambda i, s: text(s, "stop", i)["choices"][0]]
)
def test_end_request_ends_the_remaining_whole_choices(make: Callable[[int, str], Json]) -> None:
    choices = [make(0, "fine"), make(1, f"a {SECRET}") | {"logprobs": logprobs_of(SECRET)},
               make(2, "good")]  # fmt: skip
    sent = whole(hooked(Filtering(), n=3), *choices)
    assert [choice["finish_reason"] for choice in sent] == ["stop"] + ["content_filter"] * 2
    assert [choice["stop_reason"] for choice in sent[1:]] == ["no fish here"] * 2
    assert "FINE" in json.dumps(sent[0])
    assert SECRET not in json.dumps(sent).lower() and "good" not in json.dumps(sent).lower()
