"""What an answer must be: `StructuredOutputsParams`, with vLLM's names and defaults."""

from typing import Any

import msgspec

from quire.base.errors import RequestError

FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
FIELD = "structured_outputs"


class StructuredOutputsParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form of an answer: exactly one of the first six.

    json: a JSON schema, as an object or as text. regex: a regular expression that the whole answer
    matches. choice: texts, of which the answer is one. grammar: a context-free grammar in Lark's
    syntax or as GBNF. json_object: any JSON object. structural_tag: text with structured parts, as
    JSON text.
    disable_any_whitespace: JSON is written without white space between its tokens.
    disable_additional_properties: objects have no properties but those that their schema names.
    whitespace_pattern: a regular expression of what may stand between the tokens of JSON.
    Raises RequestError for fields of a wrong kind or number; what they mean is checked later.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

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
        """Return which of the six it is."""
        return next(name for name in FORMS if getattr(self, name) not in (None, False))

    def _check(self, name: str, ok: bool, rule: str) -> None:
        if not ok:
            raise RequestError(f"{FIELD}.{name} must be {rule}.", FIELD)
