"""Fields that cannot be served: fine at their neutral values, otherwise a 400 that says what to do.

Clients send many fields at their defaults; those must not fail.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, Field

from quire.serve.api.errors import bad_request

MAX_SHOWN = 80
ONLY_NEUTRAL = "only at its neutral value"


class ShortRepr(reprlib.Repr):
    """What repr shows, of a value of any size, without looking at more of it than is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = self.maxother = MAX_SHOWN


def short(value: object) -> str:
    """Return a value's repr, cut to about MAX_SHOWN characters."""
    shown = ShortRepr().repr(value)
    return shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "..."


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
