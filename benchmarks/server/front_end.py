"""Measure the time that the HTTP front end adds to a request and to a token.

The loads are 1 and 64 open streams, and 200 short requests per second.

    python -m benchmarks.server.front_end

A client's times alone do not show it: most of their time is the model's. Nor does a second run
without HTTP. Gaps between tokens hide a constant delay, and two runs never have the same steps. So
one run is timed at both ends, on the machine's monotonic clock. A relay on the Unix socket between
core and API process notes when each request and each token passes. The client notes when it sent
the request and when each token arrived. The time between belongs to the front end: HTTP,
validation, tokens and text, JSON, both sockets, and waiting for a processor. It includes this
client's own reading, which cannot be separated.

Per request: from sending until the core has it, and the first token's way back. Per token: the way
back. The supervisor, the API process and the core run as in `quire serve`; the relay is a thread of
the supervisor's process, which sleeps otherwise. All streams of a load are opened at the same
moment, which is the worst case for a request. With a rate, requests are sent at fixed intervals,
whether or not earlier ones have ended; `late` is the client's own delay in sending them. A chunk
may hold several tokens, if text was incomplete before or the reader is slow; it counts for each of
them.
"""

import argparse
import asyncio
import json
import select
import socket
import statistics
import sys
import tempfile
import threading
import time
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.result_files import keyed, options_of, write
from benchmarks.server.servers import free_port, running
from quire.base.messages import Request
from quire.base.settings.config import ServerConfig, config_from_flat
from quire.base.step_outputs import StepOutputs
from quire.engine.client.output import StepReader
from quire.engine.wire.wire import Frames, client_codec, core_codec
from quire.models.checkpoint.source import resolve_source
from quire.serve.processes.cores import ALONE
from quire.serve.processes.launch import CoreSocket
from quire.serve.several.served import ServedModel, first_request
from quire.serve.supervisor import ServedCore, Supervisor, bind
from quire.tools.bench.serve import wait_until_ready
from quire.tools.http_client import HttpClient
from quire.tools.report import benchmark_parser, plain_facts

NUM_IDS = 1000  # token ids in prompts; the first two identify a request
READY_S = 120.0
BYTES = 1 << 18


@dataclass
class Passed:
    """One request at the relay: when it came, and when each of its tokens came. Seconds."""

    in_s: float
    tokens_s: list[float] = field(default_factory=list)


class Relay(CoreSocket):
    """A core's socket whose clients are given another one, with a thread that notes what passes."""

    def __init__(self) -> None:
        super().__init__()
        self._core_path = self.path
        self.path = self.home / "relay.sock"
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(self.path))
        self._door.listen(4)
        self._passed: tuple[list[tuple[float, bytes]], ...] = ([], [])  # in, out
        threading.Thread(target=self._relay, daemon=True).start()

    def _relay(self) -> None:
        client, _ = self._door.accept()
        core = socket.socket(socket.AF_UNIX)
        core.connect(str(self._core_path))
        ways = {client: (core, self._passed[0]), core: (client, self._passed[1])}
        while True:
            readable, _, _ = select.select(list(ways), [], [])
            for source in readable:
                data = source.recv(BYTES)
                now_s = time.monotonic()
                target, passed = ways[source]
                if not data:
                    client.close()
                    core.close()
                    return
                target.sendall(data)
                passed.append((now_s, data))

    def requests(self) -> dict[str, Passed]:
        """Return the observed messages by the first two ids of the prompt."""
        codec, frames, found = core_codec(), Frames(), {}
        names: dict[str, str] = {}
        for at_s, data in self._passed[0]:
            for message in map(codec.decode, frames.feed(data)):
                if isinstance(message, Request):
                    name = "{} {}".format(*message.prompt_token_ids[:2])
                    names[message.request_id] = name
                    found[name] = Passed(at_s)
        out, frames, reader = client_codec(), Frames(), StepReader()
        for at_s, data in self._passed[1]:
            for message in map(out.decode, frames.feed(data)):
                if isinstance(message, StepOutputs):
                    for name, _ in reader.tokens(message):
                        found[names[name.request_id]].tokens_s.append(at_s)
                    for update in message.details:
                        times = found[names[update.request_id]].tokens_s
                        times.extend([at_s] * len(update.token_ids))
        return found


def serve(options: argparse.Namespace) -> int:
    """Run the server's process: `quire serve` with the relay. Writes the observed messages when it
    ends."""
    settings = {"model": options.model, "disable_log_stats": True}
    server = ServerConfig(port=options.port)
    with bind(server.host, server.port) as tcp, closing(Relay()) as relay:
        model = ServedModel(config_from_flat(**settings), (options.model,))
        first = first_request(model, resolve_source(model.engine.model))
        cores = [ServedCore(model, ALONE, relay)]
        status = Supervisor(server, "warning", tcp, cores, first).run()
        passed = {name: [each.in_s, each.tokens_s] for name, each in relay.requests().items()}
        options.trace.write_text(json.dumps(passed), encoding="utf-8")
    return status


@dataclass
class Met:
    """One request at the client."""

    name: str
    sent_s: float
    tokens_s: list[float] = field(default_factory=list)
    late_s: float = 0.0  # delay of the client in sending it


async def send_request(
    client: HttpClient, model: str, number: int, options: argparse.Namespace, output_len: int = 0
) -> Met:
    """Stream one answer. The usage in each chunk says how many tokens it completes."""
    rng = np.random.default_rng(number)
    ids = [number % NUM_IDS, number // NUM_IDS, *rng.integers(0, NUM_IDS, options.input_len - 2)]
    body = {
        "model": model,
        "prompt": [int(token_id) for token_id in ids],
        "max_tokens": output_len or options.output_len,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    met = Met(f"{ids[0]} {ids[1]}", time.monotonic())
    async with aclosing(client.stream_json("/v1/completions", body)) as payloads:
        async for payload in payloads:
            now_s = time.monotonic()
            num = json.loads(payload)["usage"]["completion_tokens"]
            met.tokens_s.extend([now_s] * (num - len(met.tokens_s)))
    return met


async def run_load(
    client: HttpClient, model: str, num_streams: int, first: int, options: argparse.Namespace
) -> list[Met]:
    """Run this many streams at once, repeatedly, until there were enough requests."""
    met: list[Met] = []
    while len(met) < max(num_streams, options.num_requests):
        start = first + len(met)
        requests_made = [
            send_request(client, model, start + i, options) for i in range(num_streams)
        ]
        met += await asyncio.gather(*requests_made)
    return met


async def run_rate(
    client: HttpClient, model: str, first: int, options: argparse.Namespace
) -> list[Met]:
    """Send short requests at `options.rate` per second, and return their results."""
    num, start_s = round(options.rate * options.seconds), time.monotonic()

    async def send(i: int) -> Met:
        due_s = start_s + i / options.rate
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        met = await send_request(client, model, first + i, options, options.short_len)
        met.late_s = met.sent_s - due_s
        return met

    return list(await asyncio.gather(*map(send, range(num))))


async def measure(url: str, options: argparse.Namespace) -> dict[str, list[Met]]:
    """Return the results by load, after requests that do not count."""
    client = HttpClient(url)
    await wait_until_ready(client, READY_S)
    model = (await client.request("/v1/models")).json()["data"][0]["id"]
    await run_load(client, model, 4, 0, options)
    met: dict[str, list[Met]] = {}
    for i, num_streams in enumerate(options.streams, 1):
        load = f"{num_streams} {'stream' if num_streams == 1 else 'streams'}"
        met[load] = await run_load(client, model, num_streams, i * 10_000, options)
    if options.rate:
        load = f"{options.rate:g} requests/s"
        met[load] = await run_rate(client, model, 900_000, options)
    await client.close()
    return met


def added(met: list[Met], passed: dict[str, Any]) -> dict[str, Any]:
    """Return the added milliseconds, p50 and p99."""
    requests, tokens, steps = [], [], []
    for one in met:
        in_s, out_s = passed[one.name]
        assert len(out_s) == len(one.tokens_s), f"{len(out_s)} tokens, {len(one.tokens_s)} came"
        back = np.subtract(one.tokens_s, out_s)
        requests.append(in_s - one.sent_s + float(back[0]))
        tokens += back[1:].tolist()
        steps += np.diff(out_s).tolist()
    return {
        "num_requests": len(requests),
        "num_tokens": len(tokens),
        "request_ms": {f"p{p}": float(np.percentile(requests, p)) * 1e3 for p in (50, 99)},
        "token_ms": {f"p{p}": float(np.percentile(tokens, p)) * 1e3 for p in (50, 99)},
        "step_ms": statistics.median(steps) * 1e3,
        "late_ms": float(np.percentile([one.late_s for one in met], 99)) * 1e3,
    }


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--num-requests", type=int, default=64, help="at least, per load")
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rate", type=float, default=200.0, help="short requests/s; 0: none")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of the rate")
    parser.add_argument("--short-len", type=int, default=4, help="output of a short request")
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.trace is not None:
        return serve(options)
    facts = plain_facts()
    print(f"# added by the front end, milliseconds; {options.model}; {facts['cpu']},", end=" ")
    print(f"{facts['cores']} cores; {facts['date']}, commit {facts['commit']}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        trace, port = Path(directory) / "trace.json", options.port or free_port()
        command = [sys.executable, "-m", "benchmarks.server.front_end", "--trace", str(trace)]
        command += ["--port", str(port)]
        with running([*command, "--model", options.model]):
            met = asyncio.run(measure(f"http://127.0.0.1:{port}", options))
        passed = json.loads(trace.read_text(encoding="utf-8"))
    results = {load: added(each, passed) for load, each in met.items()}
    for load, each in results.items():
        (r50, r99), (t50, t99) = each["request_ms"].values(), each["token_ms"].values()
        print(
            f"{load}: per request p50 {r50:.2f}, p99 {r99:.2f}; per token p50 {t50:.3f},"
            f" p99 {t99:.3f}; {each['num_requests']} requests, late {each['late_ms']:.2f},"
            f" a step took {each['step_ms']:.1f}"
        )
    rows = keyed("load", results)
    write(options.output_json, "server.front_end", rows, options_of(options), plain_facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
