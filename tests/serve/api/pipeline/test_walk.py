"""A request passes from its route to the engine without entering any file twice."""

import asyncio
import sys
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

import quire.serve
from quire.serve.anthropic.routes import create_message
from quire.serve.llamacpp.routes import complete
from quire.serve.lmstudio.routes import chat as studio_chat
from quire.serve.ollama.routes import chat, generate
from quire.serve.openai.chat_completions import create_chat_completion
from quire.serve.openai.completions import create_completion
from quire.serve.responses.routes import create_response
from quire.serve.sglang.routes import generate as sglang_generate

ROOM = str(Path(quire.serve.__file__).parent)
SHARED = "responses/store.py"  # a process-wide object, like the context
FOLDERS = ("bodies", "openai", "anthropic", "responses", "ollama", "llamacpp", "sglang", "lmstudio",
           "pipeline")  # fmt: skip
MESSAGE = {"role": "user", "content": "Hello"}


class Walk:
    """Records the files of `serve` that are entered between a route and the engine."""

    def __init__(self, route: CodeType) -> None:
        self.files: list[str] = []
        self._route = route
        self._frames: set[FrameType] = set()  # a resumed coroutine is not a new call
        self._is_on = False

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame in self._frames:
            return
        self._frames.add(frame)
        self._is_on |= frame.f_code is self._route
        if frame.f_code.co_name == "generate" and "fake_client" in frame.f_code.co_filename:
            self._is_on = False
        if not self._is_on or not frame.f_code.co_filename.startswith(ROOM):
            return
        name = frame.f_code.co_filename[len(ROOM) + 1 :]
        caller = frame.f_back
        is_entered = caller is None or caller.f_code.co_filename != frame.f_code.co_filename
        if name.startswith(FOLDERS) and name != SHARED and is_entered and self.files[-1:] != [name]:
            self.files.append(name)


@pytest.mark.parametrize(
    ("route", "path", "body", "length"),
    [
        (create_chat_completion, "/v1/chat/completions", {"messages": [MESSAGE]}, 8),
        (create_completion, "/v1/completions", {"prompt": "Hello"}, 7),
        (create_message, "/v1/messages", {"messages": [MESSAGE], "max_tokens": 2}, 10),
        (create_response, "/v1/responses", {"input": "Hello"}, 10),
        (chat, "/api/chat", {"messages": [MESSAGE]}, 9),
        (generate, "/api/generate", {"prompt": "Hello", "raw": True}, 9),
        (sglang_generate, "/generate", {"text": "Hello"}, 9),
        (studio_chat, "/api/v0/chat/completions", {"messages": [MESSAGE]}, 8),
        (complete, "/completion", {"prompt": "Hello", "n_predict": 2}, 9),
    ],
)
def test_no_file_is_entered_twice(
    api: TestClient, route: FunctionType, path: str, body: dict[str, Any], length: int
) -> None:
    api.get("/health")  # the first request of an app builds its routes
    app, walk = api.app, Walk(route.__code__)
    length_name = "max_output_tokens" if route is create_response else "max_tokens"

    async def post() -> httpx2.Response:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            sys.setprofile(walk.see)
            try:
                return await client.post(path, json={"model": "demo", length_name: 2} | body)
            finally:
                sys.setprofile(None)

    response = asyncio.run(post())
    assert response.status_code == 200, response.text
    again = [name for index, name in enumerate(walk.files) if name in walk.files[:index]]
    assert not again, " ".join(walk.files)
    assert len(walk.files) >= length and walk.files[-1] == "pipeline/answer.py", walk.files
