"""Values of settings as texts: lists, JSON objects, and words for numbers."""

import pytest

from quire.base.errors import ConfigError
from quire.base.settings.fields import json_object, list_of, number_of


def test_a_list_may_be_json() -> None:
    assert list_of("names", "one") == ["one"]
    assert list_of("names", '["one", "two"]') == ["one", "two"]
    for wrong in ("[", "[1]", '["one", null]'):
        with pytest.raises(ConfigError, match="names must be"):
            list_of("names", wrong)


def test_an_object_is_json() -> None:
    assert json_object("config", None) == {}
    assert json_object("config", '{"a": 1}') == {"a": 1}
    for wrong in ("", "[1]", "{", "[" * 100_000):
        with pytest.raises(ConfigError, match="config must be a JSON object"):
            json_object("config", wrong)


def test_a_word_stands_for_a_number() -> None:
    assert number_of("length", "auto", {"auto": -1}) == -1
    assert number_of("length", 5, {"auto": -1}) == 5
    with pytest.raises(ConfigError, match="length must be a number or auto"):
        number_of("length", "five", {"auto": -1})
