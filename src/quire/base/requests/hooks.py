"""Interface of hooks: the safety filters and verifiers that an operator installs.

A hook is an object with any of the methods of `METHODS`, each plain or async. A method may pass its
argument on by returning None. It may change the argument by returning a copy made with
`dataclasses.replace`. Or it ends the request by raising EndRequest. `context.actions` lets a hook
act on the request while it runs. docs/extend/hooks.md has examples (T 5.2.3).
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
    """Actions of a hook on its request, callable from any thread."""

    priority: int | None  # last priority that was set

    def set_priority(self, priority: int) -> None:
        """Change the priority; a lower number is served first. Raises ValueError beyond 32 bits."""
        ...

    def pause(self, seconds: float) -> None:
        """Stop computing the request until `resume`, or for `seconds` (at most MAX_PAUSE_S).

        The engine may evict its KV blocks meanwhile. Has no effect before the request runs. Raises
        ValueError for a duration out of range."""
        ...

    def resume(self) -> None:
        """Let a paused request continue."""
        ...

    async def ask(self, model: str, prompt: Prompt, **params: Any) -> str:
        """Return the response of a model of the same server to a text or a conversation.

        params: fields of /v1/completions or /v1/chat/completions. The request counts as the
            tenant's, and bypasses all hooks. Raises RequestError for a request that cannot be
            served.
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
    tenant: str  # name of the tenant in the engine, such as `key 2`; empty without tenants
    model: str
    state: dict[str, Any] = field(default_factory=dict)  # the hook's own data for the request
    actions: HookActions = field(default_factory=NoActions, compare=False, repr=False)


def checked_priority(priority: object) -> int:
    """Return a valid priority. Raises ValueError if it is not an integer of 32 bits."""
    if type(priority) is not int or abs(priority) > MAX_PRIORITY:
        raise ValueError(f"priority must be an integer of 32 bits, got {priority!r}")
    return priority


def checked_pause(seconds: object) -> float:
    """Return the duration of a pause in seconds. Raises ValueError if it is out of range."""
    if not isinstance(seconds, int | float) or not 0 < seconds <= MAX_PAUSE_S:
        raise ValueError(
            f"a pause must be above 0 s and at most {MAX_PAUSE_S:g} s, got {seconds!r}"
        )
    return float(seconds)


@dataclass(frozen=True, slots=True)
class HookRequest:
    """A request before it is rendered and queued. Hooks must not change its contents in place.

    A hook may replace `messages` of a conversation, or `prompt` of other requests. A prompt of
    token ids also appears as text with special tokens, if the model has a tokenizer.
    """

    context: HookContext
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)  # other template input, such as tools
    params: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters of the client

    @property
    def texts(self) -> list[str]:
        """Return all texts that may reach the model, at any nesting, including names of fields."""
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
    """A chunk of an answer on its way to the client; a hook may change `text`.

    An answer that is not streamed is one chunk. In a last chunk the text may be empty, so that a
    hook can release the text that it held back.
    """

    context: HookContext
    choice: int  # number of the choice in the response
    kind: Kind
    text: str
    is_last: bool  # whether this is the last chunk of this choice and kind


@dataclass(frozen=True, slots=True)
class HookCall:
    """A complete tool call on its way to the client; a hook may change `name` and `arguments`."""

    context: HookContext
    choice: int
    call_id: str
    name: str
    arguments: str  # JSON from the model; truncated if the answer is
