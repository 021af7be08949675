"""Messages quoted in docs/operate/troubleshooting.md occur in the source in these words."""

import ast
import difflib
import functools
import re
from collections.abc import Iterator

from tests.structure.test_house import PACKAGE, ROOT, sources, tree_of

PAGE = ROOT / "docs" / "operate" / "troubleshooting.md"
FIRST_CELL = re.compile(r"^\| (`.*?)(?<!\\) \| ", re.MULTILINE)
QUOTE = re.compile(r"`([^`]+)`")
VALUE = "..."
# Placeholders of log messages, such as %s and %.1f.
PERCENT = re.compile(r"%[-+ #0]*[\d.]*[sdrfgx]")
MIN_MESSAGES = 25


def quoted() -> list[str]:
    """List the messages in the first cells of the page's tables."""
    tables = re.findall(r"^\| message .*?(?=\n\n|\Z)", PAGE.read_text("utf-8"), re.M | re.S)
    cells = [cell for table in tables for cell in FIRST_CELL.findall(table)]
    return [quote for cell in cells for quote in QUOTE.findall(cell)]


@functools.cache
def messages() -> tuple[str, ...]:
    """Return the texts of the package, with VALUE in place of each value."""
    found = {text for path in sources(PACKAGE) for text in _texts(tree_of(path))}
    return tuple(sorted(found))


def _texts(tree: ast.AST) -> Iterator[str]:
    nodes = list(ast.walk(tree))
    within = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = (
                part.value if isinstance(part, ast.Constant) else VALUE for part in node.values
            )
            yield re.sub(r"(?:\.\.\.){2,}", VALUE, "".join(map(str, parts)))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in within
        ):
            yield PERCENT.sub(VALUE, node.value)


def test_each_quoted_message_is_in_the_source() -> None:
    found = "\n".join(messages())
    missing = [quote for quote in quoted() if quote not in found]
    near = {quote: difflib.get_close_matches(quote, messages(), 1, 0.3) for quote in missing}
    assert not near, "the page quotes messages that quire does not write; the nearest are shown"


def test_page_quotes_many_messages_without_duplicates() -> None:
    quotes = quoted()
    assert len(quotes) >= MIN_MESSAGES and len(set(quotes)) == len(quotes)


def test_unknown_message_is_found() -> None:
    """The check must be able to fail."""
    found = "\n".join(messages())
    assert "cannot listen on ... port ..." in found
    assert "cannot listen on the port" not in found
