"""Flags for single fields of JSON settings."""

import json

import pytest

from quire.base.errors import ConfigError
from quire.cli.config_file import resolve
from quire.cli.main import _parse, main
from quire.cli.options.json_flags import join_parts

NAMES = ("one", "two_words")


def joined(*words: str) -> list[str]:
    return join_parts(words, NAMES, ["--one.known"])


def test_field_flags_are_joined_after_the_other_flags() -> None:
    found = joined(
        "MODEL", "--one.a", "1", "--two-words.b-c=text", "--port", "5", "--one.d.e", "[1, null]",
        "--one.d.f", "true",
    )  # fmt: skip
    assert found[:3] == ["MODEL", "--port", "5"]
    assert dict(zip(found[3::2], map(json.loads, found[4::2]), strict=True)) == {
        "--one": {"a": 1, "d": {"e": [1, None], "f": True}},
        "--two-words": {"b_c": "text"},
    }


def test_field_flags_override_the_whole_setting() -> None:
    whole = '{"a": 1, "d": {"e": 1, "g": 2}}'
    for words in (["--one", whole], [f"--one={whole}"]):
        found = joined(*words, "--one.d.e", "7")
        assert json.loads(found[-1]) == {"a": 1, "d": {"e": 7, "g": 2}}
    assert joined("--one", "no json", "--one.a", "1")[-1] == '{"a": 1}'


@pytest.mark.parametrize(
    "words",
    [
        ["--other.a", "1"],
        ["--one.known", "1"],
        ["--", "--one.a", "1"],
        ["--one", '{"a": 1}'],
        ["--port=--one.a"],
    ],
)
def test_other_words_are_unchanged(words: list[str]) -> None:
    assert joined(*words) == words


def test_words_after_two_dashes_stay_last() -> None:
    assert joined("--one.a", "1", "--", "--one.b", "2") == [
        "--one", '{"a": 1}', "--", "--one.b", "2",
    ]  # fmt: skip


def test_missing_values_and_conflicts_are_refused() -> None:
    with pytest.raises(ConfigError, match="--one.a needs a value"):
        joined("--one.a")
    with pytest.raises(ConfigError, match="a.b is a part of a, which is set to 1"):
        joined("--one.a", "1", "--one.a.b", "2")


def test_commands_accept_field_flags(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = _parse(
        ["serve", "--speculative_config.method", "ngram", "--hf-overrides.rope_theta=1e6",
         "--speculative-config.num_speculative_tokens", "3"]
    )  # fmt: skip
    assert resolve(arguments) == []
    assert {name: json.loads(each.value) for name, each in arguments.settings.items()} == {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "hf_overrides": {"rope_theta": 1e6},
    }
    assert "is ignored" in resolve(_parse(["serve", "--compilation-config.level", "3"]))[0]
    assert main(["serve", "--speculative-config.method"]) == 1
    assert "needs a value" in capsys.readouterr().err
