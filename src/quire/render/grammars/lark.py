"""A grammar in the making, in llguidance's dialect of Lark.

    start: rule_1 rule_2
    rule_1: <[151667]> /(?s:.*)/
    rule_2: %json {"type": "object"}

One grammar says what the whole answer is: reasoning, text, calls of tools, structured content. Each
part adds rules here and returns the name of its first one; `text` puts a start before them.

An added token must be named as a token, wherever it stands: its text, written as text, is spelled
with ordinary tokens and never matches it. `literal` names the tokens of a format's marks, `spelled`
writes what users give: the names of tools, choices, values.

A grammar that somebody else wrote has names, a start and white space of its own: it becomes a
grammar beside this one, and all of them together are JSON, which llguidance reads as well. Where it
describes JSON without saying what white space may be, that is bounded as everywhere else.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from quire.base.errors import RequestError

MAX_CHARS = 1 << 20  # of a whole grammar
_UNSAFE = re.compile(r"\\.|/|\n|\\\Z", re.DOTALL)
ANY_TEXT = "/(?s:.*)/"  # no added token is in it
OPTIONS = "x-guidance"  # of a schema, for llguidance
# Between tokens of JSON: one line break, and an indentation of 16 at most. A model that may write
# white space for ever sometimes does.
WHITESPACE = r"(\r?\n)?[ \t]{0,16}"
_DECODER = json.JSONDecoder()
GBNF = "gbnf_grammar"  # of a nested grammar that is not Lark yet (`grammar_worker.py`)

# What may hold a name in angle brackets without naming a token, or is one that does; and schemas.
# What nothing ends goes on to the end of its line, so that every character is read once.
_NAMES = re.compile(
    r"""
    "(?:\\.|[^"\\\n])*"? | //[^\n]* | /(?:\\.|[^/\\\n])+/? | \#[^\n]* | (?P<name><[^<>\s\[\]]+>)
    | %json\s*(?P<schema>\{)
""",
    re.VERBOSE,
)


class Lark:
    """added_tokens: text -> token id of the tokens that the tokenizer never makes of ordinary text
    (special or not). Raises RequestError as soon as it has more than MAX_CHARS characters."""

    def __init__(self, added_tokens: Mapping[str, int] | None = None) -> None:
        self._ids = dict(added_tokens or {})
        names = sorted(self._ids, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, names))) if names else None
        self._lines: list[str] = []
        self._nested: list[dict[str, str]] = []
        self._num_rules = self._num_chars = 0

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

    def spelled(self, text: str) -> str:
        """Return the expression that is just this text, also where it equals an added token."""
        return " ".join(_quoted(text)) or '""'

    def until(self, ends: Sequence[str], free: str = ANY_TEXT) -> str:
        """Add rules for any text up to the first of these ends, and that end. free: the terminal's
        expression of the text before it. Return the first rule's name."""
        parts, plain = [], []
        for end in ends:
            found = None if self._added is None else self._added.search(end)
            if found is None:
                plain.append(self.spelled(end))
                continue
            before = self.terminal(" ".join([free, *_quoted(end[: found.start()])]))
            parts.append(f"{before} {self.literal(end[found.start() :])}")
        if plain:
            parts.append(self.rule(self.terminal(f"{free} ({' | '.join(plain)})"), "lazy"))
        return self.rule(" | ".join(parts))

    def tokens(self, but: Iterable[str] | None = None, at_most: int | None = None) -> str:
        """Return the expression for any number of tokens.

        but: added tokens that are not among them; None: no added token is. at_most: the number.
        """
        if at_most == 0:
            return '""'
        names = self._ids if but is None else [name for name in but if name in self._ids]
        ids = ",".join(str(self._ids[name]) for name in names)
        one = f"<[^{ids}]>" if ids else "<[*]>"
        return f"{one}*" if at_most is None else f"{one}{{0,{at_most}}}"

    def nested(self, text: str) -> str:
        """Add a whole grammar, in llguidance's dialect of Lark or as GBNF; returns the expression
        for what it describes."""
        name = f"grammar_{len(self._nested) + 1}"
        if is_gbnf(text):
            self._nested.append({"name": name, GBNF: text})
        else:
            self._nested.append({"name": name, "lark_grammar": self._as_here(text)})
        return f"@{name}"

    def is_token(self, text: str) -> bool:
        """Tell whether this text is one added token."""
        return text in self._ids

    def text(self, start: str) -> str:
        """Return the grammar whose start is this expression."""
        text = "\n".join(["%llguidance {}", f"start: {start}", *self._lines, ""])
        if not self._nested:
            return text
        return json.dumps({"grammars": [{"lark_grammar": text}, *self._nested]})

    def _as_here(self, text: str) -> str:
        """Return a grammar with the names of added tokens, as in `<|im_end|>`, as their ids, and
        with bounds of white space in its schemas. Behind a schema that is none nothing is looked
        at: the grammar is wrong, and each try would look through all that is before it."""
        is_right = True

        def changed(found: re.Match[str]) -> str:
            nonlocal is_right
            if found["schema"]:
                more = _whitespace_of(text, found.start("schema")) if is_right else None
                is_right = more is not None
                return found.group() + (more or "")
            token_id = self._ids.get(found["name"] or "")
            return found.group() if token_id is None else f"<[{token_id}]>"

        return _NAMES.sub(changed, text)

    def _add(self, kind: str, body: str, attributes: str) -> str:
        self._num_rules += 1
        self._num_chars += len(body)
        if self._num_chars > MAX_CHARS:
            raise RequestError(
                f"the constraint gives a grammar of more than {MAX_CHARS} characters; use a"
                " smaller one."
            )
        name = f"{kind}_{self._num_rules}"
        shown = f"[{attributes}]" if attributes else ""
        self._lines.append(f"{name}{shown}: {body}")
        return name


def regex(pattern: str) -> str:
    """Return the terminal's expression of a regular expression, in the syntax of Rust's. Raise
    ValueError for one that ends in the middle of an escape."""

    def safe(found: re.Match[str]) -> str:
        match found.group():
            case "/":
                return r"\/"
            case "\n" | "\\\n":
                return r"\n"
            case "\\":
                raise ValueError("it ends with half an escape sequence, a backslash")
            case escape:
                return escape

    return f"/{re.sub(_UNSAFE, safe, pattern)}/" if pattern else '""'


def _whitespace_of(text: str, begin: int) -> str | None:
    """Return what is to be put behind the brace that begins a schema, to bound its white space;
    None if it is no JSON."""
    try:
        schema, _ = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None
    if OPTIONS in schema:
        return ""
    own = json.dumps({OPTIONS: {"whitespace_pattern": WHITESPACE}})[1:-1]
    return f"{own}, " if schema else own


def is_gbnf(text: str) -> bool:
    """Tell a grammar in the notation of llama.cpp from one in Lark's."""
    return "::=" in text and not re.search(r"(?m)^[^\S\n]*(%llguidance\b|[?!]?start\s*:[^:])", text)


def _quoted(text: str) -> list[str]:
    return [json.dumps(text, ensure_ascii=False)] if text else []
