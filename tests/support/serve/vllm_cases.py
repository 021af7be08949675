"""The client that the cases use, and the mark of a case that differs."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import httpx2
import openai
import pytest

from tests.support.processes.servers import Server

PROMPT = "Once upon a time"
ASK = [{"role": "user", "content": "Tell me a story about a fox."}]
Case = TypeVar("Case", bound=Callable[..., None])
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
OTHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 99},
                "b": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
TOOLS = [TOOL, OTHER_TOOL]


def differs(why: str) -> Callable[[Case], Case]:
    """Mark a case whose answer is not vLLM's; `table.py` reads the mark where it is written."""
    assert why
    return lambda case: case


class Asked:
    """Asks a running server of the demo model. Short and greedy, if nothing else is said."""

    def __init__(self, server: Server) -> None:
        self.url = server.url
        self.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        self.http = httpx2.Client(base_url=server.url, timeout=60)

    def complete(self, prompt: Any = PROMPT, stream: bool = False, **more: Any) -> Any:
        fields = {"max_tokens": 5, "temperature": 0} | more
        ask: Any = self.openai.completions.create
        return ask(model="demo", prompt=prompt, stream=stream, extra_body=fields)

    def chat(self, messages: Any = ASK, stream: bool = False, **more: Any) -> Any:
        fields = {"max_completion_tokens": 5, "temperature": 0} | more
        ask: Any = self.openai.chat.completions.create
        return ask(model="demo", messages=messages, stream=stream, extra_body=fields)

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        """Return the JSON of an answer, or of its error."""
        answer = self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json() if status == 200 else answer.json()["error"]

    def get(self, path: str, status: int = 200) -> Any:
        answer = self.http.get(path)
        assert answer.status_code == status, answer.text
        return answer

    def tokens(self, text: str, **more: Any) -> list[int]:
        found: list[int] = self.post("/tokenize", prompt=text, **more)["tokens"]
        return found

    def close(self) -> None:
        self.openai.close()
        self.http.close()


def refused(ask: Callable[..., Any], *prompt: Any, **fields: Any) -> Any:
    """Ask for what cannot be; return the body of the 400."""
    with pytest.raises(openai.BadRequestError) as error:
        for _ in ask(*prompt, **fields):
            pass
    assert error.value.status_code == 400
    return error.value.body


def text_of(stream: Any) -> str:
    """Join a stream's texts, of completions or chats of one choice."""
    parts = []
    for chunk in stream:
        for choice in chunk.choices:
            parts.append(choice.text if hasattr(choice, "text") else choice.delta.content or "")
    return "".join(parts)


def events_of(text: str) -> list[Any]:
    """Return the JSON of server-sent events, without the mark of the end."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
