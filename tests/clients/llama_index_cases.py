"""llama-index's OpenAILike: completions, chat, structured_predict by calls and schemas, tools."""

from typing import Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tests.clients import given
from tests.clients.given import ASK, FORMS, KEY, SEED, Fox, Served

PROMPT = PromptTemplate(ASK)
WAYS = {"calls": {}, "forms": {"should_use_structured_outputs": True}}


def llm_of(server: Served, **more: Any) -> OpenAILike:
    options: dict[str, Any] = {
        "is_chat_model": True,
        "is_function_calling_model": True,
        "context_window": 2048,
        "max_tokens": 500,
        "max_retries": 0,
        "additional_kwargs": {"seed": SEED},
    }
    return OpenAILike(model=server.model, api_base=server.url, api_key=KEY, **(options | more))


@pytest.fixture(params=WAYS)
def llm(request: pytest.FixtureRequest, server: Served) -> OpenAILike:
    """A model that requests objects by calls, or by a response format."""
    return llm_of(server, **WAYS[request.param])


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def get_weather(city: str, unit: str) -> str:
    """The weather of a city."""
    return f"22 {unit} in {city}"


TOOLS = [
    FunctionTool.from_defaults(add, fn_schema=given.Add),
    FunctionTool.from_defaults(get_weather, fn_schema=given.GetWeather),
]


def test_complete(server: Served) -> None:
    answer = llm_of(server, is_chat_model=False, max_tokens=8).complete("A fox")
    assert answer.text and answer.raw.usage.completion_tokens <= 8


def test_stream_complete(server: Served) -> None:
    llm = llm_of(server, is_chat_model=False, max_tokens=8)
    *_, last = llm.stream_complete("A fox")
    assert last.text == llm.complete("A fox").text


def test_chat(server: Served) -> None:
    assert llm_of(server, max_tokens=8).chat([ChatMessage(ASK)]).message.content


def test_stream_chat(server: Served) -> None:
    llm = llm_of(server, max_tokens=8)
    *_, last = llm.stream_chat([ChatMessage(ASK)])
    assert last.message.content == llm.chat([ChatMessage(ASK)]).message.content


def test_achat(server: Served, run: Any) -> None:
    assert run(llm_of(server, max_tokens=8).achat([ChatMessage(ASK)])).message.content


@pytest.mark.parametrize("form", FORMS)
def test_predict(llm: OpenAILike, form: str, server: Served) -> None:
    if form == "recursive" and not llm.should_use_structured_outputs:
        pytest.skip("llama-index does not read the calls of a schema that refers to itself")
    if form == "recursive":
        llm.additional_kwargs["logit_bias"] = given.brief(server)
    assert isinstance(llm.structured_predict(FORMS[form], PROMPT), FORMS[form])


def test_predict_async(llm: OpenAILike, run: Any) -> None:
    assert isinstance(run(llm.astructured_predict(Fox, PROMPT)), Fox)


def test_predict_stream(server: Served) -> None:
    llm = llm_of(server, should_use_structured_outputs=True)
    *_, last = llm.stream_structured_predict(given.Owned, PROMPT)
    given.Owned.model_validate(last.model_dump())


def test_predict_stream_of_calls(server: Served) -> None:
    """Uses a program, since stream_structured_predict lets the model choose whether to call."""
    options: Any = {"llm": llm_of(server), "prompt": PROMPT, "tool_choice": "required"}
    *_, last = FunctionCallingProgram.from_defaults(given.Owned, **options).stream_call()
    given.Owned.model_validate(last.model_dump())


def test_predict_strict(server: Served) -> None:
    assert isinstance(llm_of(server, strict=True).structured_predict(Fox, PROMPT), Fox)


def test_as_structured(llm: OpenAILike) -> None:
    answer = llm.as_structured_llm(Fox).chat([ChatMessage(ASK)])
    assert isinstance(answer.raw, Fox) and Fox.model_validate_json(answer.message.content)


def check_calls(llm: OpenAILike, answer: Any) -> list[str]:
    calls = llm.get_tool_calls_from_response(answer)
    for call in calls:
        given.ARGUMENTS[call.tool_name].model_validate(call.tool_kwargs)
    return [call.tool_name for call in calls]


def test_tools_auto(server: Served) -> None:
    llm = llm_of(server, max_tokens=30)
    assert llm.chat_with_tools(TOOLS, user_msg=ASK).message.role == "assistant"


def test_tools_required(server: Served) -> None:
    llm = llm_of(server)
    assert check_calls(llm, llm.chat_with_tools(TOOLS, user_msg=ASK, tool_required=True))


def test_tools_named(server: Served) -> None:
    llm = llm_of(server)
    answer = llm.chat_with_tools(TOOLS, user_msg=ASK, tool_choice="add")
    assert check_calls(llm, answer) == ["add"]


def test_tools_parallel(server: Served) -> None:
    llm = llm_of(server)
    options = {"tool_required": True, "allow_parallel_tool_calls": True}
    assert check_calls(llm, llm.chat_with_tools(TOOLS, user_msg=ASK, **options))


def test_tools_stream(server: Served) -> None:
    llm = llm_of(server)
    answers = list(llm.stream_chat_with_tools(TOOLS, user_msg=ASK, tool_required=True))
    assert check_calls(llm, answers[-1]) and len(answers) > 2


def test_tools_called(server: Served) -> None:
    """The tool runs with the model's arguments."""
    llm = llm_of(server)
    answer = llm.predict_and_call([TOOLS[0]], user_msg=ASK, tool_required=True)
    assert isinstance(answer.sources[0].raw_output, int)


def test_tools_answered(server: Served) -> None:
    llm = llm_of(server)
    first = llm.chat_with_tools(TOOLS, user_msg=ASK, tool_choice="add")
    [call] = llm.get_tool_calls_from_response(first)
    result = ChatMessage("42", role="tool", tool_call_id=call.tool_id)
    answer = llm.chat([ChatMessage(ASK), first.message, result], max_tokens=8)
    assert answer.message.content


def test_extra_body(server: Served) -> None:
    extra = {"seed": SEED, "extra_body": {"structured_outputs": {"choice": ["red", "blue"]}}}
    answer = llm_of(server, additional_kwargs=extra).chat([ChatMessage(ASK)])
    assert answer.message.content in ("red", "blue")
