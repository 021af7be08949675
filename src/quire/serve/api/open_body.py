"""Bodies of contracts that others extend: what is unknown here is left out, and a header says so.

Clients of other servers send fields that only those know. Known ones that would change the text are
refused (`foreign_fields.py`). `--strict-fields` refuses all, which finds misspelt ones. Bodies of
our own endpoints are always strict.
"""

import difflib
import typing
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.responses import Response
from starlette.types import Scope

from quire.serve.api.errors import ApiError, ApiHttpError
from quire.serve.api.foreign_fields import check_foreign

IGNORED_HEADER = "X-Quire-Ignored-Fields"
MAX_HEADER_CHARS = 1024
MAX_GUESSED_CHARS = 60
SAFE = "!#$&'()*+/:;<=>?@[]^`{|}"
EMPTY = '""'  # a header's value must not end with a blank


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
