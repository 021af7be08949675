"""Measure the cost of the worst bodies of the largest permitted size in an API process: CPU time
and memory.

    python -m benchmarks.server.worst_bodies

Each body is sent to the app as a server does it, in pieces of 64 KiB. Each has a process of its
own, with the demo model's tokenizer and no engine. Valid bodies are refused where the engine would
begin, or at the check of their length. Templates run in other processes, which are not counted. CPU
is the process's time, all threads together. Memory is the process's peak above its earlier memory,
in multiples of the body. The pieces, and the body joined from them, are already two of these. Held
is the longest time for which the event loop was blocked.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.result_files import options_of, write
from quire.base.errors import RequestError
from quire.base.messages import Ready
from quire.base.settings.config import ServerConfig, config_from_flat
from quire.engine.start.text import build_text_side
from quire.models.checkpoint.source import resolve_model
from quire.serve.app import create_app
from quire.serve.bodies.counts import (
    MAX_CONTAINERS,
    MAX_EXPONENTS,
    MAX_TEXTS,
    MAX_VALUES,
    MAX_WIDE_BYTES,
)
from quire.serve.context import ApiContext
from quire.serve.server import MAX_DIGITS
from quire.tools.report import benchmark_parser

PIECE = 1 << 16
COMPLETION, CHAT, BLOCKS = "/v1/completions", "/v1/chat/completions", "/v1/messages"
USER = '{"role":"user","content":"a"}'
EMOJI = "\U0001f98a"

Build = Callable[[int], bytes]


@dataclass(frozen=True)
class Body:
    """build: makes it, of at most so many bytes. path: where it goes; ws is the WebSocket."""

    name: str
    path: str
    build: Build


@dataclass(frozen=True)
class Cost:
    """cpu_s and held_s in seconds; memory in multiples of the body; status: of the answer."""

    cpu_s: float
    held_s: float
    memory: float
    status: int


def many(
    item: str, field: str, rest: str = "", ends: Sequence[str] = "[]", max_items: int = 1 << 30
) -> Build:
    """Return a builder of bodies with one field that holds an item as often as it fits."""

    def build(size: int) -> bytes:
        head, tail = f'{{"{field}":{ends[0]}', f"{ends[1]}{rest}}}"
        count = min(max_items, (size - len((head + tail).encode()) + 1) // (len(item.encode()) + 1))
        return (head + ",".join([item] * count) + tail).encode()

    return build


def numbered(value: str, field: str | None, rest: str = "", max_items: int = 1 << 30) -> Build:
    """Return a builder of bodies with an object of as many different names as fit. Without a field
    the object is the body."""

    def build(size: int) -> bytes:
        head, tail = ("{", "}") if field is None else (f'{{"{field}":{{', f"}}{rest}}}")
        count = min(max_items, (size - len(head) - len(tail) + 1) // (len(value) + 11))
        names = (f'"{index:07d}":{value}' for index in range(count))
        return (head + ",".join(names) + tail).encode()

    return build


def text(
    unit: str, field: str = "prompt", last: str = "", rest: str = "", name: bool = False
) -> Build:
    """Return a builder of bodies with one long text, as a field's value or name."""

    def build(size: int) -> bytes:
        head, tail = ('{"', '":1}') if name else (f'{{"{field}":"', f'"{rest}}}')
        count = (size - len((head + tail + last).encode())) // len(unit.encode())
        return (head + unit * count + last + tail).encode()

    return build


def started(build: Build) -> Build:
    """Return a builder of the same body as a message that begins a request on /v1/stream."""
    return lambda size: b'{"type":"start",' + build(size - 16)[1:]


def deep(opening: str, closing: str, field: str) -> Build:
    def build(size: int) -> bytes:
        count = (size - len(field) - 6) // (len(opening) + len(closing))
        return f'{{"{field}":{opening * count}{closing * count}}}'.encode()

    return build


MESSAGES = f',"messages":[{USER}]'
PROMPT = ',"prompt":"a"'
SCHEMA = '{"type":"function","function":{"name":"f","parameters":{"a":{"type":"string"}}}}'
PART = '{"type":"text","text":"a"}'
NUMBER = "1" + "0" * (MAX_DIGITS - 1)
TEXT = '"' + "a" * 110 + '"'

# As many as are allowed, so that they are read
ID = "1" * 18
PARTS, EXPONENTS = MAX_CONTAINERS - 100, MAX_EXPONENTS - 100
MANY, TEXTS = MAX_VALUES - 100, MAX_TEXTS - 100
OBJECT = '{"' + "a" * 240 + '":1}'

BODIES = [
    Body("as many token ids", COMPLETION, many(ID, "prompt", max_items=MANY)),
    Body(
        "as many token ids, and wide text",
        COMPLETION,
        many("1000", "prompt", f',"user":"{"a" * (3 << 20)}{EMOJI}"', max_items=MANY),
    ),
    Body("as many allowed ones", COMPLETION, many(ID, "allowed_token_ids", PROMPT, max_items=MANY)),
    Body("as many decimals", COMPLETION, many("1.23456789012345678", "prompt", max_items=MANY)),
    Body("as many texts", COMPLETION, many(TEXT, "metadata", PROMPT, max_items=TEXTS)),
    Body(
        "as many numbers with exponents",
        COMPLETION,
        many("1.2345678901234567e-300" + " " * 200, "prompt", max_items=EXPONENTS),
    ),
    Body("as many objects", COMPLETION, many(OBJECT, "metadata", PROMPT, max_items=PARTS)),
    Body(
        "as many lists and values",
        COMPLETION,
        many("[" + ",".join(["1" * 18] * 22) + "]", "prompt", max_items=PARTS),
    ),
    Body(
        "as many objects and texts",
        COMPLETION,
        many(
            "{" + '"ab":"' + "a" * 200 + '","cd":"' + "a" * 200 + '"' + "}",
            "metadata",
            PROMPT,
            max_items=PARTS,
        ),
    ),
    Body("as many names", COMPLETION, numbered(TEXT, "metadata", PROMPT, max_items=TEXTS // 2)),
    Body(
        "as many parts of a message",
        CHAT,
        many(
            PART[:-2] + "a" * 440 + '"}',
            "messages",
            ends=('[{"role":"user","content":[', "]}]"),
            max_items=PARTS,
        ),
    ),
    Body(
        "as many blocks of a message",
        BLOCKS,
        many(
            PART[:-2] + "a" * 440 + '"}',
            "messages",
            ',"max_tokens":1',
            ends=('[{"role":"user","content":[', "]}]"),
            max_items=PARTS,
        ),
    ),
    Body(
        "calls with large inputs",
        BLOCKS,
        many(
            '{"type":"tool_use","id":"a","name":"f","input":{"a":"' + "a" * 1150 + '"}}',
            "messages",
            ',"max_tokens":1',
            ends=('[{"role":"assistant","content":[', "]}]"),
            max_items=TEXTS // 10,
        ),
    ),
    Body(
        "4,096 large messages",
        CHAT,
        many(
            '{"role":"user","content":[' + ",".join([PART] * 14) + "]}", "messages", max_items=4096
        ),
    ),
    Body(
        "a tool with as many names",
        CHAT,
        numbered(
            TEXT,
            'tools":[{"type":"function","function":{"name":"f","parameters":{"x',
            "}}}]" + MESSAGES,
            max_items=TEXTS // 2,
        ),
    ),
    Body(
        "a template's variable of as many",
        CHAT,
        numbered(TEXT, 'chat_template_kwargs":{"x', "}" + MESSAGES, max_items=TEXTS // 2),
    ),
    Body("as many ids to decode", "/detokenize", many(ID, "tokens", max_items=MANY)),
    Body("a prefix of as many ids", "/v1/prefixes", many(ID, "prompt", max_items=MANY)),
    Body("a message of as many ids", "ws", started(many(ID, "prompt", max_items=MANY))),
    Body("half as much wide text", COMPLETION, lambda size: text("a", last=EMOJI)(size // 2)),
    Body(
        "half as much text with wide escapes",
        COMPLETION,
        lambda size: text("\\n", last="\\ud83e\\udd8a")(size // 2),
    ),
    Body(
        "a message of half as much wide text",
        "ws",
        lambda size: started(text("a", last=EMOJI))(size // 2),
    ),
    Body("text with one Chinese character", COMPLETION, text("a", last="\u4e16")),
    Body("Chinese text", COMPLETION, text("\u4e16")),
    Body("a message of Chinese text", "ws", started(text("\u4e16"))),
    Body("wrong stops", COMPLETION, many("1", "stop", PROMPT)),
    Body("stops", COMPLETION, many('"a"', "stop", PROMPT)),
    Body("bad words that are objects", COMPLETION, many("{}", "bad_words", PROMPT)),
    Body("logit_bias, wrong names", COMPLETION, numbered('"x"', "logit_bias", PROMPT)),
    Body("stream_options, unknown names", COMPLETION, numbered("1", "stream_options", PROMPT)),
    Body("unknown fields", COMPLETION, numbered("1", None)),
    Body(
        "one field many times",
        COMPLETION,
        lambda size: b"{" + b'"n":1,' * (size // 6 - 2) + b'"n":1}',
    ),
    Body("an unknown field with a long name", COMPLETION, text("a", name=True)),
    Body("the same in wide characters", COMPLETION, text("a", last=EMOJI, name=True)),
    Body("prompts", COMPLETION, many('"a"', "prompt")),
    Body("token ids", COMPLETION, many("1000", "prompt")),
    Body("small token ids", COMPLETION, many("1", "prompt")),
    Body("lists of token ids", COMPLETION, many("[1000]", "prompt")),
    Body("empty lists", COMPLETION, many("[]", "prompt")),
    Body("allowed_token_ids", COMPLETION, many("1000", "allowed_token_ids", PROMPT)),
    Body("ids of 640 digits", COMPLETION, many(NUMBER, "prompt")),
    Body(
        "a number of millions of digits",
        COMPLETION,
        lambda size: b'{"seed":' + b"9" * (size - 9) + b"}",
    ),
    Body("digits as a text for a number", COMPLETION, text("9", "seed", rest=PROMPT)),
    Body("the same for a decimal one", COMPLETION, text("9", "temperature", rest=PROMPT)),
    Body("decimals", COMPLETION, many("1.2345678901234567e-300", "prompt")),
    Body("exponents", COMPLETION, many("1e999999999", "prompt")),
    Body("text", COMPLETION, text("a")),
    Body("text with one wide character", COMPLETION, text("a", last=EMOJI)),
    Body(
        "the same, first",
        COMPLETION,
        lambda size: text("a")(size - 4).replace(b'"a', f'"{EMOJI}a'.encode(), 1),
    ),
    Body("text of escapes", COMPLETION, text("\\n")),
    Body("text of long escapes", COMPLETION, text("\\u0001")),
    Body("escapes and one wide character", COMPLETION, text("\\n", last=EMOJI)),
    Body("a value that repr makes longer", COMPLETION, text("\x7f", "suffix", EMOJI, PROMPT)),
    Body("response_format, nested and wide", COMPLETION, many("{}", "response_format", PROMPT)),
    Body("half of a surrogate pair", COMPLETION, text("a", last="\\ud800")),
    Body("not UTF-8", COMPLETION, lambda size: text("a")(size - 1)[:-2] + b'\xff"}'),
    Body("NaN", COMPLETION, many("NaN", "prompt")),
    Body("lists in lists", COMPLETION, deep("[", "]", "prompt")),
    Body("objects in objects", COMPLETION, deep('{"a":', "}", "metadata")),
    Body("no JSON", COMPLETION, lambda size: b"[" + b"1," * (size // 2 - 2) + b"]"),
    Body("messages", CHAT, many(USER, "messages")),
    Body("messages that are none", CHAT, many("1", "messages")),
    Body(
        "parts of a message",
        CHAT,
        many(PART, "messages", ends=('[{"role":"user","content":[', "]}]")),
    ),
    Body("a long message", CHAT, text("a", 'messages":[{"role":"user","content', rest="}]")),
    Body("tools", CHAT, many(SCHEMA, "tools", MESSAGES)),
    Body(
        "one wide tool",
        CHAT,
        numbered(
            '{"type":"string"}',
            'tools":[{"type":"function","function":{"name":"f","parameters":{"x',
            "}}}]" + MESSAGES,
        ),
    ),
    Body("chat_template_kwargs", CHAT, numbered("1", "chat_template_kwargs", MESSAGES)),
    Body("documents", CHAT, many('{"a":"b"}', "documents", MESSAGES)),
    Body("text to count", "/tokenize", text("a ")),
    Body("token ids to decode", "/detokenize", many("1000", "tokens")),
    Body("wrong ids to decode", "/detokenize", many('"a"', "tokens")),
    Body("a prefix of token ids", "/v1/prefixes", many("1000", "prompt")),
    Body("a prefix of messages", "/v1/prefixes", many("1", "messages")),
    Body("a message of text", "ws", started(text("a"))),
    Body("a message of text with one wide character", "ws", started(text("a", last=EMOJI))),
    Body("a message of wrong stops", "ws", started(many("1", "stop", PROMPT))),
    Body("a message of token ids", "ws", started(many("1000", "prompt"))),
    Body("a message of unknown fields", "ws", started(numbered("1", None))),
]


class NoEngine:
    """Refuses what would be handed to an engine."""

    is_alive = True

    def __init__(self, max_model_len: int) -> None:
        self.ready = Ready(0, 1536, max_model_len, 20, 8, {}, "")

    def check(self, request: Any) -> None:
        raise RequestError("this is where the engine would begin.")

    def generate(self, request: Any) -> Any:
        self.check(request)


def app_of(max_body_bytes: int, max_model_len: int) -> Any:
    """Make the app as in an API process."""
    sys.set_int_max_str_digits(MAX_DIGITS)
    config = config_from_flat(model="demo")
    side = build_text_side(config.model, resolve_model("demo", None, progress=False))
    server = ServerConfig(max_body_bytes=max_body_bytes)
    client: Any = NoEngine(max_model_len)
    return create_app(ApiContext(client, side.renderer, side.requests, ("demo",), server, 0))


def cost_of(app: Any, body: Body, size: int) -> Cost:
    """Measure the cost in a child process. Its earlier use is its parent's."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(measured(app, body, size)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return Cost(**json.loads(found))


def measured(app: Any, body: Body, size: int) -> dict[str, float]:
    data = body.build(min(size, MAX_WIDE_BYTES) if body.path == "ws" else size)
    assert len(data) <= size, (body.name, len(data))
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before, begun = memory("VmRSS"), time.process_time()
    status, held_s = asyncio.run(_sent(app, body.path, data))
    cpu_s = time.process_time() - begun
    peak = memory("VmHWM") - before
    return {"cpu_s": cpu_s, "held_s": held_s, "memory": peak / size, "status": status}


def memory(name: str) -> int:
    """Return the bytes of this process, by the kernel's count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


async def _sent(app: Any, path: str, data: bytes) -> tuple[int, float]:
    """Send a body; return the status of the answer, and the longest time for which the loop was
    blocked."""
    gaps = [0.0]

    async def watch() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            gaps.append(max(gaps.pop(), now - last))
            last = now

    watching = asyncio.create_task(watch())
    status = await (_message(app, data) if path == "ws" else _post(app, path, data))
    watching.cancel()
    return status, gaps[0]


async def _post(app: Any, path: str, data: bytes) -> int:
    view, starts = memoryview(data), iter(range(0, len(data), PIECE))
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        start = next(starts, None)
        if start is None:
            await asyncio.sleep(3600)
            raise AssertionError
        piece = bytes(view[start : start + PIECE])
        return {"type": "http.request", "body": piece, "more_body": start + PIECE < len(data)}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "path": path, "raw_path": path.encode(), "query_string": b"", "scheme": "http",
        "headers": [(b"content-type", b"application/json")], "server": ("x", 80),
    }  # fmt: skip
    await app(scope, receive, send)
    return int(sent[0]["status"])


async def _message(app: Any, data: bytes) -> int:
    """Send a message; return the code that closed the connection, or 1000 if the client had to
    close it."""
    incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    incoming.put_nowait({"type": "websocket.connect"})
    incoming.put_nowait({"type": "websocket.receive", "text": data.decode()})
    codes: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "websocket.close":
            codes.append(message["code"])
        elif message["type"] == "websocket.send":
            incoming.put_nowait({"type": "websocket.disconnect", "code": 1000})

    scope = {
        "type": "websocket", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "ws",
        "path": "/v1/stream", "raw_path": b"/v1/stream", "query_string": b"", "headers": [],
        "server": ("x", 80), "subprotocols": [],
    }  # fmt: skip
    await app(scope, incoming.get, send)
    return codes[0] if codes else 1000


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--mib", type=int, default=16, help="size of the bodies")
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--only", default="", help="bodies with this in their names")
    options: argparse.Namespace = parser.parse_args()
    size = options.mib << 20
    app = app_of(size, options.max_model_len)
    rows = []
    print(f"{'body':44} {'to':22} status   cpu s  held s  memory")
    for body in BODIES:
        if options.only not in body.name:
            continue
        cost = cost_of(app, body, size)
        rows.append({"body": body.name, "path": body.path, **vars(cost)})
        print(
            f"{body.name:44} {body.path:22} {cost.status:6d} {cost.cpu_s:7.2f} {cost.held_s:7.2f}"
            f" {cost.memory:7.1f}", flush=True,
        )  # fmt: skip
    worst = {name: max(row[name] for row in rows) for name in ("cpu_s", "held_s", "memory")}
    print(
        f"worst: {worst['cpu_s']:.2f} s, held {worst['held_s']:.2f} s, {worst['memory']:.1f} times"
        " the largest size"
    )
    write(options.output_json, "server.worst_bodies", rows, options_of(options) | {"worst": worst})


if __name__ == "__main__":
    main()
