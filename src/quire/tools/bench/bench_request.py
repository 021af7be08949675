"""One request of a serving benchmark: its body, and the times of its response's chunks.

Both back ends stream, and read the token counts from `usage`. A chat's first chunk only names the
role. It is ignored, because it holds no token and servers send it at different times.
"""

import argparse
import json
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from quire.base.errors import ConfigError
from quire.tools.bench.arguments import SAMPLERS
from quire.tools.bench.datasets import BenchRequest, Tokens
from quire.tools.bench.metrics import RequestResult
from quire.tools.http_client import HttpClient, HttpError

ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}


@dataclass(frozen=True)
class Asker:
    """Sends requests to one endpoint. `common` holds the fields of all bodies."""

    client: HttpClient
    path: str
    is_chat: bool
    common: dict[str, Any]

    def body(self, request: BenchRequest) -> dict[str, Any]:
        """Return the body of a request. A chat's prompt must be a text."""
        if self.is_chat:
            own = {
                "messages": [{"role": "user", "content": request.prompt}],
                "max_completion_tokens": request.output_len,
            }
        else:
            own = {"prompt": request.prompt, "max_tokens": request.output_len}
        return own | self.common

    async def send(self, request: BenchRequest) -> RequestResult:
        """Send a request and time its chunks. Never raises: the result holds the server's error."""
        return await self.send_body(self.body(request), request.prompt_len)

    async def send_body(self, given: dict[str, Any], prompt_len: int) -> RequestResult:
        """Send a body as `send` does."""
        body = json.dumps(given, separators=(",", ":")).encode()
        reading = _Reading(RequestResult(time.perf_counter(), prompt_len), self.is_chat)
        try:
            async with aclosing(self.client.stream_json(self.path, body)) as payloads:
                async for payload in payloads:
                    reading.take(payload, time.perf_counter())
            return reading.finish()
        except HttpError as error:
            reading.result.error = str(error)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reading.result.error = f"a chunk does not follow OpenAI's API ({error!r})"
        return reading.result


class _Reading:
    """Collects the chunks of one response."""

    def __init__(self, result: RequestResult, is_chat: bool) -> None:
        self.result = result
        self._is_chat = is_chat
        self._last_s: float | None = None
        self._usage: dict[str, Any] | None = None
        self._texts: list[str] = []

    def take(self, payload: str, now_s: float) -> None:
        """Process one payload. Raises HttpError for an error or an invalid chunk."""
        try:
            chunk = json.loads(payload)
        except ValueError as error:
            raise HttpError(f"a chunk is not JSON ({error}): {payload[:200]!r}") from error
        if chunk.get("error"):
            fault = chunk["error"]
            raise HttpError(str(fault.get("message", fault) if isinstance(fault, dict) else fault))
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices", ())[:1]:
            for part in (chunk, choice):  # vLLM puts a chat's prompt next to the choices
                self.result.prompt_ids = part.get("prompt_token_ids") or self.result.prompt_ids
            self.result.token_ids += choice.get("token_ids") or ()
            self._take_choice(choice, now_s)

    def _take_choice(self, choice: dict[str, Any], now_s: float) -> None:
        part = choice.get("delta") or {} if self._is_chat else choice
        text = part.get("content" if self._is_chat else "text")
        ended = choice.get("finish_reason")
        if self._is_chat and self._last_s is None and part.get("role") and not (text or ended):
            return
        if self._last_s is None:
            self.result.ttft_s = now_s - self.result.start_s
        else:
            self.result.itls_s.append(now_s - self._last_s)
        self._last_s = now_s
        if ended == "error":
            raise HttpError(
                f"the server ended the answer with an error: {choice.get('stop_reason')}"
            )
        if text:
            self._texts.append(text)

    def finish(self) -> RequestResult:
        if self._last_s is None:
            raise HttpError("the answer ended without a chunk.")
        if self._usage is None:
            raise HttpError("the answer ended without usage, which counts the tokens.")
        result = self.result
        result.latency_s = self._last_s - result.start_s
        result.output_len = int(self._usage["completion_tokens"])
        result.prompt_len = int(self._usage.get("prompt_tokens", result.prompt_len))
        details = self._usage.get("prompt_tokens_details") or {}
        result.cached_len = int(details.get("cached_tokens") or 0)
        result.cached_by_tier = details.get("cached_tokens_by_tier") or {}
        result.miss = str((details.get("cache_miss") or {}).get("reason", ""))
        result.text = "".join(self._texts)
        return result


def make_asker(options: argparse.Namespace, client: HttpClient, model: str) -> Asker:
    """Return an asker. Raises ConfigError if --extra-body is not a JSON object, or
    --endpoint not a path."""
    path = options.endpoint or ENDPOINTS[options.backend]
    if not path.startswith("/"):
        raise ConfigError(f"endpoint must begin with a slash, such as /v1/completions; got {path}.")
    is_chat = options.backend == "openai-chat" or path.endswith("/chat/completions")
    common: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    given = {name: getattr(options, name) for name in SAMPLERS}
    common |= {name: value for name, value in given.items() if value is not None}
    if options.ignore_eos:
        common["ignore_eos"] = True
    if options.logprobs is not None:
        fields: dict[str, Any] = {"logprobs": options.logprobs}
        common |= {"logprobs": True, "top_logprobs": options.logprobs} if is_chat else fields
    common |= _extra_body(options.extra_body)
    return Asker(client, path, is_chat, common)


def as_texts(requests: list[BenchRequest], tokens: Tokens) -> list[BenchRequest]:
    """Convert prompts to texts, because a chat needs texts. The server may tokenize a text
    differently."""
    return [
        BenchRequest(tokens.decode(request.prompt), request.prompt_len, request.output_len)
        if isinstance(request.prompt, list)
        else request
        for request in requests
    ]


def _extra_body(given: str | None) -> dict[str, Any]:
    try:
        extra = json.loads(given or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body is not valid JSON ({error}): {given}") from error
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra-body must be a JSON object, got {given}")
    return extra
