"""Arguments of calls: complete, truncated anywhere, or missing."""

import json
from typing import Any

import pytest

from quire.render.templates.conversation import arguments_object, arguments_text

WHOLE = {
    "city": 'K"ö\\ln \U0001f642 \n',
    "days": [1, -2.5e3, {"a": [], "b": None}],
    "x": {"y": True},
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", {}),
        (" ", {}),
        (None, {}),
        ("null", {}),
        ({"a": 1}, {"a": 1}),
        ('{"a": {"b": [1, 2]}}', {"a": {"b": [1, 2]}}),
        ('{"a": 1, "b": "cut of', {"a": 1, "b": "cut of"}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": "\\ud83d', {"a": ""}),
        ('{"a": "\\ud83d\\ude', {"a": ""}),
        ('{"a": "\\\\', {"a": "\\"}),
        ("{a: 1}", {"INVALID_JSON": "{a: 1}"}),
        ("{a: 1", {"INVALID_JSON": "{a: 1"}),
        ('{"a": oops', {"INVALID_JSON": '{"a": oops'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ([1], {"INVALID_JSON": "[1]"}),
        ("12", {"INVALID_JSON": "12"}),
        ("ls -l", {"INVALID_JSON": "ls -l"}),
        ("{}}", {"INVALID_JSON": "{}}"}),
        ('"', {"INVALID_JSON": '"'}),
    ],
)
def test_arguments_become_an_object(given: Any, expected: Any) -> None:
    assert arguments_object(given) == expected


@pytest.mark.parametrize("escapes", [True, False])
def test_truncated_arguments_keep_everything_before_the_cut(escapes: bool) -> None:
    text = json.dumps(WHOLE, ensure_ascii=escapes)
    before: dict[str, Any] = {}
    for end in range(1, len(text) + 1):
        found = arguments_object(text[:end])
        assert "INVALID_JSON" not in found, text[:end]
        assert len(found) >= len(before) and str(found).isprintable()
        str(found).encode()  # no lone surrogate
        before = found
    assert before == WHOLE


@pytest.mark.parametrize("given", ["[" * 100_000, '{"a":' * 100_000, '{"a": "' + "\\" * 100_000])
def test_hostile_arguments_do_not_raise(given: str) -> None:
    assert isinstance(arguments_object(given), dict)


def test_arguments_become_json_text() -> None:
    assert arguments_text({"a": "ö"}) == '{"a": "ö"}'
    assert arguments_text('{"a":1') == '{"a":1'
    assert [arguments_text(none) for none in (None, "", " ", "null", {})] == ["{}"] * 5
