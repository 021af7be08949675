"""langchain-openai: messages, structured output by its three methods, tools and their chunks."""

from typing import Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

from tests.clients import given
from tests.clients.given import ASK, FORMS, KEY, SEED, Fox, Served

BOUND = ("function_calling", "json_schema")  # methods that send the schema to the server


class Hint(BaseModel):
    """A model that any JSON object can be read as."""

    name: str = ""


class FoxDict(TypedDict):
    """A fox."""

    color: str
    tame: bool


@tool(args_schema=given.GetWeather)
def get_weather(city: str, unit: str) -> str:
    """The weather of a city."""
    return f"22 {unit} in {city}"


@tool(args_schema=given.Add)
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


TOOLS = [get_weather, add]


def model_of(server: Served, **more: Any) -> ChatOpenAI:
    settings: dict[str, Any] = {"seed": SEED, "max_tokens": 500, "timeout": 60, "max_retries": 0}
    return ChatOpenAI(model=server.model, base_url=server.url, api_key=KEY, **(settings | more))


@pytest.fixture
def model(server: Served) -> ChatOpenAI:
    return model_of(server)


def test_invoke(server: Served) -> None:
    answer = model_of(server, max_tokens=8).invoke(ASK)
    assert answer.content and answer.usage_metadata["output_tokens"] <= 8


def test_stream(server: Served) -> None:
    model = model_of(server, max_tokens=8, stream_usage=True)
    chunks = list(model.stream(ASK))
    assert "".join(chunk.content for chunk in chunks) == model.invoke(ASK).content
    assert any(chunk.usage_metadata for chunk in chunks)


def test_batch_async(server: Served, run: Any) -> None:
    answers = run(model_of(server, max_tokens=4).abatch([ASK, "Who are you?"]))
    assert len(answers) == 2


def test_completions(server: Served) -> None:
    model = OpenAI(model=server.model, base_url=server.url, api_key=KEY, max_tokens=5, seed=SEED)
    assert model.invoke("A fox")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", BOUND)
def test_structured(model: ChatOpenAI, method: str, form: str) -> None:
    if (method, form) == ("function_calling", "recursive"):
        pytest.skip("langchain writes a reference of a schema to itself as anything")
    bound = model.with_structured_output(FORMS[form], method=method)
    assert isinstance(bound.invoke(ASK), FORMS[form])


@pytest.mark.parametrize("method", BOUND)
def test_structured_strict(model: ChatOpenAI, method: str) -> None:
    bound = model.with_structured_output(Fox, method=method, strict=True)
    assert isinstance(bound.invoke(ASK), Fox)


@pytest.mark.parametrize("method", BOUND)
def test_structured_raw(model: ChatOpenAI, method: str) -> None:
    found = model.with_structured_output(Fox, method=method, include_raw=True).invoke(ASK)
    assert isinstance(found["parsed"], Fox) and found["parsing_error"] is None
    assert isinstance(found["raw"], AIMessage)


@pytest.mark.parametrize("method", BOUND)
def test_structured_schema(model: ChatOpenAI, method: str) -> None:
    """A schema given as a dict returns a dict."""
    found = model.with_structured_output(given.Coat.model_json_schema(), method=method).invoke(ASK)
    assert given.Coat.model_validate(found)


@pytest.mark.parametrize("method", BOUND)
def test_structured_stream(model: ChatOpenAI, method: str) -> None:
    *_, last = model.with_structured_output(Fox, method=method).stream(ASK)
    assert isinstance(last, Fox)


@pytest.mark.parametrize("method", BOUND)
def test_structured_async(model: ChatOpenAI, run: Any, method: str) -> None:
    bound = model.with_structured_output(Fox, method=method)
    assert isinstance(run(bound.ainvoke(ASK)), Fox)


def test_structured_typed_dict(server: Served) -> None:
    model = model_of(server, logit_bias=given.brief(server))
    found = model.with_structured_output(FoxDict, method="function_calling").invoke(ASK)
    assert isinstance(found["color"], str) and isinstance(found["tame"], bool)


def test_json_mode(server: Served) -> None:
    """The request asks only for an object, without a schema."""
    model = model_of(server, logit_bias=given.brief(server))
    found = model.with_structured_output(Hint, method="json_mode").invoke("Answer in JSON.")
    assert isinstance(found, Hint)


def test_json_mode_stream(server: Served) -> None:
    model = model_of(server, logit_bias=given.brief(server))
    *_, last = model.with_structured_output(None, method="json_mode").stream("Answer in JSON.")
    assert isinstance(last, dict)


def check_calls(message: Any) -> None:
    assert message.tool_calls and not message.invalid_tool_calls
    for call in message.tool_calls:
        given.ARGUMENTS[call["name"]].model_validate(call["args"])


def test_tools_auto(server: Served) -> None:
    answer = model_of(server, max_tokens=30).bind_tools(TOOLS).invoke(ASK)
    assert isinstance(answer, AIMessage)


@pytest.mark.parametrize("choice", ["any", "required", "add", "get_weather"])
def test_tools(model: ChatOpenAI, choice: str) -> None:
    answer = model.bind_tools(TOOLS, tool_choice=choice).invoke(ASK)
    check_calls(answer)
    assert choice in ("any", "required", answer.tool_calls[0]["name"])


def test_tools_strict(model: ChatOpenAI) -> None:
    check_calls(model.bind_tools(TOOLS, tool_choice="any", strict=True).invoke(ASK))


def test_tools_one_at_a_time(model: ChatOpenAI) -> None:
    bound = model.bind_tools(TOOLS, tool_choice="any", parallel_tool_calls=False)
    assert len(bound.invoke(ASK).tool_calls) == 1


@pytest.mark.parametrize("choice", ["any", "add"])
def test_tools_stream(model: ChatOpenAI, choice: str) -> None:
    chunks = list(model.bind_tools(TOOLS, tool_choice=choice).stream(ASK))
    whole: Any = AIMessageChunk("")
    for chunk in chunks:
        whole = whole + chunk
    check_calls(whole)
    assert sum(bool(chunk.tool_call_chunks) for chunk in chunks) > 1


def test_tools_answered(model: ChatOpenAI) -> None:
    question = HumanMessage(ASK)
    call = model.bind_tools(TOOLS, tool_choice="add").invoke([question])
    result = add.invoke(call.tool_calls[0])
    assert isinstance(result, ToolMessage)
    answer = model.bind_tools(TOOLS, tool_choice="none", max_tokens=8).invoke(
        [question, call, result]
    )
    assert answer.content


def test_extra_body(server: Served) -> None:
    extra = {"structured_outputs": {"regex": "[a-z]{4}"}}
    assert len(model_of(server, extra_body=extra).invoke(ASK).content) == 4
