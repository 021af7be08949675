"""More messages of a conversation whose tokens are kept: only what is new becomes tokens.

    kept    ... <|im_start|>assistant\n Hello! <|im_end|>      as it was computed and sampled
    new     \n <|im_start|>user\n And you? <|im_end|>\n <|im_start|>assistant\n

What a template writes behind an answer is found by letting it write one that can be told: what
stands behind that is new. So no turn is tokenised twice, and what the model has seen does not
change, whatever the template would make of it later.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from quire.base.errors import RequestError
from quire.render.templates.conversation import check_messages

Json = Mapping[str, Any]


def behind_an_answer(messages: Sequence[Json]) -> tuple[list[Json], str]:
    """Return a conversation in which these messages follow an answer; and what that answer is.

    Raises RequestError that names the message at fault.
    """
    check_messages(messages)
    mark = f"mark{secrets.token_hex(8)}"
    answer: dict[str, Any] = {"role": "assistant", "content": mark}
    if calls := [_call_of(each) for each in messages if each.get("role") == "tool"]:
        answer["tool_calls"] = calls  # templates want to have seen them
    return [{"role": "user", "content": "?"}, answer, *messages], mark


def text_behind(whole: str, mark: str, end: str) -> str:
    """Return what a template has written behind that answer. end: with which the kept tokens end
    already, if they do. Raises RequestError where it has not written the answer as it is, once."""
    _, found, tail = whole.partition(mark)
    if not found or mark in tail:
        raise RequestError(
            "the chat template changes earlier answers, so messages cannot be appended to retained"
            " tokens. Send a text or token ids, or the whole conversation as a new request.",
            "messages",
        )
    return tail.removeprefix(end)


def _call_of(message: Json) -> dict[str, Any]:
    """Return a call to which a tool's message is the answer."""
    function = {"name": str(message.get("name") or "f"), "arguments": {}}
    return {
        "id": str(message.get("tool_call_id") or "call"),
        "type": "function",
        "function": function,
    }
