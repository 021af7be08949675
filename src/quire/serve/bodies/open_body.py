"""Declarations of the effect of each field of a body, and the handling of undeclared fields.

Each field declares its effect. `becomes` names what the field sets. An `Ignored` field has no
effect. An `unsupported` field is refused unless its value is neutral. Any other field sets the
field of `SamplingParams` of the same name. Checks, the OpenAPI document and the table of fields
(`serve/fields.py`) read these declarations.

Clients of other servers send fields that only those servers know. Undeclared fields of an
`OpenBody` are removed, and a header names them. Known fields that would change the text are refused
(`foreign_fields.py`). `--strict-fields` refuses all undeclared fields, which finds misspelt ones.
Bodies of quire's own endpoints are always strict.
"""

import difflib
import typing
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError
from starlette.responses import Response
from starlette.types import Scope

from quire.serve.bodies.foreign_fields import Refused, check_foreign
from quire.serve.errors import ApiError, ApiHttpError

IGNORED_HEADER = "X-Quire-Ignored-Fields"
MAX_HEADER_CHARS = 1024
MAX_SUGGESTED_CHARS = 60
MAX_NAME_CHARS = 256  # length of a field's name in an object
SAFE = "!#$&'()*+/:;<=>?@[]^`{|}"
EMPTY = '""'  # a header's value must not end with a blank
ONLY_NEUTRAL = "only at its neutral value"

# Parts of a request's plan that are not fields of an engine message.
MODEL, PROMPT, GRAMMAR, RESPONSE = "model", "prompt", "grammar", "response"


def at_most(max_items: int) -> BeforeValidator:
    """Return a validator that refuses a list or an object of more than `max_items` items before the
    items are read. It also refuses names of more than MAX_NAME_CHARS."""

    def checked(value: object) -> object:
        if isinstance(value, list | Mapping) and len(value) > max_items:
            raise PydanticCustomError("too_long", "too long", {"max_length": max_items})
        if isinstance(value, Mapping) and any(len(name) > MAX_NAME_CHARS for name in value):
            raise PydanticCustomError("names_too_long", "too long", {"max_length": MAX_NAME_CHARS})
        return value

    return BeforeValidator(checked)


@dataclass(frozen=True)
class Becomes:
    """Effect of a field. parts: `Class.field` of the engine, or a part of the plan like PROMPT."""

    parts: tuple[str, ...]


class _NoEffect:
    """Mark of a field that cannot change the response."""


NO_EFFECT = _NoEffect()
Ignored = Annotated[Any, Field(default=None, description="accepted and ignored"), NO_EFFECT]


def becomes(*parts: str, default: Any = None) -> Any:
    """Declare what a field of a body sets. A default of `...` makes the field required."""
    field: Any = Field(default=default)
    field.metadata.append(Becomes(parts))
    return field


def unsupported(advice: str, *values: Any) -> Any:
    """Declare a field that is refused. values: its neutral values besides null."""
    enum: dict[str, Any] = {"enum": [None, *values]}
    field: Any = Field(default=None, description=ONLY_NEUTRAL, json_schema_extra=enum)
    field.metadata.append(Refused(advice, values))
    return field


@cache
def unsupported_fields(kind: type[BaseModel]) -> dict[str, Refused]:
    """Return the fields of a body that are refused."""
    return {
        name: refused
        for name, field in kind.model_fields.items()
        for refused in field.metadata
        if isinstance(refused, Refused)
    }


def check_neutral(request: BaseModel) -> None:
    """Raise ApiError for the first refused field whose value is not neutral."""
    refused = unsupported_fields(type(request))
    for name in refused:
        if name in request.model_fields_set:
            refused[name].check(name, getattr(request, name))


class StrictBody(BaseModel):
    """A body, or a part of one, that refuses undeclared fields."""

    # A server starts sooner, because pydantic builds each body at its first request.
    model_config = ConfigDict(extra="forbid", defer_build=True)


class OpenBody(StrictBody):
    """A body whose undeclared fields are removed before validation (`reading.BoundedRoute`)."""


def body_class(endpoint: Callable[..., Any]) -> type[BaseModel] | None:
    """Return the class of the body that a route's handler takes; None without a body."""
    for hint in typing.get_type_hints(endpoint).values():
        for kind in (hint, *typing.get_args(hint)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                return kind
    return None


def known_fields(endpoint: Callable[..., Any]) -> frozenset[str] | None:
    """Return the fields of a handler's body; None unless it is an `OpenBody`."""
    kind = body_class(endpoint)
    if kind is None or not issubclass(kind, OpenBody):
        return None
    names = {field.alias or name for name, field in kind.model_fields.items()}
    return frozenset(names)


def without_unknown(body: dict[str, Any], known: frozenset[str], scope: Scope) -> dict[str, Any]:
    """Return a body without its unknown fields, and store their names in the request's scope.
    Raises ApiHttpError for an unknown field that would change the text."""
    unknown = tuple(name for name in body if name not in known)
    if not unknown:
        return body
    try:
        check_foreign(body, unknown)
    except ApiError as error:
        raise ApiHttpError(error) from error
    scope.setdefault("state", {})["ignored_fields"] = unknown
    return {name: value for name, value in body.items() if name in known}


def ignored_fields(scope: Scope) -> tuple[str, ...]:
    """Return the names of the fields that were removed from a request's body."""
    names: tuple[str, ...] = scope.get("state", {}).get("ignored_fields", ())
    return names


def name_ignored(scope: Scope, *names: str) -> None:
    """Add fields that had no effect to the response's header of ignored fields."""
    scope.setdefault("state", {})["ignored_fields"] = ignored_fields(scope) + names


def add_suggestion(error: ApiError, ignored: Sequence[str]) -> None:
    """Extend the error's message if a removed field looks like a misspelling of its field."""
    names = [name for name in ignored if len(name) <= MAX_SUGGESTED_CHARS]
    close = difflib.get_close_matches(error.param or "", names, n=1)
    if close:
        error.message += f" Is {close[0]!r} a misspelling of it?"


def naming_ignored(response: Response, names: Sequence[str]) -> Response:
    """Name the removed fields in a header of the response, as many as fit into it.

    Names are quoted as in a URL, so that their bytes cannot break the header.
    """
    num_chars, shown = 0, []
    for name in names:
        written = urllib.parse.quote(name, safe=SAFE, errors="surrogatepass") or EMPTY
        num_chars += len(written) + 2
        if num_chars > MAX_HEADER_CHARS:
            break
        shown.append(written)
    if left := len(names) - len(shown):
        shown.append(f"{left} more")
    if shown:
        response.headers[IGNORED_HEADER] = ", ".join(shown)
    return response
