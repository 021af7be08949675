"""What hooks see, and what they may say: safety filters and the like, which an operator chooses.

A hook is an object with any of the methods of `METHODS`, each a plain or an async one. Each may
pass what it is shown (return None), change it (return a changed one, made by
`dataclasses.replace`), or end the request (raise EndRequest). docs/extend/hooks.md has an
example.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

METHODS = ("before_admission", "on_output", "on_tool_call")
CONTENT_FILTER = "content_filter"  # finish_reason, and code of an error, of what a hook ended

Kind = Literal["content", "reasoning"]


class EndRequest(Exception):
    """Raised by a hook to end the request. reason: what its client is told."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class HookContext:
    """Whose turn it is. tenant: as the engine knows it, such as `key 2`; empty if there are none.

    state: the hook's own, for this request: no other hook sees it, and its methods are called one
    after the other.
    """

    request_id: str
    tenant: str
    model: str
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HookRequest:
    """A request before it is rendered and queued. What it is given is only to be read.

    A hook may change `messages` of a conversation, and `prompt`, a text, of others. A prompt that
    came as ids is shown as text, too, with its special tokens, if the model has a tokenizer.
    template: what a chat template gets beside the messages, such as tools and documents. params:
    what the client asks of sampling.
    """

    context: HookContext
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        """Return all texts that may reach the model, at any nesting, names of fields included."""
        found: list[str] = []
        rest: list[Any] = [self.prompt, self.messages, self.template]
        while rest:
            value = rest.pop()
            if isinstance(value, str):
                found.append(value)
            elif isinstance(value, Mapping):
                rest.extend(each for item in value.items() for each in item)
            elif isinstance(value, Sequence):
                rest.extend(value)
        return found[::-1]


@dataclass(frozen=True, slots=True)
class HookPiece:
    """A piece of an answer that its client is about to get; a hook may change `text`.

    choice: which of the answer's. is_last: nothing follows for this choice and kind, and the text
    may be empty: a hook that held text back can give it now. An answer that is not streamed is one
    piece.
    """

    context: HookContext
    choice: int
    kind: Kind
    text: str
    is_last: bool


@dataclass(frozen=True, slots=True)
class HookCall:
    """A call of a tool, whole, before its client sees any of it; a hook may change `name` and
    `arguments`. arguments: JSON as the model wrote it, which may be cut short where the answer
    was."""

    context: HookContext
    choice: int
    call_id: str
    name: str
    arguments: str
