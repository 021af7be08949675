"""Bodies of contracts that others extend: what is unknown here is left out, and a header says so.

Clients of other servers send fields that only those know. Known ones that would change the text are
refused (`foreign_fields.py`). `--strict-fields` refuses all, which finds misspelt ones. Bodies of
our own endpoints are always strict.

A declared field may be one that cannot be served. Clients send many fields at their defaults, so it
is accepted at its neutral values; any other value is a 400 that says what to do.
"""

import difflib
import typing
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response
from starlette.types import Scope

from quire.serve.api.bodies.foreign_fields import check_foreign
from quire.serve.api.errors import ApiError, ApiHttpError, bad_request, short

IGNORED_HEADER = "X-Quire-Ignored-Fields"
MAX_HEADER_CHARS = 1024
MAX_GUESSED_CHARS = 60
SAFE = "!#$&'()*+/:;<=>?@[]^`{|}"
EMPTY = '""'  # a header's value must not end with a blank
ONLY_NEUTRAL = "only at its neutral value"


class OpenBody(BaseModel):
    """A body whose unknown fields may be left out before it is checked (`reading.BoundedRoute`)."""

    model_config = ConfigDict(extra="forbid")


def body_class(endpoint: Callable[..., Any]) -> type[BaseModel] | None:
    """Return the class of the body that a route's handler takes, if it takes one."""
    for kind in typing.get_type_hints(endpoint).values():
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
    """Return a body without unknown fields, whose names are kept with its request. Raise
    ApiHttpError for one that would change the text of an answer."""
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
    """Return the names of the fields that were left out of a request's body."""
    names: tuple[str, ...] = scope.get("state", {}).get("ignored_fields", ())
    return names


def add_guess(error: ApiError, ignored: Sequence[str]) -> None:
    """Add a guess to an error if the field that it is about seems to be misspelt."""
    names = [name for name in ignored if len(name) <= MAX_GUESSED_CHARS]
    close = difflib.get_close_matches(error.param or "", names, n=1)
    if close:
        error.message += f" Is {close[0]!r}, which there is not, meant?"


def naming_ignored(response: Response, names: Sequence[str]) -> Response:
    """Name the fields that were left out in a header of the answer: as many as it may hold.

    Names are written as in a URL, so that no byte of theirs breaks the header.
    """
    num_chars, kept = 0, []
    for name in names:
        written = urllib.parse.quote(name, safe=SAFE, errors="surrogatepass") or EMPTY
        num_chars += len(written) + 2
        if num_chars > MAX_HEADER_CHARS:
            break
        kept.append(written)
    if left := len(names) - len(kept):
        kept.append(f"{left} more")
    if kept:
        response.headers[IGNORED_HEADER] = ", ".join(kept)
    return response


@dataclass(frozen=True)
class Rule:
    """advice: what to do instead of using a field. values: what it may be beside None."""

    advice: str
    values: tuple[Any, ...]


def unsupported(advice: str, *values: Any) -> Any:
    """Declare a field of a body, with the parts of its `Rule`."""
    enum: dict[str, Any] = {"enum": [None, *values]}
    field: Any = Field(default=None, description=ONLY_NEUTRAL, json_schema_extra=enum)
    field.metadata.append(Rule(advice, values))
    return field


@cache
def unsupported_fields(kind: type[BaseModel]) -> dict[str, Rule]:
    """Return those of a body's fields that cannot be served."""
    return {
        name: rule
        for name, field in kind.model_fields.items()
        for rule in field.metadata
        if isinstance(rule, Rule)
    }


def check_neutral(request: BaseModel, rules: Mapping[str, Rule] | None = None) -> None:
    """Raise a 400 for the first field that asks for something that cannot be served.

    rules: by field; None are those of the declared fields.
    """
    rules = unsupported_fields(type(request)) if rules is None else rules
    for name in request.model_fields_set:
        rule = rules.get(name)
        if rule is None:
            continue
        value = getattr(request, name)
        if value is not None and value not in rule.values:
            raise bad_request(f"{name}={short(value)}: {rule.advice}.", name, "unsupported_value")
