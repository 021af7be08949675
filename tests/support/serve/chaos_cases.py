"""Requests with known answers, of every kind, and clients that send them.

A greedy or seeded request has one answer, whatever else the server does and however often it was
killed. A truncated answer must be marked: by an error, or by a connection that breaks; never by
another text.
"""

import asyncio
import contextlib
import json
import random
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from quire.tools.http_client import HttpClient, HttpError

Answer = list[tuple[str, str]]  # text and finish_reason, by index
CUT_CODES = {"engine_dead", "draining", "engine_busy"}
WORDS = ("fox", "ran", "over", "a", "hill", "and", "saw", "one", "little", "star", "at", "night")
ANSWER_S = 120.0
KINDS = ("completion", "chat", "n", "best_of", "beams", "logprobs", "pieces")


class Wrong(Exception):
    """An answer that the quiet run did not give."""


class Cut(Exception):
    """The server did not answer, and said so, or the connection broke."""


@dataclass(frozen=True)
class Case:
    """kind: one of KINDS. body: of the request, without `stream`."""

    number: int
    kind: str
    body: dict[str, Any]

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.kind == "chat" else "/v1/completions"


def make_cases(rng: random.Random, num: int) -> list[Case]:
    """As many of each kind. Many begin alike, so that they share blocks."""
    stems = [" ".join(rng.choices(WORDS, k=40)) for _ in range(4)]
    return [_case(rng, number, KINDS[number % len(KINDS)], stems) for number in range(num)]


def _case(rng: random.Random, number: int, kind: str, stems: list[str]) -> Case:
    text = f"{rng.choice(stems)} {' '.join(rng.choices(WORDS, k=rng.randint(1, 60)))}"
    body: dict[str, Any] = {"max_tokens": rng.randint(5, 90), "user": f"u{number % 3}"}
    if rng.random() < 0.5:
        body |= {"temperature": 0}
    else:
        body |= {"temperature": 0.9, "seed": number, "top_p": 0.95}
    if kind == "chat":
        return Case(number, kind, body | {"messages": [{"role": "user", "content": text}]})
    body["prompt"] = text
    if kind in ("n", "best_of"):
        body |= {"temperature": 0.8, "seed": number, "n": 3, "max_tokens": rng.randint(5, 40)}
    if kind == "best_of":
        body |= {"n": 2, "best_of": 3}
    if kind == "beams":
        body = {"prompt": text, "use_beam_search": True, "beam_width": 3, "max_tokens": 16}
    if kind == "logprobs":
        body["logprobs"] = 2
    return Case(number, kind, body)


class Asker:
    """Asks one server. expected: answers of the quiet run; None to find them out."""

    def __init__(self, url: str, expected: dict[int, Answer] | None) -> None:
        self._url = url
        self._expected = expected

    async def ask(self, case: Case, rng: random.Random) -> Answer | None:
        """Ask in one of the ways that there are for its kind; None if the client left early.
        Raises Wrong or Cut."""
        async with asyncio.timeout(ANSWER_S), contextlib.AsyncExitStack() as stack:
            client = HttpClient(self._url)
            stack.push_async_callback(client.close)
            try:
                if case.kind == "pieces" and self._expected is not None:
                    found = await self._pieces(case, rng)
                elif self._expected is None or case.kind in ("beams", "best_of"):
                    found = await self._whole(client, case)
                else:
                    way = rng.choice((self._whole, self._stream, self._stream, self._leave))
                    found = await way(client, case)
            except HttpError as error:
                if error.status not in (0, 503):
                    raise Wrong(f"case {case.number}: status {error.status}: {error}") from error
                raise Cut(str(error)) from error
            except (OSError, WebSocketException) as error:
                raise Cut(f"{type(error).__name__}: {error}") from error
        if found is not None and self._expected is not None:
            wanted = self._expected[case.number]
            if found != wanted:
                raise Wrong(f"case {case.number} ({case.kind}): {found!r} is not {wanted!r}")
        return found

    async def _whole(self, client: HttpClient, case: Case) -> Answer:
        choices = (await client.request(case.path, "POST", case.body)).json()["choices"]
        return [(_text(choice), choice["finish_reason"]) for choice in choices]

    async def _leave(self, client: HttpClient, case: Case) -> None:
        """Close the connection after a few events, or while the answer is awaited."""
        if case.number % 2:
            with contextlib.suppress(HttpError):
                await client.request(case.path, "POST", case.body, timeout_s=0.05)
            return
        events = client.stream_json(case.path, case.body | {"stream": True, "ignore_eos": True})
        async with contextlib.aclosing(events):
            for _ in range(case.number % 5):
                if await anext(events, None) is None:
                    break

    async def _stream(self, client: HttpClient, case: Case) -> Answer:
        texts, reasons = [""] * case.body.get("n", 1), [""] * case.body.get("n", 1)
        events = client.stream_json(case.path, case.body | {"stream": True})
        async with contextlib.aclosing(events):
            async for data in events:
                self._take(case, json.loads(data), texts, reasons)
        if not all(reasons):
            raise Wrong(f"case {case.number}: the stream ended in order, but not its choices")
        return list(zip(texts, reasons, strict=True))

    async def _pieces(self, case: Case, rng: random.Random) -> Answer | None:
        """Over a WebSocket, the prompt word by word; some leave before its end."""
        leaves = rng.random() < 0.25
        fields = {name: value for name, value in case.body.items() if name != "prompt"}
        words = case.body["prompt"].split(" ")
        texts, reasons = [""], [""]
        async with connect(self._url.replace("http", "ws") + "/v1/stream") as line:
            await line.send(json.dumps({"type": "start"} | fields))
            for i, word in enumerate(words):
                if leaves and i > len(words) // 2:
                    return None
                piece = word if i == 0 else " " + word
                await line.send(json.dumps({"type": "append", "prompt": piece}))
                await asyncio.sleep(rng.random() * 0.004)
            await line.send(json.dumps({"type": "end"}))
            async for data in line:
                message = json.loads(data)
                if message["type"] == "done":
                    return list(zip(texts, reasons, strict=True))
                self._take(case, message, texts, reasons)
        raise Cut("the WebSocket was closed")

    def _take(self, case: Case, event: Any, texts: list[str], reasons: list[str]) -> None:
        """One event; what has come so far must be the beginning of the answer."""
        if "error" in event:
            if event["error"]["code"] not in CUT_CODES:
                raise Wrong(f"case {case.number}: {event['error']}")
            raise Cut(event["error"]["message"])
        for choice in event.get("choices", []):
            index = choice["index"]
            texts[index] += _text(choice)
            reasons[index] = choice["finish_reason"] or reasons[index]
            if self._expected is not None:
                wanted = self._expected[case.number][index][0]
                if not wanted.startswith(texts[index]):
                    raise Wrong(f"case {case.number}: {texts[index]!r} does not begin {wanted!r}")


def _text(choice: Any) -> str:
    if "text" in choice:
        return str(choice["text"])
    message: dict[str, Any] = choice.get("message") or choice.get("delta") or {}
    return str(message.get("content") or "")
