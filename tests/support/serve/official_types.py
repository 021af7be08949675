"""Responses and events, each checked with the types of the official client."""

import json
from typing import Any

import pydantic
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from starlette.testclient import TestClient

Json = dict[str, Any]
PATH = "/v1/responses"
GREEDY: Json = {"model": "demo", "temperature": 0, "max_output_tokens": 24}
QUESTION = "What is the weather in Paris?"
TOOLS: list[Json] = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    }
]
ANY_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


def checked(found: Json) -> Json:
    """The response, if the client's type takes it."""
    Response.model_validate(found, strict=True)
    return found


def checked_list(found: Json) -> Json:
    ResponseItemList.model_validate(found, strict=True)
    return found


def asked(api: TestClient, **fields: Any) -> Json:
    """A response in one piece."""
    answer = api.post(PATH, json=GREEDY | fields)
    assert answer.status_code == 200, answer.text
    return checked(answer.json())


def events_in(text: str) -> list[Json]:
    """The events of a stream, which are numbered and name themselves twice."""
    found = []
    for number, block in enumerate(text.strip().split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        check_event(event)
        if found:
            assert event["sequence_number"] == found[0]["sequence_number"] + number
        found.append(event)
    return found


def check_event(event: Json) -> None:
    ANY_EVENT.validate_python(event, strict=True)


def streamed(api: TestClient, **fields: Any) -> list[Json]:
    answer = api.post(PATH, json=GREEDY | fields | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_in(answer.text)
    assert events[0]["sequence_number"] == 0
    return events


def error_of(api: TestClient, **fields: Any) -> Json:
    """What a 400 says."""
    answer = api.post(PATH, json=GREEDY | fields)
    assert answer.status_code == 400, answer.text
    found: Json = answer.json()["error"]
    return found


def without_chance(response: Json) -> Json:
    """A response without ids and times, which no two have in common."""
    found = {k: v for k, v in response.items() if k not in ("id", "created_at", "completed_at")}
    found["output"] = [
        {k: v for k, v in item.items() if k not in ("id", "call_id")} for item in found["output"]
    ]
    return found


def text_in(response: Json) -> str:
    parts = [part for item in response["output"] for part in item.get("content", ())]
    return "".join(part["text"] for part in parts if part["type"] == "output_text")
