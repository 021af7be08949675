"""What a body asks its answer to be: `response_format`, `structured_outputs`, or a field of another
engine such as `guided_json` or `grammar`, to StructuredOutputsParams, and to a grammar that was
checked."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from quire.base.errors import RequestError
from quire.base.requests.structured_outputs import StructuredOutputsParams
from quire.render.grammars.grammars import Checked
from quire.render.grammars.lark import MAX_CHARS
from quire.serve.api.bodies.protocol import GenerationRequest
from quire.serve.api.bodies.validation_errors import shown
from quire.serve.api.context import ApiContext
from quire.serve.api.errors import ApiError, bad_request
from quire.serve.async_renderer import size_of
from quire.serve.lanes import MAX_CHARS_ON_LOOP

Json = dict[str, Any]

WARNING_HEADER = "X-Quire-Grammar-Warnings"
MAX_WARNING_CHARS = 1024
RESPONSE_FORMAT = "response_format"
STRUCTURED = "structured_outputs"
FORMAT_TYPES = ("text", "json_object", "json_schema", "structural_tag")
# vLLM's older names, then those of llama.cpp and SGLang.
GUIDED = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice",
    "guided_grammar": "grammar", "grammar": "grammar", "json_schema": "json", "regex": "regex",
    "ebnf": "grammar",
}  # fmt: skip
WHITESPACE_FIELD = "guided_whitespace_pattern"
MAY_BE_EMPTY = ("grammar", "regex", "ebnf")  # clients of those engines send "" for none
CONSTRAINT_FIELDS = frozenset({RESPONSE_FORMAT, STRUCTURED, WHITESPACE_FIELD, *GUIDED})
KNOWN = frozenset(StructuredOutputsParams.__struct_fields__)

Asked = tuple[StructuredOutputsParams | None, bool, str]
UNCONSTRAINED: Asked = None, False, STRUCTURED


def structured_outputs_of(body: GenerationRequest) -> Asked:
    """Return the form that the answer must have, None for any; whether what a schema asks for and
    cannot be had is an error; and the field that says so. Raises ApiError."""
    asked = [
        found
        for found in (_of_response_format(body), _of_structured_outputs(body), _of_guided(body))
        if found is not None
    ]
    if not asked:
        return UNCONSTRAINED
    if len(asked) > 1:
        names = " and ".join(field for _, _, field in asked)
        raise bad_request(f"{names} exclude each other; remove one.", asked[-1][2])
    return asked[0]


def form_size(body: GenerationRequest, tools: object = None) -> int:
    """Return about how many characters say what the answer must be, for `Lanes.run`: to read them
    and to write a grammar of them takes as long as they are many."""
    asked = [body.response_format, body.structured_outputs, tools]
    asked += [getattr(body, name) for name in GUIDED]
    return size_of(asked, MAX_CHARS_ON_LOOP)


async def checked_grammar(
    api: ApiContext, body: GenerationRequest, num_prompts: int = 1
) -> Checked:
    """Return the grammar of answers that are only what the body asks for; empty where it asks for
    nothing. num_prompts: how many requests of the engine hold it. Raises ApiError, RequestError and
    EngineBusy."""
    wanted, strict, field = structured_outputs_of(body)
    if wanted is None:
        return Checked("")
    size = form_size(body)
    grammar = await api.lanes.run(size, api.renderer.grammar_of, wanted, strict=strict, field=field)
    if len(grammar) * num_prompts > MAX_CHARS:
        raise bad_request(
            f"{field} gives a grammar of {len(grammar)} characters, for each of {num_prompts}"
            f" prompts; at most {MAX_CHARS} are possible in all.",
            field,
        )
    return await api.renderer.grammars.check_async(grammar, field)


def with_warnings(response: Response, grammar: Checked) -> Response:
    """Say in a header what of a grammar is not kept to."""
    if grammar.warnings:
        text = json.dumps(" ".join(grammar.warnings))[1:-1]
        response.headers[WARNING_HEADER] = text[:MAX_WARNING_CHARS]
    return response


def _of_response_format(body: GenerationRequest) -> Asked | None:
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


def _of_json_schema(given: object) -> Asked:
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


def _of_structured_outputs(body: GenerationRequest) -> Asked | None:
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


def _of_guided(body: GenerationRequest) -> Asked | None:
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
