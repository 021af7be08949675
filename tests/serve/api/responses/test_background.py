"""Background responses: read while they run, followed, cancelled, deleted, and limited."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.serve.context import ApiContext
from quire.serve.responses import store as state
from tests.support.processes.servers import wait_until
from tests.support.serve.direct_engine import text_of
from tests.support.serve.official_types import (
    GREEDY,
    PATH,
    Json,
    asked,
    checked,
    error_of,
    events_in,
    streamed,
    text_in,
    without_chance,
)

GIVEN: Json = {"input": "Tell me a story.", "background": True}


@pytest.fixture
def paused_client(api_context: ApiContext) -> Any:
    """The client of an engine that takes no steps until it is released."""
    client: Any = api_context.client
    client.hold()
    return client


def read(api: TestClient, response_id: str) -> Json:
    answer = api.get(f"{PATH}/{response_id}")
    assert answer.status_code == 200, answer.text
    return checked(answer.json())


def test_background_response_can_be_read_until_it_ends(api: TestClient, paused_client: Any) -> None:
    found = asked(api, **GIVEN)
    assert (found["status"], found["output"], found["background"]) == ("queued", [], True)
    assert read(api, found["id"])["status"] == "queued"
    error = error_of(api, input="x", previous_response_id=found["id"])
    assert error["code"] == "previous_response_not_finished"
    assert api.get(f"{PATH}/{found['id']}/input_items").status_code == 400
    paused_client.release()
    wait_until(lambda: read(api, found["id"])["status"] == "incomplete")
    done = read(api, found["id"])
    whole = asked(api, input="Tell me a story.")
    assert text_in(done) == text_in(whole)
    assert api.post(f"{PATH}/{found['id']}/cancel").json() == done
    assert api.get(f"{PATH}/{found['id']}?stream=true").status_code == 400


def test_stream_can_be_read_again_from_any_event(api: TestClient) -> None:
    events = streamed(api, **GIVEN)
    kinds = [event["type"] for event in events[:3]]
    assert kinds == ["response.created", "response.queued", "response.in_progress"]
    last = events[-1]["response"]
    assert without_chance(read(api, last["id"])) == without_chance(last)
    for after in (-1, 0, 7):
        answer = api.get(f"{PATH}/{last['id']}?stream=true&starting_after={after}")
        assert events_in(answer.text) == events[after + 1 :]


def test_response_continues_without_a_reader_and_can_be_followed(
    api: TestClient, paused_client: Any
) -> None:
    """Another client follows the stream from a given event."""
    paused_client.hold(after_steps=4)
    found = asked(api, **GIVEN)
    wait_until(lambda: read(api, found["id"])["status"] == "in_progress")
    with api.stream("GET", f"{PATH}/{found['id']}?stream=true&starting_after=1") as answer:
        paused_client.release()
        events = events_in("\n".join(answer.iter_lines()))
    assert events[0]["sequence_number"] == 2
    expected = text_of([{"role": "user", "content": "Tell me a story."}], max_tokens=24)
    assert text_in(events[-1]["response"]) == expected


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_background_response_can_be_cancelled_or_deleted(
    api: TestClient, api_context: ApiContext, paused_client: Any, how: str
) -> None:
    found = asked(api, **GIVEN)
    wait_until(lambda: paused_client.num_unfinished == 1)
    path = f"{PATH}/{found['id']}"
    if how == "cancel":
        ended = checked(api.post(f"{path}/cancel").json())
        assert ended["status"] == "cancelled"
        assert read(api, found["id"]) == ended
        assert api.post(f"{path}/cancel").json() == ended
    else:
        assert api.delete(path).json()["deleted"]
        assert api.get(path).status_code == 404
    assert (paused_client.num_unfinished, paused_client.num_aborted, api_context.num_open) == (
        0,
        1,
        0,
    )
    paused_client.release()


def test_failed_response_reports_its_error(api: TestClient, paused_client: Any) -> None:
    found = asked(api, **GIVEN)
    wait_until(lambda: paused_client.num_unfinished == 1)
    paused_client.fail("no token is left")
    wait_until(lambda: read(api, found["id"])["status"] == "failed")
    error = read(api, found["id"])["error"]
    assert error["code"] == "invalid_prompt" and "no token is left" in error["message"]
    paused_client.release()


def test_number_of_background_responses_is_limited(
    api: TestClient, paused_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "MAX_RUNNING", 1)
    found = asked(api, **GIVEN)
    refused = api.post(PATH, json=GREEDY | GIVEN)
    assert refused.status_code == 503 and int(refused.headers["Retry-After"]) > 0
    assert refused.json()["error"]["code"] == "engine_busy"
    api.post(f"{PATH}/{found['id']}/cancel")
    again = asked(api, **GIVEN)
    api.delete(f"{PATH}/{again['id']}")
    paused_client.release()
