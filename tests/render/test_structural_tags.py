"""Structural tags in both notations: which texts they accept."""

import json
import time
from typing import Any

import pytest

from quire.base.errors import RequestError
from quire.base.requests.structured_outputs import StructuredOutputsParams
from quire.render.grammars.structured import grammar_of
from tests.support.render.grammar_matching import ADDED, takes, with_tokens

ANY = {"type": "any_text"}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(*tags: Any, **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": tags} | more


def grammar(node: Any) -> str:
    whole = node if "structures" in node else {"type": "structural_tag", "format": node}
    return grammar_of(StructuredOutputsParams(structural_tag=json.dumps(whole)), ADDED)


A, B = tag("<a>", NUMBER, "</a>"), tag("<b>", ANY, "</b>")
OLD = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "integer"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
CASES: list[tuple[str, Any, list[str], list[str]]] = [
    ("old", OLD, ["", "hi", "x <f=a>{}</f> y <f=b>3</f>", "<<f=b>3</f><f"],
     ["<f=", "<f=c>", "<f=b>x", "<f=b>3</f", "hi <f=b>3</f> <f=a"]),
    ("const", {"type": "const_string", "value": 'a"\n'}, ['a"\n'], ["a", ""]),
    ("any", ANY, ["", "a\nb <x>"], []),
    ("regex", {"type": "regex", "pattern": "[ab]c"}, ["ac"], ["c"]),
    ("grammar", {"type": "grammar", "grammar": 'start: "x"+'}, ["xx"], [""]),
    ("excludes", ANY | {"excludes": ["bad", "no"]}, ["", "fine ba d"], ["is bad", "no", "xbadx"]),
    ("tag", B, ["<b></b>", "<b>x</a></b>"], ["<b>", "x", "<b></b>x", "<b></b></b>"]),
    ("tag with ends", tag("<", ANY, ["|", ">"]), ["<a>", "<a|"], ["<a", "<a>>"]),
    ("a token's text is excluded", ANY | {"excludes": ["<|tool|>"]}, ["", "<|tool"],
     ["<|tool|>", "a <|tool|> b"]),
    ("tag that excludes", tag("<", ANY | {"excludes": ["no"]}, ">"), ["<ok>"], ["<no>", "<xno>"]),
    ("sequence", {"type": "sequence", "elements": [B, NUMBER]}, ["<b>x</b>12"], ["12", "<b>x</b>"]),
    ("or", {"type": "or", "elements": [NUMBER, {"type": "const_string", "value": "no"}]},
     ["1", "no"], ["", "nono"]),
    ("or in a tag", tag("<", {"type": "or", "elements": [NUMBER, ANY]}, ">"),
     ["<1>", "<x>", "<>"], ["<1", "<1>>"]),
    ("tag without an end", tag("<", ANY, ""), ["<", "<x"], ["x"]),
    ("optional", {"type": "optional", "content": NUMBER}, ["", "7"], ["x"]),
    ("star", {"type": "star", "content": A}, ["", "<a>1</a><a>2</a>"], ["<a>"]),
    ("plus", {"type": "plus", "content": A}, ["<a>1</a><a>2</a>"], [""]),
    ("repeat", {"type": "repeat", "min": 1, "max": 2, "content": A},
     ["<a>1</a>", "<a>1</a><a>2</a>"], ["", "<a>1</a><a>2</a><a>3</a>"]),
    ("triggered", triggered(A, B), ["", "x", "x<a>1</a>y<b>z</b>", "<"],
     ["<a", "<b>x", "<a>x</a>"]),
    ("at least one", triggered(A, B, at_least_one=True), ["<a>1</a>", "<a>1</a> x <b>yy</b> z"],
     ["x<a>1</a>", "", "<a>1</a> <a"]),
    ("stop after first", triggered(A, B, stop_after_first=True),
     ["<a>1</a>", "x<a>1</a>", "x", "x<b>d</b>"], ["<a>1</a> x", "<a>1</a><b>", "<a"]),
    ("just one", triggered(A, B, stop_after_first=True, at_least_one=True),
     ["<a>1</a>", "<b>d</b>"], ["<a>1</a> x", "", "x<a>1</a>"]),
    ("triggered in a tag", tag("<x>", triggered(A), "</x>"), ["<x></x>", "<x>t<a>1</a>u</x>"],
     ["<x><a>1</a>", "<x><a></x>", "<x></x></x>"]),
    ("separated", {"type": "tags_with_separator", "tags": [A], "separator": ","},
     ["", "<a>1</a>", "<a>1</a>,<a>2</a>"], ["<a>1</a>,", ",", "<a>1</a><a>2</a>"]),
    ("separated, one", {"type": "tags_with_separator", "tags": [A], "separator": ",",
     "at_least_one": True, "stop_after_first": True}, ["<a>1</a>"], ["", "<a>1</a>,<a>2</a>"]),
]  # fmt: skip


@pytest.mark.parametrize(("node", "good", "bad"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_structural_tags_accept_only_matching_texts(
    node: Any, good: list[str], bad: list[str]
) -> None:
    found = grammar(node)
    assert [text for text in good if not takes(found, text)] == []
    assert [text for text in bad if takes(found, text)] == []


def test_special_tokens_match_as_tokens_and_not_as_text() -> None:
    """The tokens are delimiters, triggers and constants."""
    wrapped = tag("\n<|tool|>", ANY, ["\n<|/tool|>!", "."])
    found = grammar(wrapped)
    assert takes(found, with_tokens("\n", "<|tool|>", "x\n", "<|/tool|>", "!"))
    assert takes(found, with_tokens("\n", "<|tool|>", "x."))
    assert not takes(found, with_tokens("\n", "<|tool|>", "x", "<|/tool|>", "!"))
    assert not takes(found, "\n<|tool|>x\n<|/tool|>!")
    call = triggered(tag("<|tool|>f:", NUMBER, "<|/tool|>")) | {"triggers": ["<|tool|>"]}
    found = grammar(call)
    assert takes(found, with_tokens("hi", "<|tool|>", "f:1", "<|/tool|>", "bye"))
    assert not takes(found, with_tokens("hi", "<|tool|>", "g:1", "<|/tool|>", "bye"))


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"type": "token"}, "'token' is not supported"),
        ({"type": "json_schema"}, "json_schema needs json_schema, an object"),
        (NUMBER | {"style": "qwen_xml"}, "'qwen_xml' is not supported"),
        ({"type": "sequence", "elements": [ANY, NUMBER]}, "any_text must come last"),
        ({"type": "sequence", "elements": [{"type": "or", "elements": [ANY, A]}, A]}, "come last"),
        ({"type": "star", "content": triggered(A)}, "triggered_tags must come last"),
        (triggered(tag("<a>", ANY, "")), "any_text must come last"),
        ({"type": "sequence", "elements": []}, "not empty"),
        ({"type": "or"}, "needs elements, a list"),
        (triggered(tag("[c]", ANY, "x")), "no trigger"),
        (triggered(), "not empty"),
        (triggered(A, triggers=[""]), "triggers, a list of texts that are not empty"),
        (tag("<", ANY, 5), "needs end"),
        ({"type": "repeat", "min": 2, "max": 1, "content": A}, "min <= max"),
        (ANY | {"max_tokens": 5}, "max_tokens is not supported"),
        ("text", "an object"),
        ({"structures": [{"begin": "<f>", "end": ""}], "triggers": ["<f"]}, "json_schema, an obj"),
        ({"structures": 5, "triggers": ["<f"]}, "structures, a list"),
    ],
)
def test_malformed_tags_are_rejected(node: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        grammar(node)
    assert raised.value.field == "structured_outputs"


def test_tag_with_a_huge_grammar_is_rejected_before_it_is_built() -> None:
    """The grammar would combine each of 6000 formats with each of 6000 ends."""
    node = tag("<", {"type": "or", "elements": [ANY] * 6000}, ["ab"] * 6000)
    begun = time.process_time()
    with pytest.raises(RequestError, match="use a smaller"):
        grammar(node)
    assert time.process_time() - begun < 2.0
