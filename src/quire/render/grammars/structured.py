"""Convert a constraint on an answer to grammar rules.

`content_rule` adds rules to a grammar in which the constraint is one part. `grammar_of` builds the
grammar of an answer that has no other part. This module limits the sizes of users' texts before
anything else reads them. `grammars.py` checks the validity of the grammar.
"""

from collections.abc import Callable, Mapping

from quire.base.errors import RequestError
from quire.base.requests.structured_outputs import FIELD, StructuredOutputsParams
from quire.render.grammars.json_schema import prepared
from quire.render.grammars.lark import WHITESPACE, Lark, regex
from quire.render.grammars.structural_tags import tags_rule

MAX_CHARS = 1 << 18
MAX_CHOICES = 1 << 14


def grammar_of(
    constraint: StructuredOutputsParams,
    added_tokens: Mapping[str, int] | None = None,
    *,
    strict: bool = False,
    field: str = FIELD,
) -> str:
    """Return the grammar of an answer without reasoning and calls.

    Takes the parameters of `content_rule` and of `Lark`. Raises RequestError with `field`."""
    lark = Lark(added_tokens)
    return lark.text(content_rule(lark, constraint, strict=strict, field=field))


def content_rule(
    lark: Lark, constraint: StructuredOutputsParams, *, strict: bool = False, field: str = FIELD
) -> str:
    """Add rules for content under this constraint; return the first rule's name.

    strict: whether an unsupported schema keyword is an error instead of ignored.
    Raises RequestError with `field`."""

    def json_rule(schema: object) -> str:
        own = constraint.whitespace_pattern
        compact = constraint.disable_any_whitespace
        _check_text(own or "", field)
        options = prepared(
            schema,
            field,
            strict=strict,
            whitespace=None if compact else WHITESPACE if own is None else own,
            closed=constraint.disable_additional_properties,
        )
        try:
            return lark.json(options)
        except RequestError:
            raise
        except (TypeError, ValueError) as error:  # a Python caller's schema may hold any object
            raise RequestError(f"{field}: the schema is not JSON: {error}.", field) from None

    match constraint.form:
        case "json":
            return json_rule(constraint.json)
        case "json_object":
            return json_rule({"type": "object"})
        case "regex":
            assert constraint.regex is not None
            return lark.rule(_regex(constraint.regex, field))
        case "choice":
            assert constraint.choice is not None
            return _choice_rule(lark, constraint.choice, field)
        case "grammar":
            assert constraint.grammar is not None
            return _nested_rule(lark, constraint.grammar, field)
        case _:
            assert constraint.structural_tag is not None
            return _tags_rule(lark, constraint.structural_tag, json_rule, field)


def no_tokenizer(field: str) -> RequestError:
    """Return the error for structured output on a model without a tokenizer."""
    return RequestError(f"{field} needs a tokenizer, which this model does not have.", field)


def _choice_rule(lark: Lark, choice: list[str], field: str) -> str:
    """Add a rule for one of these texts, as a single lexeme, which compiles fast."""
    if len(choice) > MAX_CHOICES:
        message = f"{field} has {len(choice)} choices; at most {MAX_CHOICES} are possible."
        raise RequestError(message, field)
    _check_text("".join(choice), field)
    return lark.rule(lark.terminal(" | ".join(map(lark.spelled, choice))))


def _nested_rule(lark: Lark, grammar: str, field: str) -> str:
    _check_text(grammar, field)
    if not grammar.strip():
        raise RequestError(f"{field}: the grammar is empty.", field)
    return lark.rule(lark.nested(grammar))


def _tags_rule(lark: Lark, text: str, json_rule: Callable[[object], str], field: str) -> str:
    _check_text(text, field)
    parts = {
        "json_schema": json_rule,
        "regex": lambda pattern: lark.rule(_regex(pattern, field)),
        "grammar": lambda grammar: _nested_rule(lark, grammar, field),
    }
    return tags_rule(lark, text, parts, field)


def _regex(pattern: str, field: str) -> str:
    _check_text(pattern, field)
    if "\0" in pattern:
        raise RequestError(f"{field}: the regular expression has a character NUL.", field)
    try:
        return regex(pattern)
    except ValueError as error:
        raise RequestError(f"{field}: the regular expression is wrong: {error}.", field) from None


def _check_text(text: str, field: str) -> None:
    if len(text) > MAX_CHARS:
        raise RequestError(f"{field} has more than {MAX_CHARS} characters.", field)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError(f"{field} has half a surrogate pair.", field) from None
