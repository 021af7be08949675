"""A server with OpenAI's API that says what a test wants, on a thread of its own.

One token per character: /tokenize gives code points, so lengths are known without a model.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.http_server import LAST_CHUNK, Seen, Send, chunk, head, send_json, serving


@dataclass
class FakeOpenAI:
    """gate: no answer begins before this many requests are open at once (0: none waits).

    refuse: prompts (by first token id) that get this status. usage: whether the last chunk has it.
    metrics: what `/metrics` says, one after the other.
    """

    gate: int = 0
    refuse: dict[int, int] = field(default_factory=dict)
    usage: bool = True
    metrics: list[str] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, seen: Seen, send: Send) -> None:
        body = seen.json() if seen.body else {}
        match seen.path:
            case "/v1/models":
                await send_json(send, {"data": [{"id": "fake"}, {"id": "other"}]})
            case "/metrics" if self.metrics:
                text = self.metrics.pop(0).encode()
                await send(head(kind="text/plain") + chunk(text) + LAST_CHUNK)
            case "/tokenize":
                await send_json(send, {"tokens": [ord(letter) for letter in body["prompt"]]})
            case "/detokenize":
                await send_json(send, {"prompt": "".join(chr(64 + i % 26) for i in body["tokens"])})
            case "/v1/completions" | "/v1/chat/completions":
                self.headers.append(seen.headers)
                await self._generate(body, send)
            case _:
                await send_json(send, {"detail": "Not Found"}, 404)

    async def _generate(self, body: dict[str, Any], send: Send) -> None:
        self.bodies.append(body)
        prompt = body.get("prompt") or body["messages"][0]["content"]
        if prompt[0] in self.refuse:
            message = {"error": {"message": f"no prompt may begin with {prompt[0]}"}}
            await send_json(send, message, self.refuse[prompt[0]])
            return
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        if self.num_open >= self.gate:
            self.opened.set()
        await self.opened.wait()
        await send(head(kind="text/event-stream"))
        for payload in self._payloads(body, prompt):
            data = payload if isinstance(payload, str) else json.dumps(payload)
            await send(chunk(f"data: {data}\n\n".encode()))
        self.num_open -= 1
        await send(LAST_CHUNK)

    def _payloads(self, body: dict[str, Any], prompt: Any) -> Iterator[Any]:
        """Two tokens per chunk, so that who counts chunks counts wrong."""
        num, is_chat = body.get("max_tokens") or body["max_completion_tokens"], "messages" in body
        if is_chat:
            yield {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        for at in range(0, num, 2):
            text = "ab"[: num - at]
            yield {"choices": [{"delta": {"content": text}} if is_chat else {"text": text}]}
        if self.usage:
            yield {
                "choices": [],
                "usage": {"prompt_tokens": len(prompt), "completion_tokens": num},
            }
        yield "[DONE]"


@contextmanager
def running(fake: FakeOpenAI) -> Iterator[str]:
    """The server's address."""
    loop = asyncio.new_event_loop()
    started, urls = threading.Event(), []
    stop = asyncio.Event()

    async def serve() -> None:
        async with serving(fake.answer) as server:
            urls.append(server.url)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert started.wait(30)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
