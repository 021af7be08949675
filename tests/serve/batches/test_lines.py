"""Lines of batches: their fields, and lines that are rejected."""

import json
from typing import Any

import pytest

from quire.serve.batches.lines import (
    LineError,
    beginning_of,
    custom_id_of,
    id_of,
    parse_line,
)
from tests.support.serve.batch_files import request

URLS = ("/v1/completions", "/v1/chat/completions")


def parsed(**changes: Any) -> Any:
    return parse_line(json.dumps(request("a") | changes).encode(), URLS)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"no json", "invalid_json_line"),
        (b"[1]", "invalid_json_line"),
        (b'{"custom_id": "a"', "invalid_json_line"),
        (b'{"custom_id": "\xff"}', "invalid_json_line"),
        (b"{}", "missing_required_parameter"),
        (b'{"custom_id": 7}', "invalid_custom_id"),
        (b'{"custom_id": ""}', "invalid_custom_id"),
        (b'{"custom_id": "a", "method": "GET"}', "invalid_method"),
        (b'{"custom_id": "a", "method": "POST"}', "invalid_url"),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/other"}', "invalid_url"),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions"}', "invalid_body"),
        (
            b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": []}',
            "invalid_body",
        ),
        (
            b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": '
            + b"[" * 100_000
            + b"]" * 100_000
            + b"}",
            "invalid_json_line",
        ),
    ],
)
def test_invalid_line_has_an_error_code(line: bytes, code: str) -> None:
    with pytest.raises(LineError) as error:
        parse_line(line, URLS)
    assert error.value.code == code


def test_streaming_line_is_rejected() -> None:
    with pytest.raises(LineError, match="stream must be false"):
        parsed(body={"stream": True})
    assert parsed(body={"stream": False}).fields == {"stream": False}


@pytest.mark.parametrize(
    "body", ["{}", " { } ", '{"prompt": "{"}', '{"priority": -3, "a": {}}', '{"a": [1, 2.50]}']
)
def test_priority_replaces_that_of_the_body(body: str) -> None:
    text = f'{{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {body}}}'
    line = parse_line(text.encode(), URLS)
    assert line.body_of(None) == body.strip().encode()
    assert json.loads(line.body_of(5)) == json.loads(body) | {"priority": 5}


@pytest.mark.parametrize(
    ("fields", "number"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]], "best_of": 4, "n": 2}, 8),
        ({"beam_width": 5}, 5),
        ({"n": "many", "prompt": []}, 1),
        ({"n": -4}, 1),
    ],
)
def test_line_counts_its_sequences(fields: dict[str, Any], number: int) -> None:
    assert parsed(body=fields).num_sequences == number


def test_beginning_of_a_chat_has_salt_tools_and_messages_in_order() -> None:
    system = {"role": "system", "content": "You are a fox."}
    tools = [{"type": "function", "function": {"name": "f"}}]

    def begin(**body: Any) -> bytes:
        return beginning_of(parsed(url="/v1/chat/completions", body=body))

    one = begin(messages=[system, {"role": "user", "content": "one"}], temperature=0.5)
    two = begin(temperature=0.7, messages=[system, {"role": "user", "content": "two"}])
    assert one[:-3] == two[:-3] and one[-3:] == b"one" and b"You are a fox." in one
    parts = [{"type": "text", "text": "one"}]
    assert begin(messages=[system, {"role": "user", "content": parts}])[:20] == one[:20]
    assert begin(messages=[system], tools=tools).startswith(b"[{")
    assert begin(messages=[system], tools=tools, cache_salt="s").startswith(b"s")
    assert begin(messages=[3]) == begin(messages=7) == b""
    assert len(begin(messages=[{"role": "user", "content": "x" * 100_000}])) == 1 << 16


def test_beginning_of_a_prompt_is_its_text_or_token_ids() -> None:
    assert beginning_of(parsed(body={"prompt": "The sea"})) == b"The sea"
    assert beginning_of(parsed(body={"prompt": [1, 2]})) == b"[1,2]"


def test_id_depends_on_content_line_number_and_model() -> None:
    found = {id_of(b"a", 1, "m"), id_of(b"a", 2, "m"), id_of(b"b", 1, "m"), id_of(b"a", 1, "n")}
    assert len(found) == 4
    assert id_of(b"a", 1, "m") == id_of(b"a\r\n", 1, "m")


def test_custom_id_is_found_in_invalid_lines() -> None:
    assert custom_id_of(b'{"custom_id": "a", "method": 3}') == "a"
    assert custom_id_of(b'{"custom_id": 3}') is None
    assert custom_id_of(b"no json") is None
