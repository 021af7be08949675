"""The cost of a body is bounded before it is parsed: counts, not times."""

import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from starlette.testclient import TestClient

from quire.serve.bodies import counts, reading
from quire.serve.bodies.protocol import ChatCompletionRequest, CompletionRequest
from quire.serve.errors import ApiError, ShortRepr
from quire.serve.native.prefixes import PrefixBody
from quire.serve.native.utility import DetokenizeBody, TokenizeBody

JSON = {"Content-Type": "application/json"}
HARD = st.text(st.sampled_from('"\\[]{},:eé🦊\\u'), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | HARD,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(HARD, inner, max_size=4),
    max_leaves=20,
)
CASES: list[tuple[type[BaseModel], str, Any, int]] = [
    (CompletionRequest, "stop", 1, 16),
    (CompletionRequest, "bad_words", 1, 256),
    (CompletionRequest, "stop_token_ids", "a", 1024),
    (CompletionRequest, "allowed_token_ids", "a", 1 << 19),
    (ChatCompletionRequest, "messages", 1, 4096),
    (ChatCompletionRequest, "tools", 1, 128),
    (ChatCompletionRequest, "documents", 1, 1024),
    (TokenizeBody, "messages", 1, 4096),
    (TokenizeBody, "tools", 1, 128),
    (PrefixBody, "messages", 1, 4096),
    (PrefixBody, "tools", 1, 128),
    (DetokenizeBody, "tokens", "a", 1 << 20),
]
MAPS: list[tuple[type[BaseModel], str, int, int]] = [
    (CompletionRequest, "logit_bias", 1024, 2),
    (CompletionRequest, "stream_options", 16, 0),
    (CompletionRequest, "kv_transfer_params", 64, 0),
    (ChatCompletionRequest, "chat_template_kwargs", 256, 0),
    (TokenizeBody, "chat_template_kwargs", 256, 0),
    (PrefixBody, "chat_template_kwargs", 256, 0),
]


class Watched(list[Any]):
    """A list that counts the items that were read from it."""

    num_seen = 0

    def __iter__(self) -> Any:
        for item in super().__iter__():
            self.num_seen += 1
            yield item


def errors_of(model: type[BaseModel], field: str, value: Any) -> list[Any]:
    """Return the validation errors of this field."""
    try:
        model.model_validate({field: value})
    except ValidationError as error:
        return [item for item in error.errors() if item["loc"][0] == field]
    return []


@pytest.mark.parametrize(("model", "field", "wrong", "limit"), CASES)
def test_validation_stops_at_the_first_wrong_item(
    model: type[BaseModel], field: str, wrong: Any, limit: int
) -> None:
    [error] = errors_of(model, field, [wrong] * min(limit, 5000))
    assert error["loc"][:2] == (field, 0)


@pytest.mark.parametrize(("model", "field", "wrong", "limit"), CASES[:-1])
def test_list_length_is_checked_before_its_items(
    model: type[BaseModel], field: str, wrong: Any, limit: int
) -> None:
    items = Watched([wrong] * (limit + 1))
    [error] = errors_of(model, field, items)
    assert (error["type"], error["loc"]) == ("too_long", (field,))
    assert error["ctx"]["max_length"] == limit
    assert items.num_seen == 0


@pytest.mark.parametrize(("model", "field", "limit", "each"), MAPS)
def test_object_size_and_error_count_are_bounded(
    model: type[BaseModel], field: str, limit: int, each: int
) -> None:
    """each: number of errors for one wrong name and its value."""
    wrong = {f"x{index}": "x" for index in range(limit)}
    assert len(errors_of(model, field, wrong)) == limit * each
    [error] = errors_of(model, field, wrong | {"one": "more"})
    assert (error["type"], error["loc"]) == ("too_long", (field,))
    [error] = errors_of(model, field, {"a" * 257: 1})
    assert (error["type"], error["loc"]) == ("names_too_long", (field,))


def test_every_list_and_object_field_is_bounded(api: TestClient) -> None:
    """Fields come from the schema, so that new ones are covered. Only the counts of the whole body
    bound the `free` fields."""
    free = {"prompt", "prompts", "tokens", "token_ids", "input", "input_ids"}
    schemas = api.get("/openapi.json").json()["components"]["schemas"]
    bodies = [name for name in schemas if name.endswith(("Request", "Body"))]
    assert len(bodies) >= 5
    for name in bodies:
        for field, schema in schemas[name]["properties"].items():
            for kind in schema.get("anyOf", [schema]):
                if field not in free and kind.get("type") == "array":
                    assert "maxItems" in kind, (name, field)
                if field not in free and kind.get("type") == "object":
                    assert "maxProperties" in kind, (name, field)


@settings(deadline=None, max_examples=30)
@given(VALUES, st.booleans(), st.integers(1, 9))
def test_counts_match_the_parsed_value(value: Any, is_ascii: bool, piece_bytes: int) -> None:
    """For pieces of any size and for any text."""
    data = json.dumps(value, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts, "PIECE_BYTES", piece_bytes)
        for name, number in counted(value).items():
            patch.setattr(counts, name, number)
            counts.check_counts(data, "the body")
            patch.setattr(counts, name, number - 1)
            with pytest.raises(ApiError):
                counts.check_counts(data, "the body")
            patch.setattr(counts, name, 1 << 20)


def counted(value: Any) -> dict[str, int]:
    """Count by walking through the value. An empty list counts as one more value."""
    names = ("MAX_VALUES", "MAX_CONTAINERS", "MAX_TEXTS", "MAX_EXPONENTS")
    found = dict.fromkeys(names, 0)
    rest, found["MAX_VALUES"] = [value], 1
    while rest:
        item = rest.pop()
        found["MAX_TEXTS"] += isinstance(item, str)
        found["MAX_EXPONENTS"] += isinstance(item, bool)
        if isinstance(item, dict | list):
            found["MAX_CONTAINERS"] += 1
            found["MAX_VALUES"] += len(item) or 1
            rest += list(item.values()) if isinstance(item, dict) else item
        if isinstance(item, dict):
            found["MAX_TEXTS"] += len(item)
    return {name: number for name, number in found.items() if number}


@settings(deadline=None, max_examples=100)
@given(VALUES)
def test_read_json_matches_the_json_module(value: Any) -> None:
    for is_ascii in (True, False):
        data = json.dumps(value, ensure_ascii=is_ascii)
        read = reading.read_json(bytearray(data.encode()), "the body")
        assert json.dumps(read) == json.dumps(json.loads(data))  # True is not 1, nor 1.0


@pytest.mark.parametrize(
    "text", ["1e400", "-0.0", "1E5", "5e-324", "0.1", "1" * 30, "-" + "1" * 400, '"\\u0000"', "[]"]
)
def test_odd_numbers_match_the_json_module(text: str) -> None:
    assert repr(reading.read_json(text.encode(), "it")) == repr(json.loads(text))


LARGE = reading.SMALL_BYTES


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"[" + b"1," * counts.MAX_VALUES + b"1]", 413, "more than 786432 values"),
        (b"[" + b"[]," * (LARGE // 2) + b"1]", 413, "more than 32768 lists and objects"),
        (b"[" + b'"",' * (LARGE // 2) + b"1]", 413, "more than 131072 texts and names"),
        (b"[" + b"1e-9," * (LARGE // 4) + b"1]", 413, "more than 65536 booleans and numbers"),
        (b"[" * LARGE + b"]" * LARGE, 413, "lists and objects"),
        (b'{"prompt": "%s \xf0\x9f\xa6\x8a"}' % (b"a" * (8 << 20)), 413, "above U+FFFF"),
        (b'{"prompt": "%s \\ud83e\\udd8a"}' % (b"a" * (8 << 20)), 413, "above U+FFFF"),
        (b'{"prompt": "%s"' % (b"a" * LARGE), 400, "not valid JSON"),
        (b'{"prompt": "%s\xff"}' % (b"a" * LARGE), 400, "not UTF-8"),
        (b'{"prompt": "%s", "seed": NaN}' % (b"a" * LARGE), 400, "not valid JSON"),
        (b'{"prompt": "%s", "x": %s}' % (b"a" * LARGE, b"[" * 30_000), 400, "nested too deeply"),
        (b'{"seed": ' + b"9" * LARGE + b"}", 400, "not valid JSON"),
        (b'{"prompt": "a"%s}' % b"".join(b', "x%d": 1' % n for n in range(256)), 400, "257 fields"),
        (b'{"prompt": "a", "%s": 1}' % (b"x" * 257), 400, "a name has 257 characters"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_expensive_or_invalid_bodies_are_refused(
    api: TestClient, body: bytes, status: int, message: str
) -> None:
    """Searching for names similar to one of 16 MB would take minutes."""
    response = api.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == status
    assert message in response.json()["error"]["message"].replace("whose name has", "a name has")


def test_large_bodies_are_parsed_off_the_event_loop(
    api: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    read = reading.read_json

    def recorded(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return read(*arguments)

    monkeypatch.setattr(reading, "read_json", recorded)
    for num_chars in (1, reading.ON_LOOP_BYTES, 1):
        api.post("/tokenize", json={"prompt": "a" * num_chars})
    assert threads[0] == threads[2] != threads[1]


def test_short_repr_bounds_long_values() -> None:
    text = ShortRepr().repr({"a": ["x" * 10_000] * 1000, "b": "\x7f" * 1_000_000})
    assert len(text) < 1000
    assert ShortRepr().repr({"type": "json_object"}) == "{'type': 'json_object'}"
