"""openai-agents over both of OpenAI's APIs: texts, output types, tools, handoffs, streams."""

from collections.abc import Callable
from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from tests.clients import given
from tests.clients.given import ASK, FORMS, KEY, SEED, Fox, Served

set_tracing_disabled(True)


AgentOf = Callable[..., Any]
# A text that ends early: this client treats a response truncated by max_tokens as an error.
BRIEF = {"extra_body": {"seed": SEED, "structured_outputs": {"regex": "[a-z]{1,8}"}}}


APIS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


@pytest.fixture(params=APIS)
def agent_of(server: Served, request: pytest.FixtureRequest) -> AgentOf:
    """Make agents that use one of the two APIs."""
    client = AsyncOpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=60)
    model = APIS[request.param](model=server.model, openai_client=client)

    def make(*, settings: dict[str, Any] | None = None, **more: Any) -> Any:
        seed = {"extra_body": {"seed": SEED}}
        options = {"max_tokens": 400} | seed | (settings or {})
        given = {"name": "Fox", "model": model, "model_settings": ModelSettings(**options)}
        return Agent(**(given | more))

    return make


def test_text(agent_of: AgentOf, run: Any) -> None:
    agent = agent_of(settings=BRIEF, instructions="Be brief.")
    result = run(Runner.run(agent, ASK))
    assert result.final_output and 0 < result.context_wrapper.usage.output_tokens < 16


def test_text_stream(agent_of: AgentOf, run: Any) -> None:
    async def read() -> tuple[list[str], Any]:
        result = Runner.run_streamed(agent_of(settings=BRIEF), ASK)
        events = [event async for event in result.stream_events()]
        raw = [event.data for event in events if event.type == "raw_response_event"]
        texts = [data.delta for data in raw if data.type == "response.output_text.delta"]
        return texts, result.final_output

    texts, whole = run(read())
    assert "".join(texts) == whole


@pytest.mark.parametrize("form", FORMS)
def test_output(agent_of: AgentOf, run: Any, form: str) -> None:
    agent = agent_of(output_type=FORMS[form])
    assert isinstance(run(Runner.run(agent, ASK)).final_output, FORMS[form])


def test_output_stream(agent_of: AgentOf, run: Any) -> None:
    async def read() -> Any:
        result = Runner.run_streamed(agent_of(output_type=Fox), ASK)
        async for _ in result.stream_events():
            pass
        return result.final_output

    assert isinstance(run(read()), Fox)


def tools() -> tuple[list[Any], list[str]]:
    """Return two tools, and the list of their calls."""
    called: list[str] = []

    @function_tool
    def add(numbers: given.Add) -> int:
        """Add two numbers."""
        called.append("add")
        return numbers.a + numbers.b

    @function_tool
    def get_weather(where: given.GetWeather) -> str:
        """The weather of a city."""
        called.append("get_weather")
        return f"22 {where.unit}"

    return [add, get_weather], called


@pytest.mark.parametrize("choice", ["required", "add", "get_weather"])
def test_tools(agent_of: AgentOf, run: Any, choice: str) -> None:
    """A tool runs with the model's arguments, and its result is the result of the run."""
    functions, called = tools()
    options = {"tool_choice": choice, "parallel_tool_calls": False}
    more = {"tools": functions, "tool_use_behavior": "stop_on_first_tool"}
    result = run(Runner.run(agent_of(settings=options, **more), ASK))
    assert len(called) == 1 and choice in ("required", called[0])
    assert result.final_output is not None


def test_tools_stream(agent_of: AgentOf, run: Any) -> None:
    functions, called = tools()
    more = {"tools": functions, "tool_use_behavior": "stop_on_first_tool"}
    agent = agent_of(settings={"tool_choice": "required"}, **more)

    async def read() -> set[str]:
        result = Runner.run_streamed(agent, ASK)
        events = [event async for event in result.stream_events()]
        return {event.item.type for event in events if event.type == "run_item_stream_event"}

    assert {"tool_call_item", "tool_call_output_item"} <= run(read()) and called


def test_tools_then_text(agent_of: AgentOf, run: Any) -> None:
    """The result is sent back; the model answers with a text, or calls until the turns end. The
    text ends early, because the agent refuses truncated ones."""
    functions, called = tools()
    extra = {"seed": SEED, "structured_outputs": {"regex": "[a-z ]{1,12}"}}
    agent = agent_of(settings={"tool_choice": "add", "extra_body": extra}, tools=functions)
    result = run(Runner.run(agent, ASK, max_turns=4))
    assert called[0] == "add" and isinstance(result.final_output, str)


def test_handoff(agent_of: AgentOf, run: Any) -> None:
    """A handoff is a call without arguments; the other agent ends with a structured output."""
    other = agent_of(name="Den", output_type=Fox)
    first = agent_of(settings={"tool_choice": "required"}, handoffs=[other])
    result = run(Runner.run(first, ASK))
    assert result.last_agent is other and isinstance(result.final_output, Fox)


def test_extra_body(agent_of: AgentOf, run: Any) -> None:
    extra = {"extra_body": {"seed": SEED, "structured_outputs": {"choice": ["red", "blue"]}}}
    result = run(Runner.run(agent_of(settings=extra), ASK))
    assert result.final_output in ("red", "blue")
