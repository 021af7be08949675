"""pydantic-ai: objects by its three kinds of output, tools and streams, with two providers."""

from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry, NativeOutput, PromptedOutput, Tool, ToolOutput
from pydantic_ai.direct import model_request, model_request_stream
from pydantic_ai.messages import ModelRequest, ThinkingPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.vllm import VLLMProvider
from pydantic_ai.tools import ToolDefinition

from tests.clients import given
from tests.clients.given import ASK, FORMS, KEY, SEED, Fox, Served

BOUND = {"tool": ToolOutput, "native": NativeOutput}  # outputs that send the schema to the server


class Hint(BaseModel):
    """A model that any JSON object can be read as."""

    name: str = ""


def model_of(server: Served, provider: Any = OpenAIProvider, **settings: Any) -> OpenAIChatModel:
    request_options: Any = {"seed": SEED, "max_tokens": 400, "timeout": 60} | settings
    place = provider(base_url=server.url, api_key=KEY)
    return OpenAIChatModel(server.model, provider=place, settings=request_options)


def agent_of(server: Served, **more: Any) -> Any:
    return Agent(model_of(server), **({"retries": 0} | more))


def test_text(server: Served, run: Any) -> None:
    agent = Agent(model_of(server, max_tokens=8))
    result = run(agent.run(ASK))
    assert result.output and result.usage.output_tokens <= 8


def test_text_stream(server: Served, run: Any) -> None:
    agent = Agent(model_of(server, max_tokens=8))

    async def read() -> tuple[str, str]:
        async with agent.run_stream(ASK) as result:
            pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
            return "".join(pieces), await result.get_output()

    pieces, whole = run(read())
    assert pieces == whole


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", BOUND)
def test_output(server: Served, run: Any, kind: str, form: str) -> None:
    agent = agent_of(server, output_type=BOUND[kind](FORMS[form]))
    assert isinstance(run(agent.run(ASK)).output, FORMS[form])


@pytest.mark.parametrize("kind", BOUND)
def test_output_strict(server: Served, run: Any, kind: str) -> None:
    agent = agent_of(server, output_type=BOUND[kind](Fox, strict=True))
    assert isinstance(run(agent.run(ASK)).output, Fox)


@pytest.mark.parametrize("kind", BOUND)
def test_output_of_two_types(server: Served, run: Any, kind: str) -> None:
    both = [given.Cash, given.Coat]
    output_types: Any = (
        [ToolOutput(each) for each in both] if kind == "tool" else NativeOutput(both)
    )
    agent = agent_of(server, output_type=output_types)
    assert isinstance(run(agent.run(ASK)).output, given.Cash | given.Coat)


@pytest.mark.parametrize("kind", BOUND)
def test_output_stream(server: Served, run: Any, kind: str) -> None:
    agent = agent_of(server, output_type=BOUND[kind](given.Owned))

    async def read() -> list[Any]:
        async with agent.run_stream(ASK) as result:
            return [part async for part in result.stream_output(debounce_by=None)]

    parts = run(read())
    assert isinstance(parts[-1], given.Owned)


@pytest.mark.parametrize("kind", BOUND)
def test_output_vllm(server: Served, run: Any, kind: str) -> None:
    """Uses vLLM's provider, which also puts the schema into the prompt."""
    agent = Agent(model_of(server, VLLMProvider), output_type=BOUND[kind](Fox), retries=0)
    assert isinstance(run(agent.run(ASK)).output, Fox)


def test_output_tool_with_prefix(server: Served, run: Any) -> None:
    named = ToolOutput(Fox, name="tell_fox", description="Tell of a fox.")
    one: Any = {"parallel_tool_calls": False}
    result = run(agent_of(server, output_type=named, model_settings=one).run(ASK))
    calls = [p for m in result.all_messages() for p in m.parts if isinstance(p, ToolCallPart)]
    assert [call.tool_name for call in calls] == ["tell_fox"]


def test_output_or_text(server: Served, run: Any) -> None:
    """The model may answer with either."""
    agent = Agent(model_of(server, max_tokens=60), output_type=[Fox, str], retries=0)
    assert isinstance(run(agent.run(ASK)).output, Fox | str)


def test_output_prompted(server: Served, run: Any) -> None:
    """Only the prompt has the schema; the request asks for any object."""
    model = model_of(server, logit_bias=given.brief(server))
    agent = Agent(model, output_type=PromptedOutput(Hint), retries=0)
    assert isinstance(run(agent.run(ASK)).output, Hint)


def test_refused_output_is_requested_again(server: Served, run: Any) -> None:
    """A refused answer is sent back with the reason, and the model answers again."""
    agent = agent_of(server, output_type=ToolOutput(Fox), retries=2)
    seen: list[Fox] = []

    @agent.output_validator
    def second(found: Fox) -> Fox:
        seen.append(found)
        if len(seen) == 1:
            raise ModelRetry("Another one, please.")
        return found

    assert run(agent.run(ASK)).output is seen[1]


TOOLS = [
    ToolDefinition(
        name=name, parameters_json_schema=kind.model_json_schema(), description=kind.__doc__
    )
    for name, kind in given.ARGUMENTS.items()
]


def request_model(server: Served, messages: list[Any], choice: Any, stream: bool = False) -> Any:
    """Send one request to the model, without an agent's loop."""
    send = model_request_stream if stream else model_request
    parameters = ModelRequestParameters(function_tools=TOOLS)
    settings: Any = {"tool_choice": choice}
    return send(
        model_of(server), messages, model_settings=settings, model_request_parameters=parameters
    )


def calls_in(response: Any) -> list[ToolCallPart]:
    calls = [part for part in response.parts if isinstance(part, ToolCallPart)]
    for call in calls:
        given.check_call(call.tool_name, call.args_as_json_str())
    return calls


QUESTION = ModelRequest.user_text_prompt(ASK)


@pytest.mark.parametrize("choice", ["required", "add", "get_weather"])
def test_tools(server: Served, run: Any, choice: str) -> None:
    forced = choice if choice == "required" else [choice]
    calls = calls_in(run(request_model(server, [QUESTION], forced)))
    assert calls and choice in ("required", calls[0].tool_name)


def test_tools_stream(server: Served, run: Any) -> None:
    async def read() -> tuple[int, Any]:
        async with request_model(server, [QUESTION], "required", stream=True) as stream:
            num_deltas = len([event async for event in stream if event.event_kind == "part_delta"])
            return num_deltas, stream.get()

    num_deltas, response = run(read())
    assert calls_in(response) and num_deltas > 1


def test_tools_answered(server: Served, run: Any) -> None:
    """The results are sent back, and the model answers with a text."""
    response = run(request_model(server, [QUESTION], "required"))
    results = ModelRequest(
        [
            ToolReturnPart(tool_name=call.tool_name, content="42", tool_call_id=call.tool_call_id)
            for call in calls_in(response)
        ]
    )
    last = run(request_model(server, [QUESTION, response, results], "none"))
    assert last.text and not calls_in(last)


def test_tools_in_a_run(server: Served, run: Any) -> None:
    """The model calls a function or returns its object; the function is offered once."""
    called: list[given.Add] = []

    async def once(_: Any, definition: ToolDefinition) -> ToolDefinition | None:
        return None if called else definition

    def add(numbers: given.Add) -> int:
        """Add two numbers."""
        called.append(numbers)
        return numbers.a + numbers.b

    agent = agent_of(server, output_type=ToolOutput(Fox), tools=[Tool(add, prepare=once)])
    assert isinstance(run(agent.run(ASK)).output, Fox)


def test_tools_auto(server: Served, run: Any) -> None:
    agent = agent_of(server, tools=[Tool(lambda: "sunny", name="weather")])
    assert run(agent.run(ASK, model_settings={"max_tokens": 30})).output is not None


@pytest.mark.parametrize("provider", [OpenAIProvider, VLLMProvider])
def test_reasoning(thinker: Served, run: Any, provider: Any) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 12}
    model = model_of(thinker, provider, extra_body=extra)
    result = run(Agent(model, output_type=NativeOutput(Fox), retries=0).run(ASK))
    parts = [part for message in result.all_messages() for part in message.parts]
    assert any(isinstance(part, ThinkingPart) and part.content for part in parts)
    assert isinstance(result.output, Fox)
