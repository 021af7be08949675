"""Builder of one grammar, in llguidance's dialect of Lark.

    start: rule_1 rule_2
    rule_1: <[151667]> /(?s:.*)/
    rule_2: %json {"type": "object"}

One grammar describes the whole answer: reasoning, text, tool calls, structured content. Each part
adds rules and returns the name of its first rule. `text` adds the start rule.

A grammar must name an added token by its id. A quoted text matches ordinary tokens only, even if it
equals an added token's text. `literal` converts the marks of a format to token ids. `spelled`
writes users' texts, such as tool names and choices, as ordinary tokens.

A user's grammar has its own names, start rule and white space, so it becomes a separate grammar.
llguidance reads the grammars together as one JSON text. JSON schemas in a user's grammar get the
usual limit of white space unless they set their own.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from quire.base.errors import RequestError

MAX_CHARS = 1 << 20  # length of a whole grammar
_UNSAFE = re.compile(r"\\.|/|\n|\\\Z", re.DOTALL)
ANY_TEXT = "/(?s:.*)/"  # matches no added token
OPTIONS = "x-guidance"  # key of llguidance's options within a schema
# White space allowed between JSON tokens. A model that may repeat it for ever sometimes does.
WHITESPACE = r"(\r?\n)?[ \t]{0,16}"
_DECODER = json.JSONDecoder()
GBNF = "gbnf_grammar"  # key of a nested grammar that `grammar_worker.py` must convert to Lark

# Matches token names in angle brackets, schemas, and the texts that may contain such names without
# meaning them. An unclosed text ends with its line, so that the search takes linear time.
_NAMES = re.compile(
    r"""
    "(?:\\.|[^"\\\n])*"? | //[^\n]* | /(?:\\.|[^/\\\n])+/? | \#[^\n]* | (?P<name><[^<>\s\[\]]+>)
    | %json\s*(?P<schema>\{)
""",
    re.VERBOSE,
)


class Lark:
    """Collects rules and terminals. Raises RequestError beyond MAX_CHARS characters.

    added_tokens: from text to token id, for tokens that the tokenizer never produces from ordinary
    text, special or not."""

    def __init__(self, added_tokens: Mapping[str, int] | None = None) -> None:
        self._ids = dict(added_tokens or {})
        names = sorted(self._ids, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, names))) if names else None
        self._lines: list[str] = []
        self._nested: list[dict[str, str]] = []
        self._num_rules = self._num_chars = 0

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule and return its name. attributes: for example `max_tokens=100` or `lazy`."""
        return self._add("rule", body, attributes)

    def terminal(self, body: str) -> str:
        """Add a terminal, which is one lexeme, and return its name."""
        return self._add("TERMINAL", body, "")

    def json(self, schema: object) -> str:
        """Add a rule for JSON text that follows a schema; return its name."""
        return self.rule("%json " + json.dumps(schema))

    def literal(self, text: str) -> str:
        """Return the expression for exactly this text, with added tokens as token ids."""
        parts: list[str] = []
        done = 0
        for found in self._added.finditer(text) if self._added is not None else ():
            parts += _quoted(text[done : found.start()])
            parts.append(f"<[{self._ids[found.group()]}]>")
            done = found.end()
        parts += _quoted(text[done:])
        return " ".join(parts) or '""'

    def spelled(self, text: str) -> str:
        """Return the expression for exactly this text, spelled with ordinary tokens."""
        return " ".join(_quoted(text)) or '""'

    def until(self, ends: Sequence[str], free: str = ANY_TEXT) -> str:
        """Add rules for text up to and including the first of `ends`; return the first rule's name.

        free: expression for the text before the end."""
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

        but: added tokens to exclude; None excludes all added tokens.
        at_most: maximum number of tokens; None for no limit."""
        if at_most == 0:
            return '""'
        names = self._ids if but is None else [name for name in but if name in self._ids]
        ids = ",".join(str(self._ids[name]) for name in names)
        one = f"<[^{ids}]>" if ids else "<[*]>"
        return f"{one}*" if at_most is None else f"{one}{{0,{at_most}}}"

    def nested(self, text: str) -> str:
        """Add a whole grammar, as Lark or GBNF; return the expression that refers to it."""
        name = f"grammar_{len(self._nested) + 1}"
        if is_gbnf(text):
            self._nested.append({"name": name, GBNF: text})
        else:
            self._nested.append({"name": name, "lark_grammar": self._as_here(text)})
        return f"@{name}"

    def is_token(self, text: str) -> bool:
        """Return whether this text is one added token."""
        return text in self._ids

    def text(self, start: str) -> str:
        """Return the complete grammar with this expression as its start."""
        text = "\n".join(["%llguidance {}", f"start: {start}", *self._lines, ""])
        if not self._nested:
            return text
        return json.dumps({"grammars": [{"lark_grammar": text}, *self._nested]})

    def _as_here(self, text: str) -> str:
        """Replace names of added tokens by ids, and limit the white space of schemas.

        After an invalid schema no further schema is changed: the grammar is invalid, and each
        attempt would take time linear in the text."""
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
    """Return a regular expression of Rust's syntax as a terminal's expression.

    Raises ValueError if the pattern ends within an escape sequence."""

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
    """Return the text to insert after a schema's opening brace to limit its white space.

    Return None if the schema is not JSON."""
    try:
        schema, _ = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None
    if OPTIONS in schema:
        return ""
    own = json.dumps({OPTIONS: {"whitespace_pattern": WHITESPACE}})[1:-1]
    return f"{own}, " if schema else own


def is_gbnf(text: str) -> bool:
    """Return whether a grammar is in llama.cpp's notation (GBNF) instead of Lark's."""
    return "::=" in text and not re.search(r"(?m)^[^\S\n]*(%llguidance\b|[?!]?start\s*:[^:])", text)


def _quoted(text: str) -> list[str]:
    return [json.dumps(text, ensure_ascii=False)] if text else []
