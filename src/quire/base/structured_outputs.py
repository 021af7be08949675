"""What an answer must be: `StructuredOutputsParams`, with vLLM's names and defaults."""

from typing import Any

import msgspec


class StructuredOutputsParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form of an answer: exactly one of the first six.

    json: a JSON schema, as an object or as text. regex: a regular expression that the whole answer
    matches. choice: texts, of which the answer is one. grammar: a context-free grammar in Lark's
    syntax or as GBNF. json_object: any JSON object. structural_tag: text with structured parts, as
    JSON text.
    disable_any_whitespace: JSON is written without white space between its tokens.
    disable_additional_properties: objects have no properties but those that their schema names.
    whitespace_pattern: a regular expression of what may stand between the tokens of JSON.
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
