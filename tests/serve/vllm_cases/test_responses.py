"""Responses"""

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.serve.vllm_cases.test_forms import PERSON
from tests.support.serve.vllm_cases import OTHER_TOOL, Asked, differs

TOOL = {"type": "function", **OTHER_TOOL["function"]}


def respond(asked: Asked, given: Any = "Who is the fox?", stream: bool = False, **more: Any) -> Any:
    fields = {"max_output_tokens": 8, "temperature": 0} | more
    create: Any = asked.openai.responses.create
    return create(model="demo", input=given, stream=stream, extra_body=fields)


def wrong(asked: Asked, *given: Any, **more: Any) -> Any:
    with pytest.raises(openai.BadRequestError) as error:
        respond(asked, *given, **more)
    return error.value.body


def test_one(asked: Asked) -> None:
    """a response has an id, a text and a usage"""
    found = respond(asked)
    assert found.id.startswith("resp_") and found.output_text
    assert found.usage.output_tokens == 8
    assert found.usage.total_tokens == found.usage.input_tokens + 8


def test_cut(asked: Asked) -> None:
    """one that is cut is incomplete, for max_output_tokens"""
    found = respond(asked)
    assert found.status == "incomplete"
    assert found.incomplete_details.reason == "max_output_tokens"


def test_instructions(asked: Asked) -> None:
    """instructions stand before the input, and are not kept for the next"""
    told = respond(asked, instructions="You know foxes well.")
    assert told.usage.input_tokens > respond(asked).usage.input_tokens
    follows = respond(asked, "And?", previous_response_id=told.id)
    again = respond(asked, "And?", previous_response_id=told.id, instructions="You know foxes.")
    assert again.usage.input_tokens > follows.usage.input_tokens


def test_turns(asked: Asked) -> None:
    """previous_response_id goes on from there"""
    first = respond(asked)
    second = respond(asked, "And then?", previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.total_tokens


def test_items(asked: Asked) -> None:
    """input may be messages, in texts or parts"""
    parts = [{"type": "input_text", "text": "Who is the fox?"}]
    one, two = (
        respond(asked, [{"role": "user", "content": each}]) for each in ("Who is the fox?", parts)
    )
    assert one.output_text == two.output_text == respond(asked).output_text


def test_outputs_go_back(asked: Asked) -> None:
    """output items may be input of the next"""
    first = respond(asked)
    items = [item.model_dump(exclude_none=True) for item in first.output]
    asks = {"role": "user", "content": "Who is the fox?"}
    found = respond(asked, [asks, *items, {"role": "user", "content": "And then?"}])
    followed = respond(asked, "And then?", previous_response_id=first.id)
    assert found.output_text == followed.output_text


def test_stream(asked: Asked) -> None:
    """a stream's events begin with created, number themselves, and join to the response"""
    events = list(respond(asked, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == respond(asked).output_text


def test_retrieved(asked: Asked) -> None:
    """a response can be asked for again"""
    first = respond(asked)
    assert asked.openai.responses.retrieve(first.id) == first


def test_not_stored(asked: Asked) -> None:
    """unless store is false"""
    first = respond(asked, store=False)
    with pytest.raises(openai.NotFoundError):
        asked.openai.responses.retrieve(first.id)


@pytest.mark.parametrize("response_id", ["resp_0_none", "x"])
def test_unknown(asked: Asked, response_id: str) -> None:
    """one that there is not is a 404"""
    with pytest.raises(openai.NotFoundError):
        asked.openai.responses.retrieve(response_id)


@differs("400 that names the field, as OpenAI does; vLLM answers 404")
def test_unknown_previous(asked: Asked) -> None:
    """an unknown previous response"""
    error = wrong(asked, previous_response_id="resp_0_none")
    assert error["param"] == "previous_response_id"


def test_background(asked: Asked) -> None:
    """in the background a response is made while nobody waits, and can be cancelled"""
    first = respond(asked, background=True, max_output_tokens=1500, ignore_eos=True)
    assert first.status in ("queued", "in_progress")
    assert asked.openai.responses.cancel(first.id).status == "cancelled"


def test_background_unstored(asked: Asked) -> None:
    """which needs store"""
    assert wrong(asked, background=True, store=False)["message"]


def test_cancelled_late(asked: Asked) -> None:
    """one that is done cannot be cancelled"""
    with pytest.raises(openai.BadRequestError):
        asked.openai.responses.cancel(respond(asked).id)


def test_call(asked: Asked) -> None:
    """tools are called as items, with arguments of their schema"""
    found = respond(asked, tools=[TOOL], tool_choice="required", max_output_tokens=100)
    calls = [item for item in found.output if item.type == "function_call"]
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), TOOL["parameters"])


def test_call_answered(asked: Asked) -> None:
    """their results are input of the next"""
    named = {"type": "function", "name": "add"}
    first = respond(asked, tools=[TOOL], tool_choice=named, max_output_tokens=100)
    [call] = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    assert respond(asked, [result], previous_response_id=first.id).output_text


def test_call_streamed(asked: Asked) -> None:
    """a stream tells their arguments as they come, and in the end whole"""
    given = {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 100}
    events = list(respond(asked, stream=True, **given))
    kind = "response.function_call_arguments"
    parts = "".join(each.delta for each in events if each.type == f"{kind}.delta")
    assert parts == "".join(each.arguments for each in events if each.type == f"{kind}.done")


def test_form(asked: Asked) -> None:
    """text.format holds the text to a schema"""
    form = {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}
    found = respond(asked, text={"format": form}, max_output_tokens=200)
    jsonschema.validate(json.loads(found.output_text), PERSON)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("top_p", 2), ("max_output_tokens", -1), ("tool_choice", "sometimes")],
)
def test_out_of_range(asked: Asked, field: str, value: Any) -> None:
    """what is outside its range is refused by the field's name"""
    assert wrong(asked, **{field: value})["param"].startswith(field)


@pytest.mark.parametrize("given", [[], [{"role": "user"}], [{"type": "nothing"}]])
def test_wrong_input(asked: Asked, given: Any) -> None:
    """so is input of nothing, and an item that there is not"""
    assert wrong(asked, given)["param"].startswith("input")


def test_metadata(asked: Asked) -> None:
    """metadata come back"""
    assert respond(asked, metadata={"a": "b"}).metadata == {"a": "b"}
