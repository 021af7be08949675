"""The grammar builder: literals, tokens, texts up to an end, and nested grammars."""

import json
import time

import pytest

from quire.render.grammars.lark import WHITESPACE, Lark, is_gbnf, regex
from tests.support.render.grammar_matching import ADDED, takes, with_tokens


def test_literals_are_split_at_added_tokens() -> None:
    lark = Lark(ADDED)
    found = lark.text(lark.literal('a "b"\n<|tool|><|/tool|>c'))
    assert takes(found, with_tokens('a "b"\n', "<|tool|>", "<|/tool|>", "c"))
    assert not takes(found, 'a "b"\n<|tool|><|/tool|>c')
    assert Lark(ADDED).literal("") == '""'
    assert Lark().literal("<|tool|>") == '"<|tool|>"'


def test_until_ends_at_the_first_end() -> None:
    lark = Lark(ADDED)
    found = lark.text(lark.until(["</a>", "\n<|/tool|>."]) + ' "x"')
    assert takes(found, "some <a></a>x")
    assert not takes(found, "</a></a>x")
    assert takes(found, with_tokens("some\n", "<|/tool|>", ".x"))
    assert not takes(found, with_tokens("some", "<|/tool|>", ".x"))
    assert not takes(found, "some")


@pytest.mark.parametrize(
    ("text", "gbnf"),
    [
        ('root ::= "a"', True), ('start: "::="', False), ('?start : a\na: "b"', False),
        ('begin: "a"', False), ('root::=start\nstart ::= "a"', True),
        ('%llguidance {}\nstart: "::="', False),
    ],
)  # fmt: skip
def test_gbnf_is_distinguished_from_lark(text: str, gbnf: bool) -> None:
    assert is_gbnf(text) is gbnf


def test_regex_with_an_unpaired_backslash_at_its_end_is_rejected() -> None:
    assert regex(r"a\\") == r"/a\\/"
    with pytest.raises(ValueError, match="backslash"):
        regex("a\\\\\\")


BOUND = json.dumps({"whitespace_pattern": WHITESPACE})


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('start: %json {"type": "object"}', 'start: %json {"x-guidance": BOUND, "type": "object"}'),
        ("start: a\na: %json{}", 'start: a\na: %json{"x-guidance": BOUND}'),
        ('start: %json {"x-guidance": {}}', 'start: %json {"x-guidance": {}}'),
        ('start: "%json {}" /%json {}/ // %json {}', 'start: "%json {}" /%json {}/ // %json {}'),
        ('start: %json {"const": "%json {}"', 'start: %json {"const": "%json {}"'),
        ("start: %json [1]", "start: %json [1]"),
    ],
)
def test_whitespace_in_the_schemas_of_a_grammar_is_bounded(text: str, read: str) -> None:
    """A schema that sets x-guidance options is unchanged."""
    lark = Lark()
    found = json.loads(lark.text(lark.nested(text)))["grammars"][1]["lark_grammar"]
    assert found == read.replace("BOUND", BOUND)


@pytest.mark.parametrize(
    "text", ['\\"' * 99_999, "\\/" * 99_999, "::=" + "\n" * 199_999, "%json {" * 39_999]
)
def test_a_grammar_is_read_in_linear_time(text: str) -> None:
    begun = time.process_time()
    Lark({"<x>": 5}).nested(text)
    assert time.process_time() - begun < 2.0
