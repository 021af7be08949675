"""/v1/stream in this process: prompts in pieces, refused messages, and the ends of requests.

Covers `serve/native/open_request.py`.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient, WebSocketDenialResponse, WebSocketTestSession
from starlette.websockets import WebSocketDisconnect

from quire.serve.app import create_app
from quire.serve.context import ApiContext
from tests.serve.api.conftest import MakeContext
from tests.support.processes.servers import wait_until
from tests.support.serve.direct_engine import text_of, twin

PATH = "/v1/stream"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
START = {"type": "start", **GREEDY}
STORY = "Once upon a time, there was a little fox. It lived in the woods, and one day it"


@pytest.fixture
def ws(api: TestClient) -> Iterator[WebSocketTestSession]:
    with api.websocket_connect(PATH) as found:
        yield found


def receive_all(ws: WebSocketTestSession) -> list[Any]:
    """Return all messages until a request has ended, including `started`."""
    found = [ws.receive_json()]
    while found[-1]["type"] not in ("done", "error"):
        found.append(ws.receive_json())
    return found


def text(messages: list[Any]) -> str:
    assert messages[0]["type"] == "started" and messages[-1]["type"] == "done", messages
    chunks = [choice for message in messages[1:-1] for choice in message["choices"]]
    assert chunks[-1]["finish_reason"] == "length"
    return "".join(chunk["text"] for chunk in chunks)


def error_of(ws: WebSocketTestSession) -> Any:
    *_, last = receive_all(ws)
    return last["error"]


def send_pieces(ws: WebSocketTestSession, pieces: list[Any], **fields: Any) -> None:
    ws.send_json(START | fields)
    for piece in pieces:
        ws.send_json({"type": "append", "prompt": piece})
    ws.send_json({"type": "end"})


# ---- responses ---------------------------------------------------------------------------------


def test_text_in_pieces_gives_the_output_of_the_whole_text(ws: WebSocketTestSession) -> None:
    """Six requests on one connection, cut at random."""
    rng, expected = random.Random(3), text_of(STORY, max_tokens=12, ignore_eos=True)
    for _ in range(6):
        cuts = sorted({0, len(STORY), *rng.choices(range(len(STORY)), k=rng.randint(0, 9))})
        pieces = [STORY[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
        send_pieces(ws, pieces)
        assert text(receive_all(ws)) == expected


def test_token_and_text_pieces_can_be_mixed(ws: WebSocketTestSession) -> None:
    encode = twin().renderer.tokenizer.encode
    expected = text_of(STORY, max_tokens=12, ignore_eos=True)
    token_ids = encode(STORY)
    send_pieces(ws, [token_ids[:5], token_ids[5:6], token_ids[6:]])
    assert text(receive_all(ws)) == expected
    half = STORY.index(" It lived")
    send_pieces(ws, [STORY[:half], encode(STORY[half:])])
    assert text(receive_all(ws)) == expected
    send_pieces(ws, [encode(STORY[:half]), STORY[half:]])
    assert text(receive_all(ws)) == expected


def test_single_piece_prompt_matches_completions(api: TestClient, ws: WebSocketTestSession) -> None:
    body = GREEDY | {"prompt": STORY, "seed": 5, "temperature": 0.9, "logprobs": 2}
    whole = api.post("/v1/completions", json=body).json()
    for pieces in ([{"type": "start", **body, "last": True}], [{"type": "start", **body},
                   {"type": "append", "last": True}]):  # fmt: skip
        for message in pieces:
            ws.send_json(message)
        messages = receive_all(ws)
        assert text(messages) == whole["choices"][0]["text"]
        assert messages[-2]["usage"] == whole["usage"] | {
            "prompt_tokens_details": messages[-2]["usage"]["prompt_tokens_details"]
        }


def test_chunks_have_the_completions_format_and_total_usage(ws: WebSocketTestSession) -> None:
    token_ids = list(range(100, 140))
    ws.send_json(START | {"prompt": token_ids[:30], "return_token_ids": True, "max_tokens": 3})
    ws.send_json({"type": "append", "prompt": token_ids[30:], "last": True})
    started, first, *middle, usage, done = receive_all(ws)
    assert started == {"type": "started", "id": first["id"], "model": "demo"}
    assert done == {"type": "done", "id": first["id"]}
    assert first["object"] == "text_completion" and first["id"].startswith("cmpl-")
    assert first["choices"][0]["prompt_token_ids"] == token_ids
    num_tokens = sum(len(chunk["choices"][0]["token_ids"]) for chunk in [first, *middle])
    assert num_tokens == 3
    assert usage["choices"] == [] and usage["type"] == "chunk"
    assert usage["usage"]["prompt_tokens"] == 40
    assert usage["usage"]["completion_tokens"] == 3


def test_default_max_tokens_fills_the_context(ws: WebSocketTestSession) -> None:
    ws.send_json({"type": "start", "ignore_eos": True, "prompt": [5] * 480})
    ws.send_json({"type": "append", "prompt": [6] * 10})
    ws.send_json({"type": "end"})
    *_, usage, _ = receive_all(ws)
    assert usage["usage"]["completion_tokens"] == 512 - 490


def test_pieces_are_computed_before_the_prompt_ends(
    api_context: ApiContext, ws: WebSocketTestSession
) -> None:
    """All but the last token and the text that the tokenizer still withholds."""
    ws.send_json(START | {"prompt": STORY})
    ws.receive_json()
    scheduler = api_context.client.engine.client.core.scheduler
    num_known = len(twin().renderer.tokenizer.encode(STORY.rpartition(" ")[0]))
    wait_until(lambda: [s.num_computed_tokens for s in scheduler.lifecycle.sequences.values()]
               == [num_known - 1])  # fmt: skip
    ws.send_json({"type": "end"})
    assert receive_all(ws)[-1]["type"] == "done"


# ---- refused messages --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"echo": True}, "echo"),
        ({"stream": False}, "stream"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"max_token": 5}, "max_token"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 512}, "max_tokens"),
        ({"model": "other"}, "model"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [{"role": "user"}]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, None),
        ({"prompt": [10**30]}, None),
        ({"prompt": "a \ud800 b c"}, None),
        ({"prompt": "x" * 200_000}, "prompt"),
        ({"prompt": [5] * 512}, "prompt"),
        ({"last": 1}, "last"),
        ({"last": True}, "prompt"),
        ({"\ud800": 1}, None),
    ],
)
def test_wrong_start_is_an_error_and_keeps_the_connection(
    api_context: ApiContext, ws: WebSocketTestSession, fields: dict[str, Any], param: str | None
) -> None:
    """Messages that follow the wrong start are dropped until the next start."""
    ws.send_text(as_json(START | fields))
    for _ in range(3):
        ws.send_json({"type": "append", "prompt": "more"})
    ws.send_json({"type": "end"})
    error = error_of(ws)
    assert error["param"] == param or param is None
    assert error["type"] == "invalid_request_error" and error["message"]
    send_pieces(ws, [STORY])
    assert receive_all(ws)[-1]["type"] == "done"
    wait_until(lambda: api_context.num_open == 0)


def as_json(value: Any) -> str:
    """Serialize with escapes, so that lone surrogates can be sent."""
    import json

    return json.dumps(value)


@pytest.mark.parametrize(
    ("piece", "part"),
    [
        ({"prompt": [10**9]}, "vocabulary"),
        ({"prompt": [5] * 500}, "max_model_len"),
        ({"prompt": [5] * 300, "last": True}, "max_tokens"),
        ({"prompt": [[1]]}, "prompt must be"),
        ({"promt": "x"}, "promt"),
        ({"last": "yes"}, "last must be"),
        ({"prompt": "a \ud800 b"}, "Unicode"),
    ],
)
def test_wrong_piece_ends_the_request(
    api_context: ApiContext, ws: WebSocketTestSession, piece: dict[str, Any], part: str
) -> None:
    ws.send_json(START | {"prompt": [5] * 100, "max_tokens": 200})
    assert ws.receive_json()["type"] == "started"
    ws.send_text(as_json({"type": "append", **piece}))
    assert part in error_of(ws)["message"]
    wait_until(lambda: api_context.client.num_unfinished == 0)
    ws.send_json({"type": "append", "prompt": "dropped"})
    send_pieces(ws, [STORY])
    assert receive_all(ws)[-1]["type"] == "done"


def test_pieces_need_an_open_and_nonempty_prompt(ws: WebSocketTestSession) -> None:
    ws.send_json({"type": "end"})
    assert ws.receive_json()["error"]["code"] == "not_open"
    send_pieces(ws, [])
    assert "empty" in error_of(ws)["message"]
    send_pieces(ws, ["", STORY, ""])
    assert receive_all(ws)[-1]["type"] == "done"
    ws.send_json({"type": "append", "prompt": "x"})
    assert ws.receive_json()["error"]["code"] == "not_open"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ("{", 1008),
        ("", 1008),
        ("[1]", 1008),
        ('"start"', 1008),
        ("null", 1008),
        ("[" * 100_000, 1008),
        ('{"type": ' * 5000, 1008),
        ("9" * 5000, 1008),
        ('{"type": "stop"}', 1008),
        ('{"type": ["start"]}', 1008),
        ("{}", 1008),
        (b'{"type": "start"}', 1003),
    ],
)
@pytest.mark.parametrize("is_open", [False, True])
def test_malformed_message_closes_the_connection(
    api_context: ApiContext, ws: WebSocketTestSession, data: str | bytes, code: int,
    is_open: bool, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    if is_open:
        ws.send_json(START | {"prompt": STORY})
        assert ws.receive_json()["type"] == "started"
    ws.send_bytes(data) if isinstance(data, bytes) else ws.send_text(data)
    assert ws.receive_json()["error"]["code"] == "invalid_message"
    with pytest.raises(WebSocketDisconnect) as closed:
        ws.receive_json()
    assert closed.value.code == code
    wait_until(lambda: api_context.client.num_unfinished == 0 and api_context.num_open == 0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_connection_is_busy_until_the_response_ends(
    api_context: ApiContext, ws: WebSocketTestSession
) -> None:
    ws.send_json(START | {"prompt": STORY})
    assert ws.receive_json()["type"] == "started"
    ws.send_json(START)
    assert ws.receive_json()["error"]["code"] == "busy"
    api_context.client.hold()
    ws.send_json({"type": "end"})
    for data in ('{"type": "append", "prompt": "x"}', as_json(START), "{"):
        ws.send_text(data)
        assert ws.receive_json()["error"]["code"] == "busy"
    api_context.client.release()
    assert receive_all(ws)[-1]["type"] == "done"


# ---- authorization, disconnects, failures ------------------------------------------------------


def test_api_key_is_required_and_sets_the_tenant(make_context: MakeContext) -> None:
    context = make_context(api_key=("one", "two"))
    with TestClient(create_app(context)) as client:
        for headers in ({}, {"Authorization": "Bearer three"}, {"X-Key": "one"}):
            with (
                pytest.raises(WebSocketDenialResponse) as refused,
                client.websocket_connect(PATH, headers=headers),
            ):
                pass
            assert refused.value.status_code == 401
            assert refused.value.json()["error"]["code"] == "invalid_api_key"
        good = {"Authorization": "Bearer two"}
        with client.websocket_connect(PATH, headers=good) as ws:
            send_pieces(ws, [STORY], user="somebody")
            assert receive_all(ws)[-1]["type"] == "done"
    assert context.client.requests[-1].tenant == "key 2"


def test_negative_priority_needs_an_urgent_key(make_context: MakeContext) -> None:
    """The request is refused before any of its prompt reaches the engine."""
    context = make_context(api_key=("one", "two"), urgent_api_key=("two",))
    with TestClient(create_app(context)) as client:
        for key in ("one", "two"):
            with client.websocket_connect(PATH, headers={"Authorization": f"Bearer {key}"}) as ws:
                send_pieces(ws, [STORY], priority=-1)
                last = receive_all(ws)[-1]
                assert last["type"] == ("error" if key == "one" else "done")
                if key == "one":
                    assert last["error"]["code"] == "priority_not_allowed"
                    assert not context.client.requests
    assert context.client.requests[-1].priority == -1


@pytest.mark.parametrize(
    ("allowed", "origin", "is_accepted"),
    [
        ((), None, True),
        ((), "https://evil.example", False),
        ((), "null", False),
        (("https://good.example",), "https://good.example", True),
        (("https://good.example",), "https://good.example.evil.example", False),
        (("https://good.example",), "http://good.example", False),
        (("*",), "https://evil.example", True),
    ],
)
def test_only_allowed_origins_may_connect(
    make_context: MakeContext, allowed: tuple[str, ...], origin: str | None, is_accepted: bool
) -> None:
    headers = {} if origin is None else {"Origin": origin}
    with TestClient(create_app(make_context(allowed_origins=allowed))) as client:
        if is_accepted:
            with client.websocket_connect(PATH, headers=headers) as ws:
                send_pieces(ws, [STORY])
                assert receive_all(ws)[-1]["type"] == "done"
            return
        with (
            pytest.raises(WebSocketDenialResponse) as refused,
            client.websocket_connect(PATH, headers=headers),
        ):
            pass
        assert refused.value.status_code == 403
        assert refused.value.json()["error"]["code"] == "origin_not_allowed"


def test_disconnect_ends_the_request(api: TestClient, api_context: ApiContext) -> None:
    """Both while the prompt is open and while the response is streamed."""
    client = api_context.client
    for is_last in (False, True):
        with api.websocket_connect(PATH) as ws:
            ws.send_json(START | {"prompt": STORY, "max_tokens": 400, "last": is_last})
            assert ws.receive_json()["type"] == "started"
            wait_until(lambda: client.num_unfinished == 1)
            assert api_context.num_open == 1
            if is_last:
                client.hold(after_steps=3)
                assert ws.receive_json()["type"] == "chunk"
            ws.close()
            wait_until(lambda: client.num_unfinished == 0 and api_context.num_open == 0)
        client.release()
    assert client.num_aborted == 2


def test_draining_server_finishes_open_prompts_and_refuses_new_ones(
    api: TestClient, api_context: ApiContext, ws: WebSocketTestSession
) -> None:
    ws.send_json(START | {"prompt": "Once upon"})
    assert ws.receive_json()["type"] == "started"
    api_context.draining = True
    with api.websocket_connect(PATH) as other:
        other.send_json(START | {"prompt": STORY, "last": True})
        assert other.receive_json()["error"]["code"] == "draining"
        assert api_context.num_open == 1
    ws.send_json({"type": "append", "prompt": " a time", "last": True})
    assert receive_all(ws)[-1]["type"] == "done"
    wait_until(lambda: api_context.num_open == 0)


def test_idle_open_prompt_times_out(
    api_context: ApiContext, ws: WebSocketTestSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.serve.native.stream.IDLE_S", 0.02)
    ws.send_json(START | {"prompt": STORY})
    assert error_of(ws)["code"] == "idle_timeout"
    with pytest.raises(WebSocketDisconnect) as closed:
        ws.receive_json()
    assert closed.value.code == 1008
    wait_until(lambda: api_context.client.num_unfinished == 0 and api_context.num_open == 0)


def test_idle_connection_times_out(api: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.serve.native.stream.REST_S", 0.02)
    with api.websocket_connect(PATH) as ws:
        assert ws.receive_json()["error"]["code"] == "idle_timeout"
        with pytest.raises(WebSocketDisconnect) as closed:
            ws.receive_json()
        assert closed.value.code == 1000


@pytest.mark.parametrize("is_last", [False, True])
def test_failures_are_errors_and_the_connection_survives(
    api_context: ApiContext, ws: WebSocketTestSession, is_last: bool
) -> None:
    """First requests fail, then the engine. The connection works again once the engine is back."""
    client = api_context.client
    for cause_failure, code in ((lambda: client.fail("late", "timeout"), "request_timeout"),
                      (lambda: client.fail("broken"), "request_failed"),
                      (client.kill, "engine_dead")):  # fmt: skip
        client.hold()
        ws.send_json(START | {"prompt": STORY, "last": is_last})
        assert ws.receive_json()["type"] == "started"
        wait_until(lambda: client.num_unfinished == 1)
        cause_failure()
        assert error_of(ws)["code"] == code
        client.release()
    ws.send_json(START | {"prompt": STORY})
    assert error_of(ws)["code"] == "engine_dead"
    client.revive()
    send_pieces(ws, [STORY])
    assert receive_all(ws)[-1]["type"] == "done"


def test_internal_error_hides_the_exception_text(
    api_context: ApiContext, ws: WebSocketTestSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError("0x7f00dead")

    monkeypatch.setattr(api_context.client, "check", fail)
    ws.send_json(START | {"prompt": STORY})
    error = error_of(ws)
    assert error["code"] == "internal_error" and "7f00dead" not in error["message"]
    with pytest.raises(WebSocketDisconnect) as closed:
        ws.receive_json()
    assert closed.value.code == 1011


def test_message_with_too_many_values_is_refused(ws: WebSocketTestSession) -> None:
    ws.send_text('{"type": "start", "prompt": [%s1]}' % ("1," * (3 << 18)))
    assert ws.receive_json()["error"]["code"] == "too_many_values"
    with pytest.raises(WebSocketDisconnect) as closed:
        ws.receive_json()
    assert closed.value.code == 1008


def test_too_long_field_name_is_refused(
    ws: WebSocketTestSession,
) -> None:
    ws.send_text('{"type": "start", "%s": 1}' % ("a" * 100_000))
    error = ws.receive_json()["error"]
    assert error["code"] == "name_too_long"
