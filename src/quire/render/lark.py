"""A grammar in the making, in llguidance's dialect of Lark.

    start: rule_1 rule_2
    rule_1: <[151667]> /(?s:.*)/
    rule_2: %json {"type": "object"}

One grammar says what the whole answer is: reasoning, text, calls of tools, structured content. Each
part adds rules here and returns the name of its first one; `text` puts a start before them.

An added token must be named as a token, wherever it stands: its text, written as text, never
matches it, and where a text could only end so llguidance forces the token and then rejects it.
`literal` is the one place that does this.
"""

import json
import re
from collections.abc import Mapping


class Lark:
    """added_tokens: text -> token id of the tokens that the tokenizer never makes of ordinary text
    (special or not)."""

    def __init__(self, added_tokens: Mapping[str, int] | None = None) -> None:
        self._ids = dict(added_tokens or {})
        names = sorted(self._ids, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, names))) if names else None
        self._lines: list[str] = []
        self._num_rules = 0

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule; returns its name. attributes: such as `max_tokens=100`, or `lazy`."""
        return self._add("rule", body, attributes)

    def terminal(self, body: str) -> str:
        """Add a terminal: one lexeme; returns its name."""
        return self._add("TERMINAL", body, "")

    def json(self, schema: object) -> str:
        """Add a rule for a text of JSON that a schema describes; returns its name."""
        return self.rule("%json " + json.dumps(schema))

    def literal(self, text: str) -> str:
        """Return the expression that is just this text; added tokens in it are tokens."""
        parts: list[str] = []
        done = 0
        for found in self._added.finditer(text) if self._added is not None else ():
            parts += _quoted(text[done : found.start()])
            parts.append(f"<[{self._ids[found.group()]}]>")
            done = found.end()
        parts += _quoted(text[done:])
        return " ".join(parts) or '""'

    def is_token(self, text: str) -> bool:
        """Tell whether this text is one added token."""
        return text in self._ids

    def text(self, start: str) -> str:
        """Return the grammar whose start is this expression."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._lines, ""])

    def _add(self, kind: str, body: str, attributes: str) -> str:
        self._num_rules += 1
        name = f"{kind}_{self._num_rules}"
        shown = f"[{attributes}]" if attributes else ""
        self._lines.append(f"{name}{shown}: {body}")
        return name


def _quoted(text: str) -> list[str]:
    return [json.dumps(text, ensure_ascii=False)] if text else []
