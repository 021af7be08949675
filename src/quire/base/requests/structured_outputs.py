"""`StructuredOutputsParams`: a constraint on an answer, with vLLM's names and defaults."""

from typing import Any

import msgspec

from quire.base.errors import RequestError

FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
FIELD = "structured_outputs"


class StructuredOutputsParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The constraint on an answer: exactly one of the first six fields.

    Raises RequestError for fields of a wrong type or number. Contents are checked later.
    """

    json: str | dict[str, Any] | None = None  # JSON schema, as an object or as text
    regex: str | None = None  # regular expression that the whole answer matches
    choice: list[str] | None = None  # texts of which the answer is one
    grammar: str | None = None  # context-free grammar as Lark or GBNF
    json_object: bool | None = None  # whether the answer is a JSON object
    structural_tag: str | None = None  # text with structured parts, as JSON text
    disable_any_whitespace: bool = False  # whether JSON has no white space between tokens
    disable_additional_properties: bool = False  # whether objects have only named properties
    whitespace_pattern: str | None = None  # regular expression for white space between tokens

    def __post_init__(self) -> None:
        for name in ("regex", "grammar", "structural_tag", "whitespace_pattern"):
            self._check(name, isinstance(getattr(self, name), str | None), "a text")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            self._check(name, isinstance(getattr(self, name), bool), "true or false")
        self._check("json", isinstance(self.json, str | dict | None), "a schema, or its text")
        self._check("json_object", isinstance(self.json_object, bool | None), "true or false")
        is_list = self.choice is None or (
            isinstance(self.choice, list | tuple) and len(self.choice) > 0
            and all(isinstance(one, str) and one for one in self.choice)
        )  # fmt: skip
        self._check("choice", is_list, "a list of texts that are not empty")
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"{FIELD} must have exactly one of {', '.join(FORMS)};"
                f" got {' and '.join(given) or 'none of them'}.",
                FIELD,
            )
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise RequestError(
                f"{FIELD} has disable_any_whitespace and a whitespace_pattern; remove one.",
                FIELD,
            )

    @property
    def form(self) -> str:
        """Return the name of the field that is set."""
        return next(name for name in FORMS if getattr(self, name) not in (None, False))

    def _check(self, name: str, ok: bool, rule: str) -> None:
        if not ok:
            raise RequestError(f"{FIELD}.{name} must be {rule}.", FIELD)
