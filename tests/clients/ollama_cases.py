"""Ollama's own client: texts, formats, tools, streamed and whole; models and errors."""

from typing import Any

import ollama
import pytest
from pydantic import BaseModel

from tests.clients.given import FORMS, MESSAGES, SEED, Fox, Served


class Client:
    """The client with the fields that all cases send."""

    def __init__(self, server: Served) -> None:
        self.server = server
        self.ollama = ollama.Client(host=server.url.removesuffix("/v1"), timeout=60)

    def chat(self, num_predict: int = 8, **fields: Any) -> Any:
        options = {"seed": SEED, "num_predict": num_predict}
        fields = {"messages": MESSAGES, "options": options} | fields
        return self.ollama.chat(self.server.model, **fields)

    def generate(self, prompt: str, num_predict: int = 8, **fields: Any) -> Any:
        options = {"seed": SEED, "num_predict": num_predict}
        return self.ollama.generate(self.server.model, prompt, options=options, **fields)


@pytest.fixture
def client(server: Served) -> Client:
    return Client(server)


def find_fox(name: str) -> str:
    """Find a fox.

    Args:
        name: the fox's name
    """
    return f"{name} is in the den"


def test_text(client: Client) -> None:
    answer = client.chat()
    assert answer.message.role == "assistant" and answer.message.content
    assert answer.done and answer.done_reason in ("stop", "length")
    assert 0 < answer.eval_count <= 8 and answer.prompt_eval_count > 0
    assert answer.total_duration > 0 and answer.eval_duration > 0


def test_stream(client: Client) -> None:
    *pieces, last = client.chat(stream=True)
    text = "".join(piece.message.content for piece in pieces)
    assert text == client.chat().message.content
    assert last.done and not any(piece.done for piece in pieces)


@pytest.mark.parametrize("raw", [False, True])
def test_generate(client: Client, raw: bool) -> None:
    text = client.generate("A fox", raw=raw).response
    pieces = client.generate("A fox", raw=raw, stream=True)
    assert text and text == "".join(piece.response for piece in pieces)


@pytest.mark.parametrize("name", FORMS)
def test_format(client: Client, name: str) -> None:
    kind: type[BaseModel] = FORMS[name]
    answer = client.chat(600, format=kind.model_json_schema())
    kind.model_validate_json(answer.message.content)


def test_format_of_a_generation(client: Client) -> None:
    found = client.generate("Name a fox.", 600, format=Fox.model_json_schema())
    Fox.model_validate_json(found.response)


def test_tools(client: Client) -> None:
    """A weak model may call or not. The client reads the answer and sends a result back."""
    answer = client.chat(200, tools=[find_fox])
    calling = {
        "role": "assistant", "content": "",
        "tool_calls": [{"function": {"name": "find_fox", "arguments": {"name": "Rex"}}}],
    }  # fmt: skip
    result = {"role": "tool", "tool_name": "find_fox", "content": find_fox("Rex")}
    assert answer.done
    assert client.chat(messages=[*MESSAGES, calling, result], tools=[find_fox]).message.content


def test_thinking(client: Client) -> None:
    if "thinking" not in client.ollama.show(client.server.model).capabilities:
        with pytest.raises(ollama.ResponseError, match="does not reason"):
            client.chat(think=True)
        return
    assert client.chat(think=True).message.thinking
    assert not client.chat(think=False).message.thinking


def test_logprobs(client: Client) -> None:
    found = client.chat(4, logprobs=True, top_logprobs=2).logprobs
    assert len(found) == 4 and all(len(each.top_logprobs) == 2 for each in found)


def test_models(client: Client) -> None:
    name = client.server.model
    assert name in [model.model for model in client.ollama.list().models]
    assert name in [model.model for model in client.ollama.ps().models]
    shown = client.ollama.show(f"{name}:latest")
    assert "completion" in shown.capabilities and shown.modelinfo["general.architecture"]
    assert client.ollama.pull(name).status == "success"


def test_errors(client: Client) -> None:
    for status, call in (
        (404, lambda: client.ollama.chat("nobody", MESSAGES)),
        (404, lambda: client.ollama.pull("nobody")),
        (400, lambda: client.ollama.embed(client.server.model, "fox")),
        (400, lambda: client.chat(-1, options={"temperature": -1})),
        (501, lambda: client.ollama.delete(client.server.model)),
    ):
        with pytest.raises(ollama.ResponseError) as raised:
            call()
        assert raised.value.status_code == status and raised.value.error.endswith(".")
