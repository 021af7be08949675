"""Which tools an answer may or must call: the fields `tools` and `tool_choice` of a chat."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.render.answers.format import NamedTool, ToolChoice
from quire.render.answers.syntax import Tool
from quire.render.answers.tools import tools_of
from quire.serve.api.bodies.protocol import ChatCompletionRequest
from quire.serve.api.bodies.validation_errors import shown
from quire.serve.api.errors import ApiError, bad_request

WORDS = ("auto", "none", "required")


@dataclass(frozen=True)
class AskedTools:
    """callable: what an answer may call."""

    callable: tuple[Tool, ...] = ()
    choice: ToolChoice = "none"


def asked_tools(body: ChatCompletionRequest) -> AskedTools:
    """Return the tools of a request that was rendered; with the choice `none`, none. Raises
    ApiError for a choice that is none, or of a tool that is not there, and RequestError for a tool
    that is none."""
    choice: Any = "auto" if body.tool_choice is None else body.tool_choice
    if not body.tools:
        if choice in ("auto", "none"):
            return AskedTools()
        raise bad_request(f"tool_choice={shown(choice)} needs tools; add them.", "tool_choice")
    if choice == "none":
        return AskedTools()
    tools = tools_of(body.tools)
    if choice in ("auto", "required"):
        return AskedTools(tools, choice)
    if not isinstance(choice, Mapping):
        raise _wrong_choice(choice)
    if choice.get("type") == "allowed_tools":
        return _allowed(tools, choice)
    called = _one_of(tools, choice)
    return AskedTools((called,), NamedTool(called.name))


def _allowed(tools: tuple[Tool, ...], choice: Mapping[str, Any]) -> AskedTools:
    """Return some of the tools."""
    allowed = choice.get("allowed_tools", choice)
    mode = allowed.get("mode", "auto") if isinstance(allowed, Mapping) else None
    listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise _wrong_choice(choice)
    some = tuple(_one_of(tools, each) for each in listed)
    return AskedTools(some, mode)


def _one_of(tools: tuple[Tool, ...], choice: object) -> Tool:
    """Return the tool that {"type": "function", "function": {"name": ...}} names."""
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise _wrong_choice(choice)
    for tool in tools:
        if tool.name == name:
            return tool
    known = ", ".join(tool.name for tool in tools[:16])
    raise bad_request(
        f"tool_choice names {shown(name)}, which is not among the tools: {known}.", "tool_choice"
    )


def _wrong_choice(choice: object) -> ApiError:
    return bad_request(
        f"tool_choice must be one of {', '.join(WORDS)}, or"
        ' {"type": "function", "function": {"name": ...}} for one of the tools,'
        f" got {shown(choice)}.",
        "tool_choice",
    )
