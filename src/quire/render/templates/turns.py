"""Append messages to a conversation whose tokens are retained: only new text is tokenized.

    retained    ... <|im_start|>assistant\n Hello! <|im_end|>      as computed and sampled
    new         \n <|im_start|>user\n And you? <|im_end|>\n <|im_start|>assistant\n

The template renders the new messages after an answer that is a random mark. The text after the mark
is new. So no turn is tokenized twice, and retained tokens stay the same even if the template would
now render earlier turns differently.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from quire.base.errors import RequestError
from quire.render.templates.conversation import check_messages

Json = Mapping[str, Any]


def after_answer(messages: Sequence[Json]) -> tuple[list[Json], str]:
    """Return a conversation in which these messages follow an answer, and that answer's text.

    Raises RequestError that names the invalid message.
    """
    check_messages(messages)
    mark = f"mark{secrets.token_hex(8)}"
    answer: dict[str, Any] = {"role": "assistant", "content": mark}
    if calls := [_call_of(each) for each in messages if each.get("role") == "tool"]:
        answer["tool_calls"] = calls  # templates expect the calls before their results
    return [{"role": "user", "content": "?"}, answer, *messages], mark


def text_after(whole: str, mark: str, end: str) -> str:
    """Return the text that a template rendered after the answer `mark`.

    end: text to drop from the start, because the retained tokens already end with it.
    Raises RequestError unless the mark occurs exactly once."""
    _, found, tail = whole.partition(mark)
    if not found or mark in tail:
        raise RequestError(
            "the chat template changes earlier answers, so messages cannot be appended to retained"
            " tokens. Send a text or token ids, or the whole conversation as a new request.",
            "messages",
        )
    return tail.removeprefix(end)


def _call_of(message: Json) -> dict[str, Any]:
    """Return a call that a tool's message may answer."""
    function = {"name": str(message.get("name") or "f"), "arguments": {}}
    return {
        "id": str(message.get("tool_call_id") or "call"),
        "type": "function",
        "function": function,
    }
