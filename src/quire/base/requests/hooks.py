"""What hooks see and what they may do: safety filters and verifiers that an operator chooses.

A hook is an object with any of the methods of `METHODS`, each plain or async. A method passes its
argument on (return None), changes it (return a copy made by `dataclasses.replace`), or ends the
request (raise EndRequest). By `context.actions` it also acts on the request while it runs.
docs/extend/hooks.md has examples (T 5.2.3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from quire.base.errors import RequestError

METHODS = ("before_admission", "on_output", "on_tool_call")
CONTENT_FILTER = "content_filter"  # finish_reason and error code of a request that a hook ended
MAX_PAUSE_S = 600.0
MAX_PRIORITY = 2**31 - 1

Kind = Literal["content", "reasoning"]


class EndRequest(Exception):
    """Raised by a hook to end the request. reason: text for the client."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


Prompt = str | Sequence[Mapping[str, Any]]


class HookActions(Protocol):
    """What a hook may do to its request. Safe to call from any thread."""

    priority: int | None  # the last one that was set

    def set_priority(self, priority: int) -> None:
        """Change the priority; a lower number is served first. Raises ValueError beyond 32 bits."""
        ...

    def pause(self, seconds: float) -> None:
        """Stop computing the request until `resume`, or for `seconds` (at most MAX_PAUSE_S). Its KV
        blocks may be evicted meanwhile. Without effect before the request runs. Raises ValueError
        for a time out of range."""
        ...

    def resume(self) -> None:
        """Let a paused request continue."""
        ...

    async def ask(self, model: str, prompt: Prompt, **params: Any) -> str:
        """Return the response of a model of the same server to a text or a conversation.

        params: fields of /v1/completions or /v1/chat/completions. The request counts as the
        tenant's, and no hook sees it. Raises RequestError for a request that cannot be served.
        """
        ...


class NoActions:
    """The actions of a context that belongs to no request."""

    priority: int | None = None

    def set_priority(self, priority: int) -> None:
        """Do nothing."""

    def pause(self, seconds: float) -> None:
        """Do nothing."""

    def resume(self) -> None:
        """Do nothing."""

    async def ask(self, model: str, prompt: Prompt, **params: Any) -> str:
        """Raise RequestError."""
        raise RequestError("a hook can ask another model only on a server (quire serve).")


@dataclass(frozen=True, slots=True)
class HookContext:
    """The request that a hook is called for."""

    request_id: str
    tenant: str  # as the engine knows it, such as `key 2`; empty without tenants
    model: str
    state: dict[str, Any] = field(default_factory=dict)  # the hook's own, for this request
    actions: HookActions = field(default_factory=NoActions, compare=False, repr=False)


def checked_priority(priority: object) -> int:
    """Return a priority. Raises ValueError for one that the engine does not have."""
    if type(priority) is not int or abs(priority) > MAX_PRIORITY:
        raise ValueError(f"priority must be an integer of 32 bits, got {priority!r}")
    return priority


def checked_pause(seconds: object) -> float:
    """Return the length of a pause in seconds. Raises ValueError for one out of range."""
    if not isinstance(seconds, int | float) or not 0 < seconds <= MAX_PAUSE_S:
        raise ValueError(
            f"a pause must be above 0 s and at most {MAX_PAUSE_S:g} s, got {seconds!r}"
        )
    return float(seconds)


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
