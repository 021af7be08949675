"""Errors of a body in plain words: each field, its value, and the values that it accepts.

pydantic finds the errors. Its own wording names Python types, so we use it only for errors without
an entry in WANTED. pydantic reports one error for each kind of a union; they are joined.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import fastapi
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from quire.serve.bodies.open_body import body_class
from quire.serve.errors import ApiError, bad_request

Body = TypeVar("Body", bound=BaseModel)

MAX_ERRORS = 8
MAX_SHOWN_CHARS = 60
MAX_PATH = 8

# The accepted values by pydantic's error type. The error's context fills the braces.
ACCEPTED = {
    "string_type": "a string",
    "string_unicode": "a string of valid Unicode",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer of at most 64 bits",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "none_required": "null",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "mapping_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dataclass_type": "an object",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "names_too_long": "an object whose names have at most {max_length} characters",
    "too_long": "of at most {max_length} items",
    "too_short": "of {min_length} or more items",
    "string_too_long": "of at most {max_length} characters",
    "string_too_short": "of {min_length} or more characters",
}
# The accepted values of one member of a union, by pydantic's name of the member.
KINDS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "none": "null",
    "list[str]": "a list of strings",
    "list[int]": "a list of integers",
    "list[list[int]]": "a list of lists of integers",
}


@dataclass(frozen=True)
class _Problem:
    """An error of a field: a sentence, or the accepted values and the given value."""

    path: str
    sentence: str = ""
    accepted: str = ""
    value: str = ""


def invalid_request(error: RequestValidationError, request: fastapi.Request) -> ApiError:
    """Return one 400 that names all wrong fields; `param` is the first one."""
    return invalid_fields(error.errors(), _field_names(request))


def parsed(kind: type[Body], fields: Mapping[str, Any]) -> Body:
    """Validate fields that did not arrive as an HTTP body. Raises the ApiError that an HTTP body
    with these fields would raise."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        errors = [item | {"loc": ("body", *item["loc"])} for item in error.errors()]
        raise invalid_fields(errors, list(kind.model_fields)) from error


def invalid_fields(errors: Sequence[Any], known: list[str]) -> ApiError:
    """Return one 400 for pydantic's errors, whose locations start with `body`. known: fields."""
    whole = _whole_body(errors[0])
    if whole is not None:
        return whole
    by_field: dict[str, list[Mapping[str, Any]]] = {}
    for item in errors:
        by_field.setdefault(_path(_split(item["loc"])[0]), []).append(item)
    problems = list(by_field)
    lines = [
        _line([_problem(item, known) for item in by_field[path]]) for path in problems[:MAX_ERRORS]
    ]
    more = len(problems) - MAX_ERRORS
    message = " ".join(lines) + (f" And {more} more." if more > 0 else "")
    return bad_request(message, _cut(problems[0]) or None)


def shown(value: object) -> str:
    """Return a scalar as shortened JSON, and describe a list or an object by its size."""
    if isinstance(value, str):
        cut = value if len(value) <= MAX_SHOWN_CHARS else value[:MAX_SHOWN_CHARS] + "..."
        return json.dumps(cut, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "an object" if value else "an empty object"
    if isinstance(value, Sequence):
        return f"a list of {len(value)}" if value else "an empty list"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)[:MAX_SHOWN_CHARS]
    return type(value).__name__


def _whole_body(item: Mapping[str, Any]) -> ApiError | None:
    """Return the error of a body that is not a JSON object; None for other errors."""
    loc, value = tuple(item["loc"]), item.get("input")
    if item["type"] == "json_invalid":
        reason = item["ctx"]["error"]
        return bad_request(f"the body is not valid JSON: {reason} at character {loc[-1]}.")
    if loc != ("body",) or item["type"] == "value_error":
        return None
    if item["type"] == "string_unicode":
        return bad_request("the names of the body's fields must be valid Unicode.")
    if item["type"] == "missing":
        return bad_request("the body is empty; send a JSON object.")
    if isinstance(value, bytes | bytearray):
        text = "the body must be JSON; send it with the header Content-Type: application/json."
        return ApiError(415, text, code="unsupported_media_type")
    return bad_request(f"the body must be a JSON object, got {shown(value)}.")


def _problem(item: Mapping[str, Any], known: list[str]) -> _Problem:
    """Describe one of pydantic's errors: its field, and a sentence or the accepted values."""
    names, kind = _split(item["loc"])
    path, error_type, value = _path(names), item["type"], shown(item.get("input"))
    context = item.get("ctx") or {}
    name = _cut(path)
    if error_type == "missing":
        return _Problem(path, f"{name} is required; add it.")
    if error_type == "extra_forbidden":
        is_short = len(names) == 1 and len(names[0]) <= MAX_SHOWN_CHARS
        close = difflib.get_close_matches(names[0], known, n=1) if is_short else []
        hint = f"did you mean {close[0]!r}?" if close else "remove it."
        return _Problem(path, f"there is no field {name!r}; {hint}")
    if error_type in ("value_error", "assertion_error"):
        text = str(context.get("error", "it is invalid")).rstrip(".")
        return _Problem(path, f"{text}.")
    if kind is not None:
        return _Problem(path, accepted=kind, value=value)
    if error_type in ACCEPTED:
        return _Problem(path, accepted=ACCEPTED[error_type].format_map(context), value=value)
    return _Problem(path, f"{name}: {item['msg']}, got {value}.")


def _line(problems: list[_Problem]) -> str:
    """Return one sentence about one field, with the accepted kinds joined by `or`."""
    for problem in problems:
        if problem.sentence:
            return problem.sentence
    accepted = " or ".join(dict.fromkeys(problem.accepted for problem in problems))
    return f"{_cut(problems[0].path)} must be {accepted}, got {problems[0].value}."


def _split(loc: Sequence[str | int]) -> tuple[list[str], str | None]:
    """Return the field names down to the wrong value, and the kind if a union member failed.

    pydantic puts the names of union members, such as list[int] or a class, between the fields.
    """
    names: list[str] = []
    for part in loc[1 : MAX_PATH + 1]:
        if part == "[key]":  # the field's name is wrong, not its value
            continue
        if isinstance(part, str) and (part in KINDS or "[" in part):
            return names, KINDS.get(part, _plain_kind(part))
        if isinstance(part, str) and part[:1].isupper():
            continue  # a class of a union
        names.append(str(part))
    return names, None


def _path(names: list[str]) -> str:
    """Format a path, such as messages[0].content."""
    parts = [f"[{name}]" if name.isdecimal() else f".{name}" for name in names]
    return "".join(parts).removeprefix(".")


def _plain_kind(name: str) -> str:
    return "a list" if name.startswith("list[") else "an object"


def _cut(path: str) -> str:
    return path if len(path) <= 2 * MAX_SHOWN_CHARS else path[: 2 * MAX_SHOWN_CHARS] + "..."


def _field_names(request: fastapi.Request) -> list[str]:
    """Return the fields of the matched route's body, for `did you mean`."""
    endpoint = request.scope.get("endpoint")
    kind = body_class(endpoint) if endpoint else None
    return list(kind.model_fields) if kind else []
