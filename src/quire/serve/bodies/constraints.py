"""Output constraints of a body: a grammar, a schema or a choice, and the tools to call.

`response_format`, `structured_outputs`, or a field of another engine such as `guided_json` becomes
StructuredOutputsParams and a checked grammar. `tools` and `tool_choice` become the tools that an
answer may or must call.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from quire.base.errors import RequestError
from quire.base.requests.structured_outputs import StructuredOutputsParams
from quire.render.answers.format import NamedTool, ToolChoice
from quire.render.answers.syntax import Tool
from quire.render.answers.tools import tools_of
from quire.render.grammars.grammars import Checked
from quire.render.grammars.lark import MAX_CHARS
from quire.serve.async_renderer import MAX_CHARS_ON_LOOP, size_of
from quire.serve.bodies.protocol import ChatCompletionRequest, GenerationRequest
from quire.serve.bodies.validation_errors import shown
from quire.serve.context import ApiContext
from quire.serve.errors import ApiError, bad_request

Json = dict[str, Any]

WARNING_HEADER = "X-Quire-Grammar-Warnings"
MAX_WARNING_CHARS = 1024
RESPONSE_FORMAT = "response_format"
STRUCTURED = "structured_outputs"
FORMAT_TYPES = ("text", "json_object", "json_schema", "structural_tag")
# vLLM's older names, then the names of llama.cpp and SGLang.
GUIDED = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice",
    "guided_grammar": "grammar", "grammar": "grammar", "json_schema": "json", "regex": "regex",
    "ebnf": "grammar",
}  # fmt: skip
WHITESPACE_FIELD = "guided_whitespace_pattern"
MAY_BE_EMPTY = ("grammar", "regex", "ebnf")  # clients of llama.cpp and SGLang send "" if unset
CONSTRAINT_FIELDS = frozenset({RESPONSE_FORMAT, STRUCTURED, WHITESPACE_FIELD, *GUIDED})
KNOWN = frozenset(StructuredOutputsParams.__struct_fields__)

RequestedConstraint = tuple[StructuredOutputsParams | None, bool, str]
UNCONSTRAINED: RequestedConstraint = None, False, STRUCTURED


def structured_outputs_of(body: GenerationRequest) -> RequestedConstraint:
    """Return the constraint of the answer, or None; whether an unsupported schema keyword is an
    error (`strict`); and the field that set the constraint. Raises ApiError."""
    requested = [
        found
        for found in (_of_response_format(body), _of_structured_outputs(body), _of_guided(body))
        if found is not None
    ]
    if not requested:
        return UNCONSTRAINED
    if len(requested) > 1:
        names = " and ".join(field for _, _, field in requested)
        raise bad_request(f"{names} exclude each other; remove one.", requested[-1][2])
    return requested[0]


def form_size(body: GenerationRequest, tools: object = None) -> int:
    """Return the approximate number of characters that constrain the answer, for
    `TextThreads.run`. The time to read them and to write a grammar from them grows with this
    number."""
    requested = [body.response_format, body.structured_outputs, tools]
    requested += [getattr(body, name) for name in GUIDED]
    return size_of(requested, MAX_CHARS_ON_LOOP)


async def checked_grammar(
    api: ApiContext, body: GenerationRequest, num_prompts: int = 1
) -> Checked:
    """Return the checked grammar of the body's constraint; it is empty for an unconstrained body.
    num_prompts: engine requests that hold the grammar. Raises ApiError, RequestError and
    EngineBusy."""
    constraint, strict, field = structured_outputs_of(body)
    if constraint is None:
        return Checked("")
    size = form_size(body)
    grammar = await api.text_threads.run(
        size, api.renderer.grammar_of, constraint, strict=strict, field=field
    )
    if len(grammar) * num_prompts > MAX_CHARS:
        raise bad_request(
            f"{field} gives a grammar of {len(grammar)} characters, for each of {num_prompts}"
            f" prompts; at most {MAX_CHARS} are possible in all.",
            field,
        )
    return await api.renderer.grammars.check_async(grammar, field)


def with_warnings(response: Response, grammar: Checked) -> Response:
    """Report the parts of a grammar that are not enforced in a header of the response."""
    if grammar.warnings:
        text = json.dumps(" ".join(grammar.warnings))[1:-1]
        response.headers[WARNING_HEADER] = text[:MAX_WARNING_CHARS]
    return response


def _of_response_format(body: GenerationRequest) -> RequestedConstraint | None:
    given = body.response_format
    if given is None:
        return None
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True), False, RESPONSE_FORMAT
    if kind == "json_schema":
        return _of_json_schema(given.get("json_schema"))
    if kind == "structural_tag":
        tag = json.dumps(given)
        return StructuredOutputsParams(structural_tag=tag), False, RESPONSE_FORMAT
    names = ", ".join(FORMAT_TYPES)
    raise _wrong(f".type must be one of {names}, got {shown(kind)}")


def _of_json_schema(given: object) -> RequestedConstraint:
    if not isinstance(given, Mapping):
        raise _wrong(".json_schema is required: an object with name and schema")
    name, strict, schema = given.get("name"), given.get("strict"), given.get("schema")
    if not isinstance(name, str) or not name:
        raise _wrong(".json_schema.name is required, a text")
    if not isinstance(strict, bool | None):
        raise _wrong(f".json_schema.strict must be true or false, got {shown(strict)}")
    if not isinstance(schema, dict):
        raise _wrong(".json_schema.schema is required, an object")
    return StructuredOutputsParams(json=schema), bool(strict), RESPONSE_FORMAT


def _of_structured_outputs(body: GenerationRequest) -> RequestedConstraint | None:
    given = {name: value for name, value in (body.structured_outputs or {}).items()
             if value is not None}  # fmt: skip
    if not given:
        return None
    for name in given.keys() - KNOWN:
        known = ", ".join(StructuredOutputsParams.__struct_fields__)
        raise bad_request(
            f"{STRUCTURED}.{shown(name)} is unknown; it may have {known}.", STRUCTURED
        )
    if isinstance(given.get("structural_tag"), dict):
        given["structural_tag"] = json.dumps(given["structural_tag"])
    return _made(given, STRUCTURED), False, STRUCTURED


def _of_guided(body: GenerationRequest) -> RequestedConstraint | None:
    fields = [
        old
        for old in GUIDED
        if getattr(body, old) is not None and not (old in MAY_BE_EMPTY and not getattr(body, old))
    ]
    if not fields:
        if body.guided_whitespace_pattern is not None:
            raise bad_request(
                f"{WHITESPACE_FIELD} needs guided_json, which is missing; use structured_outputs"
                " with json and whitespace_pattern.",
                WHITESPACE_FIELD,
            )
        return None
    field = fields[0]
    if len(fields) > 1:
        raise bad_request(f"{' and '.join(fields)} exclude each other; remove one.", fields[-1])
    given = {GUIDED[field]: getattr(body, field)}
    if body.guided_whitespace_pattern is not None:
        given["whitespace_pattern"] = body.guided_whitespace_pattern
    return _made(given, field), False, field


def _made(fields: Json, field: str) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**fields)
    except RequestError as error:
        raise bad_request(str(error), field) from error


def _wrong(rule: str) -> ApiError:
    return bad_request(f"{RESPONSE_FORMAT}{rule}.", RESPONSE_FORMAT)


WORDS = ("auto", "none", "required")


@dataclass(frozen=True)
class CallableTools:
    """Tools of a request. tools: functions that the choice allows, or forbids if it is `none`."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = "none"


def callable_tools(body: ChatCompletionRequest) -> CallableTools:
    """Return the tools that the answer to a rendered request may call; with the choice `none` the
    tools that it must not call. Raises ApiError for an invalid choice or an unknown tool, and
    RequestError for an invalid tool definition."""
    choice: Any = "auto" if body.tool_choice is None else body.tool_choice
    if not body.tools:
        if choice in ("auto", "none"):
            return CallableTools()
        raise bad_request(f"tool_choice={shown(choice)} needs tools; add them.", "tool_choice")
    tools = tools_of(body.tools)
    if choice in WORDS:
        return CallableTools(tools, choice)
    if not isinstance(choice, Mapping):
        raise _wrong_choice(choice)
    if choice.get("type") == "allowed_tools":
        return _allowed(tools, choice)
    called = _one_of(tools, choice)
    return CallableTools((called,), NamedTool(called.name))


def _allowed(tools: tuple[Tool, ...], choice: Mapping[str, Any]) -> CallableTools:
    """Return the subset of the tools that `allowed_tools` lists."""
    allowed = choice.get("allowed_tools", choice)
    mode = allowed.get("mode", "auto") if isinstance(allowed, Mapping) else None
    listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise _wrong_choice(choice)
    some = tuple(_one_of(tools, each) for each in listed)
    return CallableTools(some, mode)


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
