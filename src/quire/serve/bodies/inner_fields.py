"""Objects with fields of their own within a body, such as Ollama's options."""

import fastapi
from pydantic import BaseModel

from quire.serve.bodies.foreign_fields import check_foreign
from quire.serve.bodies.open_body import check_neutral, name_ignored
from quire.serve.bodies.validation_errors import shown
from quire.serve.errors import bad_request


def check_inner(inner: BaseModel | None, field: str, noun: str, request: fastapi.Request) -> None:
    """Refuse inner fields that would change the text, and name the unknown ones in the response's
    header. field: of the body. noun: what an inner field is called. Raises ApiError."""
    if inner is None:
        return
    check_neutral(inner)
    extra = inner.model_extra or {}
    check_foreign(extra, tuple(extra))
    if extra and request.app.state.context.config.strict_fields:
        name = next(iter(extra))
        raise bad_request(f"there is no {noun} {shown(name)}; remove it.", field)
    name_ignored(request.scope, *(f"{field}.{name}" for name in extra))
