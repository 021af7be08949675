"""Measure the code to read, in order to follow a step, a forward pass or an HTTP chat.

    python -m benchmarks.scheduler.trips [--files]

A trip is the set of quire's Python files whose functions run for one action, found with
`sys.setprofile`. A second, equal action is measured, so that code that runs only once is ignored:

step      the core plans one step and takes its result: one row decodes, a prompt is admitted, and
          a row ends. The executor has no model.
forward   the demo model's runner carries out one plan on the CPU: one row decodes.
chat      one POST to /v1/chat/completions that streams, from ASGI through the socket to the core
          and back. Client and core live in one process.
front     the part of that chat which an API process runs: without the core's thread, whose files
          the other trips count.

Lines are counted in whole files, as `wc -l` counts them.
"""

import argparse
import asyncio
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

import quire
from benchmarks.result_files import options_of, write
from benchmarks.virtual.dry_run import dry_request, dry_run
from quire.base.clock import MonotonicClock
from quire.base.messages import Ready
from quire.base.requests.sampling_params import SamplingParams
from quire.base.requests.validation import RequestLimits
from quire.base.settings.config import SchedulerConfig, ServerConfig, config_from_flat
from quire.engine.client.remote import RemoteClient
from quire.engine.loop.core import EngineCore
from quire.engine.start.build import Engine, build_engine
from quire.engine.wire.core_server import CoreReports, CoreServer
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from quire.tools.report import benchmark_parser, print_head

PACKAGE = Path(quire.__file__).parent
BLOCK_SIZE = 16
CORE = "core"  # the name of the core's thread


class Trip:
    """The files whose functions run while `is_on`, in all threads started after `install`.

    front: the files of all threads except the core's.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.front: set[str] = set()
        self.is_on = False

    def install(self) -> None:
        """Receive every call in this thread and in later threads."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if self.is_on and event == "call":
            name = frame.f_code.co_filename
            self.files.add(name)
            if threading.current_thread().name != CORE:
                self.front.add(name)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Collect the files of one action."""
        self.files, self.front, self.is_on = set(), set(), True
        yield
        self.is_on = False


def sources(files: set[str]) -> dict[str, int]:
    """Return the lines of each file of the package, by its path there."""
    paths = sorted(Path(name) for name in files if name.startswith(str(PACKAGE)))
    return {str(p.relative_to(PACKAGE)): len(p.read_text().splitlines()) for p in paths}


def step_trip(trip: Trip) -> None:
    """Follow the core through one step with an admission, a decoding row and a row that ends."""
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, pipeline_depth=1)
    scheduler, executor = dry_run(256, BLOCK_SIZE, config, 256, enable_prefix_caching=True)
    core = EngineCore(scheduler, executor, MonotonicClock(), RequestLimits(50_000, 256, 0, 8))
    for number in range(2):
        core.add(dry_request(f"decodes-{number}", list(range(20)), 100))
        core.add(dry_request(f"ends-{number}", list(range(30, 50)), 2))
        core.step()
        core.add(dry_request(f"begins-{number}", list(range(60, 100)), 100))
        with trip.measured():
            core.step()
    core.close()


def small_engine() -> Engine:
    """Load the demo model as a server would."""
    return build_engine(
        config_from_flat(
            model="demo", max_num_seqs=8, max_model_len=512, kv_cache_memory_bytes=16 << 20
        )
    )


def forward_trip(trip: Trip, engine: Engine) -> None:
    """Follow the executor of the demo model through one decoding step."""
    core = engine.client.core
    prompt = engine.renderer.render("Once upon")
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    core.add(engine.requests.make(prompt, params, "forward"))
    for _ in range(3):
        core.step()
    executor = core.executor
    plan = core.plan()
    assert plan is not None, "the request still runs"
    core.take()
    decisions = core.doors.schedule(core._clock.now())
    assert decisions.plan is not None, "the request still runs"
    with trip.measured():
        executor.submit(decisions.plan)
        result = executor.next_result()
    core.doors.update(result, core._clock.now())
    while core.has_work:
        core.step()


async def post(app: Any, body: dict[str, Any]) -> bytes:
    """Send a chat to an ASGI application in this process by POST and return the answer."""
    data, parts = msgspec.json.encode(body), list[bytes]()
    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "http_version": "1.1", "scheme": "http", "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80), "raw_path": b"/v1/chat/completions", "root_path": "",
        "asgi": {"version": "3.0"},
    }  # fmt: skip
    sent = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if sent.is_set():
            await asyncio.Event().wait()  # the client stays
        sent.set()
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return b"".join(parts)


async def chat(trip: Trip, engine: Engine, path: Path) -> None:
    """Ask twice, and follow the second chat."""
    client = await RemoteClient.connect(path, engine.renderer.tokenizer)
    context = ApiContext(
        client, engine.renderer, engine.requests, ("demo",), ServerConfig(), int(time.time())
    )
    app = create_app(context)
    body = {
        "model": "demo", "stream": True, "max_tokens": 8,
        "messages": [{"role": "user", "content": "Tell me a story."}],
    }  # fmt: skip
    await post(app, body)
    with trip.measured():
        answer = await post(app, body)
    assert b"[DONE]" in answer, answer
    await client.close()


def chat_trip(trip: Trip, engine: Engine) -> None:
    """Serve the engine to a client in this process, and chat with it."""
    core, config = engine.client.core, engine.config
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "core"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(1)
        max_len, num_rows = config.model.max_model_len or 0, config.scheduler.max_num_seqs or 0
        ready = Ready(0, engine.spec.vocab_size, max_len, 0, num_rows, {}, "")
        server = CoreServer(core, listener, ready, CoreReports(lambda: ""), MonotonicClock())
        thread = threading.Thread(target=server.run, name=CORE)
        thread.start()
        asyncio.run(chat(trip, engine, path))
        server.stop()
        thread.join()


def described(name: str, found: dict[str, int], shows_files: bool) -> dict[str, Any]:
    """Print a trip, and return its row of results."""
    print(f"{name:8} {len(found):4} files {sum(found.values()):7,} lines")
    if shows_files:
        print("\n".join(f"    {lines:4} {path}" for path, lines in found.items()))
    return {"trip": name, "files": len(found), "lines": sum(found.values())}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--files", action="store_true", help="list each trip's files")
    options: argparse.Namespace = parser.parse_args()
    print_head("Code that runs for one action")
    trip, rows = Trip(), list[dict[str, Any]]()
    engine = small_engine()
    trip.install()
    actions: dict[str, Callable[[], None]] = {
        "step": lambda: step_trip(trip),
        "forward": lambda: forward_trip(trip, engine),
        "chat": lambda: chat_trip(trip, engine),
    }
    for name, action in actions.items():
        action()
        rows.append(described(name, sources(trip.files), options.files))
    rows.append(described("front", sources(trip.front), options.files))
    sys.setprofile(None)
    write(options.output_json, "scheduler.trips", rows, options_of(options))
    engine.client.close()


if __name__ == "__main__":
    main()
