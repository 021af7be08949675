"""The operator's hooks around requests: created once, called in order, each returned value checked.

`Hooks` belongs to a process, and `RequestHooks` to one request. base/requests/hooks.py defines the
objects that hooks receive, and serve/hooks/hook_calls.py calls the hooks.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from quire.base.errors import (
    HOOK_FAILED,
    HOOK_TIMED_OUT,
    HOOK_UNAVAILABLE,
    ConfigError,
    HookFailed,
    RequestError,
)
from quire.base.plugins import HOOKS, load_plugin, short_name
from quire.base.requests.hooks import (
    CONTENT_FILTER,
    METHODS,
    EndRequest,
    HookActions,
    HookCall,
    HookContext,
    HookPiece,
    HookRequest,
    Kind,
    NoActions,
)
from quire.serve.hooks.hook_calls import Caller, CallExecutor, TooLong, Unavailable

logger = logging.getLogger("quire")

T = TypeVar("T", HookRequest, HookPiece, HookCall)
TIMEOUT_S = 5.0
# Parameters of a client that hooks receive.
SHOWN_PARAMS = (
    "n", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k",
    "min_p", "seed", "stop", "stream",
)  # fmt: skip


@dataclass(frozen=True)
class _Hook:
    """A hook. methods: its methods by name."""

    name: str
    methods: Mapping[str, Callable[[Any], Any]]
    caller: Caller


class Hooks:
    """The hooks of a process, which run in the given order.

    hooks: names of installed plug-ins, or objects. timeout_s: limit of one call. Raises ConfigError
    for an object that is not a hook. Use it from one event loop.
    """

    def __init__(self, hooks: Sequence[Any], timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._executor = CallExecutor()
        self._hooks = [self._made(each) for each in hooks]

    def see(self, method: str) -> bool:
        """Return whether any hook has this method."""
        return any(method in hook.methods for hook in self._hooks)

    def open(
        self, request_id: str, tenant: str, model: str, actions: HookActions | None = None
    ) -> "RequestHooks":
        """Return the hooks of a new request. actions: actions on the request that hooks may use."""
        actions = actions or NoActions()
        contexts = [
            (hook, HookContext(request_id, tenant, model, {}, actions)) for hook in self._hooks
        ]
        return RequestHooks(contexts, self._timeout_s, actions)

    def close(self) -> None:
        """End the idle threads. Hanging calls continue until the program ends."""
        self._executor.close()

    def _made(self, given: Any) -> _Hook:
        made = _from_package(given) if isinstance(given, str) else given
        found = {name: getattr(made, name, None) for name in METHODS}
        methods = {name: method for name, method in found.items() if callable(method)}
        name = short_name(given) if isinstance(given, str) else type(given).__name__
        if not methods or isinstance(made, type):
            raise ConfigError(
                f"{made!r} is not a hook: it must be an object with one of the methods"
                f" {', '.join(METHODS)}."
            )
        return _Hook(name, methods, Caller(self._executor, self._timeout_s))


def requested_params(params: object) -> dict[str, Any]:
    """Return the client's parameters that hooks receive, by name; unset ones are omitted. params: a
    body, or another object with these fields."""
    found = {name: getattr(params, name, None) for name in SHOWN_PARAMS}
    return {name: value for name, value in found.items() if value is not None}


def _from_package(name: str) -> Any:
    made = load_plugin(HOOKS, name, ())
    try:
        return made()
    except Exception as error:
        raise ConfigError(
            f"the hook {name!r} cannot be created: {type(error).__name__}: {error}. Repair its"
            " package, or remove it."
        ) from error


class RequestHooks:
    """The hooks of one request. Its methods raise EndRequest if a hook ends the request, and
    HookFailed if a hook fails."""

    def __init__(
        self, hooks: Sequence[tuple[_Hook, HookContext]], timeout_s: float, actions: HookActions
    ) -> None:
        self._hooks = hooks
        self._timeout_s = timeout_s
        self._actions = actions

    @property
    def priority(self) -> int | None:
        """The last priority that a hook set; None if no hook set one."""
        return self._actions.priority

    def see(self, method: str) -> bool:
        """Return whether any hook has this method."""
        return any(method in hook.methods for hook, _ in self._hooks)

    async def before_admission(self, request: HookRequest) -> HookRequest:
        """Return the request as the hooks changed it; each hook gets its own context. Raises
        RequestError if a hook ends the request."""
        try:
            return await self._call_hooks("before_admission", request, _checked_request)
        except EndRequest as end:
            raise RequestError(end.reason, code=CONTENT_FILTER) from end

    async def on_output(self, choice: int, kind: Kind, text: str, is_last: bool) -> str:
        """Return the text that is sent to the client."""
        piece = HookPiece(self._no_context, choice, kind, text, is_last)
        return (await self._call_hooks("on_output", piece, _checked_piece)).text

    async def on_tool_call(
        self, choice: int, call_id: str, name: str, arguments: str
    ) -> tuple[str, str]:
        """Return the name and the arguments of the tool call that is sent to the client."""
        call = HookCall(self._no_context, choice, call_id, name, arguments)
        seen = await self._call_hooks("on_tool_call", call, _checked_call)
        return seen.name, seen.arguments

    @property
    def _no_context(self) -> HookContext:
        return self._hooks[0][1]  # a placeholder; `_call_hooks` sets each hook's own context

    async def _call_hooks(self, name: str, thing: T, check: Callable[[T, T], T]) -> T:
        """Pass an object through all hooks. check: (shown, returned) -> the accepted object."""
        for hook, context in self._hooks:
            method = hook.methods.get(name)
            if method is None:
                continue
            shown = replace(thing, context=context)
            returned, error = await hook.caller.call(method, shown)
            if error is None and returned is not None:
                returned, error = _checked(check, shown, returned)
            if error is not None:
                raise self._as_failure(hook.name, context.request_id, name, error)
            thing = shown if returned is None else returned
        return thing

    def _as_failure(
        self, hook: str, request_id: str, method: str, error: BaseException
    ) -> Exception:
        """Log a hook's error, and return the error to raise, which hides the details."""
        if isinstance(error, EndRequest):
            reason = str(error.reason)
            logger.info("hook %s ended request %s in %s: %s", hook, request_id, method, reason)
            return EndRequest(reason.encode(errors="replace").decode())
        where = f"{hook}.{method} on request {request_id}"
        if isinstance(error, Unavailable):
            text = (
                "calls of one of this server's hooks hang, so it cannot serve this request; try"
                " again later."
            )
            return HookFailed(text, HOOK_UNAVAILABLE)
        if isinstance(error, TooLong):
            logger.error("hook %s took longer than %g s", where, self._timeout_s)
            text = f"a hook of this server took longer than {self._timeout_s:g} s on this request."
            return HookFailed(text, HOOK_TIMED_OUT)
        logger.error("hook %s failed", where, exc_info=error)
        text = (
            f"a hook of this server failed on this request; its log says why, under {request_id}."
        )
        return HookFailed(text, HOOK_FAILED)


def _checked(
    check: Callable[[T, T], T], shown: T, returned: Any
) -> tuple[T | None, Exception | None]:
    """Return the accepted part of a hook's returned value, or the error in it."""
    if type(returned) is not type(shown):
        kinds = type(shown).__name__, type(returned).__name__
        return None, TypeError("it must return None or a {}, got a {}".format(*kinds))
    try:
        return check(shown, returned), None
    except (TypeError, ValueError) as error:
        return None, error


def _checked_request(shown: HookRequest, changed: HookRequest) -> HookRequest:
    """Accept changed messages or a changed prompt; a changed text drops its token ids."""
    messages, prompt, ids = changed.messages, changed.prompt, changed.prompt_token_ids
    if shown.messages is not None:
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise TypeError("messages must be a list that is not empty")
        if not all(isinstance(message, Mapping) for message in messages):
            raise TypeError("messages must hold dictionaries")
        return replace(shown, messages=messages)
    if prompt != shown.prompt:
        return replace(shown, prompt=_text("prompt", prompt), prompt_token_ids=None)
    if ids is not shown.prompt_token_ids:
        raise TypeError("prompt_token_ids cannot be changed; change the prompt")
    return shown


def _checked_piece(shown: HookPiece, changed: HookPiece) -> HookPiece:
    return replace(shown, text=_text("text", changed.text))


def _checked_call(shown: HookCall, changed: HookCall) -> HookCall:
    name, arguments = _text("name", changed.name), _text("arguments", changed.arguments)
    return replace(shown, name=name, arguments=arguments)


def _text(name: str, value: object) -> str:
    """Return a text that can be encoded as UTF-8. Raises TypeError, and ValueError for half of a
    surrogate pair."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a text, got a {type(value).__name__}")
    if not value.isascii():
        value.encode()
    return value
