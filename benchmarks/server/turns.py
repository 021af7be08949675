"""Measure how much later than the model's own time a turn of a long conversation starts.

    python -m benchmarks.server.turns --output-json turns.json

A conversation of 16,000 tokens is known to the server. The client sends it again with a new message
of 500 tokens, as chat clients do. Its keys and values are in one of three places: on the device, in
host memory, or in a directory. Two conversations take turns in a pool for one, so that each turn
loads its blocks from host memory. For the directory the server is started again.

first token    from sending the body to the first chunk, at the client
model          the runner's own time of the steps of this turn; for other places than the device,
               the median of the turns on the device, so that moving blocks is not part of it
later          the first minus the second; the aim is 10 ms on the device
limit          elsewhere: 10 ms, and 1.3 times the moved bytes over the bandwidth of copying memory,
               or of reading the same files once more

The CPU times are those of the server's processes for one turn. `turn_parts.py` has the parts.
`deep` is four layers of Qwen3-0.6B with random weights, and the tokenizer of `turn_parts.py`. Its
keys and values have a seventh of the whole model's size: 16 KiB per token.
"""

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.result_files import Row, options_of, write
from benchmarks.server import turn_parts
from benchmarks.server.servers import free_port, running
from benchmarks.server.turn_parts import (
    NUM_HELD,
    NUM_NEW,
    Message,
    Texts,
    body_of,
    text_of,
    turn_of,
    write_tokenizer,
)
from benchmarks.timing import copy_bandwidth
from quire.tools.bench.serve import wait_until_ready
from quire.tools.http_client import DONE, HttpClient, HttpError
from quire.tools.report import benchmark_parser, plain_facts, print_head

READY_S = 180.0
QUIET_S = 0.6  # without a new step, after which all steps of a turn have been reported
AIM_MS = 10.0
SLACK = 1.3  # of moving blocks, relative to their bytes over the bandwidth
SPARE = 1.1  # size of the pool, relative to one conversation
METRIC = re.compile(r"^quire:(\w+?)(?:_total)?(?:\{[^}]*\})? ([-+.\deE]+)$", re.MULTILINE)
KINDS = {"quire.serve.server": "api", "template_worker": "template"}
PLACES = ("device", "host", "directory")


@dataclass(frozen=True)
class Cell:
    """One model. kv_bytes: of a token. overrides: of the model's config. has_tokenizer: whether
    the model has its own."""

    name: str
    model: str
    kv_bytes: int
    overrides: dict[str, int]
    has_tokenizer: bool = False


CELLS = (
    Cell("demo", "demo", 3072, {"max_position_embeddings": 32768}, has_tokenizer=True),
    Cell("deep", "shape:qwen3-0.6b", 16384, {"num_hidden_layers": 4}),
)


@dataclass
class Turn:
    """Times of one turn in milliseconds. num_moved: bytes that came from the place. cpu_ms: by kind
    of the server's processes."""

    place: str
    first_ms: float
    steps_ms: float
    num_prompt: int
    num_cached: int
    num_moved: int = 0
    cpu_ms: dict[str, float] = field(default_factory=dict)


def row_of(cell: str, turns: list[Turn], model_ms: float, bytes_per_s: float) -> Row:
    """Return the figures of the turns of one place. model_ms: the model's own time. bytes_per_s:
    bandwidth of the place; infinity for the device."""
    moved_ms = SLACK * statistics.median(turn.num_moved for turn in turns) / bytes_per_s * 1e3
    kinds = sorted({kind for turn in turns for kind in turn.cpu_ms})
    later = [turn.first_ms - model_ms for turn in turns]
    if turns[0].place == "device":
        later = [turn.first_ms - turn.steps_ms for turn in turns]
    return {
        "cell": cell,
        "place": turns[0].place,
        "first_token_ms": [turn.first_ms for turn in turns],
        "steps_ms": [turn.steps_ms for turn in turns],
        "model_ms": model_ms,
        "later_ms": later,
        "limit_ms": AIM_MS + moved_ms,
        "moved_bytes": statistics.median(turn.num_moved for turn in turns),
        "bytes_per_s": bytes_per_s,
        "prompt_tokens": turns[-1].num_prompt,
        "cached_tokens": turns[-1].num_cached,
        "cpu_ms": {
            kind: statistics.median(t.cpu_ms.get(kind, 0.0) for t in turns) for kind in kinds
        },
    }


class StepTimes:
    """Durations of the server's steps in milliseconds, by number, from its live view."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._steps: dict[int, float] = {}
        self._changed_s = 0.0

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Follow the live view within the block."""
        task = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _follow(self) -> None:
        events = self._client.stream_json("/v1/engine/live", None, method="GET")
        async with contextlib.aclosing(events) as payloads:
            async for payload in payloads:
                if payload != DONE:
                    self.take(json.loads(payload))

    def take(self, event: dict[str, Any]) -> None:
        """Take the steps of an event of the live view."""
        for step in event.get("steps", ()):
            self._steps[step["step"]] = step["duration_ms"]
            self._changed_s = time.monotonic()

    @property
    def num_steps(self) -> int:
        """The number of steps so far."""
        return len(self._steps)

    async def since(self, num_before: int) -> float:
        """Return the sum of all steps after the first num_before, once they have been reported."""
        while self.num_steps == num_before or time.monotonic() - self._changed_s < QUIET_S:
            await asyncio.sleep(QUIET_S / 4)
        return sum(list(self._steps.values())[num_before:])


def processes_of(pid: int) -> dict[int, str]:
    """Return the kinds of a server's processes by process id; other processes are left out."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, rest = dict[int, str](), [pid]
    while rest:
        each = rest.pop()
        rest += children.get(each, [])
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{each}/cmdline").read_text()
            kinds = [kind for mark, kind in KINDS.items() if mark in command]
            found |= dict.fromkeys([each], kinds[0]) if kinds else {}
    return found


def cpu_ms_of(processes: dict[int, str]) -> dict[str, float]:
    """Return the CPU time that processes have used, by kind, in milliseconds."""
    used: dict[str, float] = {}
    for pid, kind in processes.items():
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                used[kind] = used.get(kind, 0.0) + int(path.read_text().split()[0]) / 1e6
    return used


class Player:
    """Sends turns to one server and measures them. pid: of the server."""

    def __init__(self, client: HttpClient, cell: Cell, pid: int, steps: StepTimes) -> None:
        self._client, self._cell, self._pid, self._steps = client, cell, pid, steps

    async def turn(self, messages: list[Message], place: str) -> Turn:
        """Send a conversation and measure its first token. Raises HttpError."""
        body = body_of(messages, self._cell.model)
        processes, num_before = processes_of(self._pid), self._steps.num_steps
        used, counted = cpu_ms_of(processes), await self._counted()
        began, first_ms, usage = time.perf_counter(), 0.0, dict[str, Any]()
        events = self._client.stream_json("/v1/chat/completions", body)
        async with contextlib.aclosing(events) as payloads:
            async for payload in payloads:
                first_ms = first_ms or (time.perf_counter() - began) * 1e3
                if payload == DONE:
                    continue
                chunk = json.loads(payload)
                if chunk.get("error"):
                    raise HttpError(str(chunk["error"]))
                usage = chunk.get("usage") or usage
        after = cpu_ms_of(processes)
        cpu_ms = {kind: after[kind] - used.get(kind, 0.0) for kind in after}
        steps_ms = await self._steps.since(num_before)
        num_cached = usage["prompt_tokens_details"].get("cached_tokens") or 0
        turn = Turn(place, first_ms, steps_ms, usage["prompt_tokens"], num_cached, cpu_ms=cpu_ms)
        if place != "device":
            turn.num_moved = int((await self._counted() - counted) * self._cell.kv_bytes * 16)
        return turn

    async def _counted(self) -> float:
        """Return how many blocks were loaded from host memory so far."""
        text = (await self._client.request("/metrics")).text
        return float(dict(METRIC.findall(text)).get("kv_blocks_loaded", 0.0))


@asynccontextmanager
async def served(
    cell: Cell, tokenizer: str, num_tokens: int, folder: Path
) -> AsyncIterator[Player]:
    """Run a server with a pool for one conversation of num_tokens and host memory for three."""
    port, pool = free_port(), round(SPARE * num_tokens * cell.kv_bytes)
    command = [
        sys.executable, "-m", "quire.cli.main", "serve", cell.model, "--port", str(port),
        "--max-model-len", str(num_tokens), "--kv-cache-memory-bytes", str(pool),
        "--kv-host-gb", f"{3 * pool / (1 << 30):.6f}", "--kv-disk-dir", str(folder),
        "--kv-disk-gb", "10", "--log-level", "warning", "--tokenizer", tokenizer,
        "--hf-overrides", json.dumps(cell.overrides),
    ]  # fmt: skip
    with running(command) as process:
        client = HttpClient(f"http://127.0.0.1:{port}")
        await wait_until_ready(client, READY_S)
        steps = StepTimes(client)
        async with steps.watched():
            yield Player(client, cell, process.pid, steps)
        await client.close()


async def measure_cell(
    cell: Cell, name: str, options: argparse.Namespace, folder: Path
) -> list[Row]:
    """Return the rows of all places. name: of the tokenizer."""
    tokenizer = text_of(name).tokenizer
    assert tokenizer is not None, "a chat needs a tokenizer"
    texts = Texts(tokenizer)
    known = [texts.conversation(options.held) for _ in range(2)]
    num_tokens = round(1.1 * (options.held + options.new))
    turns: dict[str, list[Turn]] = {place: [] for place in PLACES}
    async with served(cell, name, num_tokens, folder) as player:
        await player.turn(turn_of(known[0], "Begin."), "device")
        for _ in range(options.rounds + 1):
            messages = turn_of(known[0], texts.take(options.new))
            turns["device"].append(await player.turn(messages, "device"))
        await player.turn(turn_of(known[1], "Begin."), "device")
        for number in range(options.rounds + 2):
            messages = turn_of(known[number % 2], texts.take(options.new))
            turns["host"].append(await player.turn(messages, "host"))
    for _ in range(options.starts):
        async with served(cell, name, num_tokens, folder) as player:
            await player.turn([{"role": "user", "content": "Begin."}], "device")
            for messages in known:
                messages = turn_of(messages, texts.take(options.new))
                turns["directory"].append(await player.turn(messages, "directory"))
    del turns["device"][0], turns["host"][:2]  # what is done once; blocks that are still written
    _check(turns, options.new)
    model_ms = statistics.median(turn.steps_ms for turn in turns["device"])
    rates = (float("inf"), copy_bandwidth() / 2, read_bandwidth(folder))
    return [
        row_of(cell.name, turns[place], model_ms, rate)
        for place, rate in zip(PLACES, rates, strict=True)
    ]


def _check(turns: dict[str, list[Turn]], num_new: int) -> None:
    """Check that the conversation was found everywhere. Raises HttpError."""
    for place, mine in turns.items():
        for turn in mine:
            is_found = turn.num_cached >= turn.num_prompt - 2 * num_new
            if not is_found or (place != "device" and not turn.num_moved):
                raise HttpError(
                    f"{place}: {turn.num_cached} of {turn.num_prompt} tokens were cached, and"
                    f" {turn.num_moved} bytes were moved; the turn measures something else."
                )


def read_bandwidth(folder: Path) -> float:
    """Return the bytes per second of reading all files of blocks once, one after the other."""
    paths = sorted(folder.rglob("*.kv"))
    buffer = bytearray(max((path.stat().st_size for path in paths), default=1))
    began, num_bytes = time.perf_counter(), 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            num_bytes += file.readinto(buffer) or 0
    return num_bytes / (time.perf_counter() - began)


def printed(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield "cell   place      first token   model   later   limit      MB   CPU of server, template"
    for row in rows:
        first, later = (statistics.median(row[key]) for key in ("first_token_ms", "later_ms"))
        cpu = row["cpu_ms"]
        yield (
            f"{row['cell']:6} {row['place']:10} {first:11.1f} {row['model_ms']:7.1f} {later:7.1f}"
            f" {row['limit_ms']:7.1f} {row['moved_bytes'] / 1e6:7.0f}"
            f"   {cpu.get('api', 0.0):.1f}, {cpu.get('template', 0.0):.1f}"
        )


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    names = [cell.name for cell in CELLS]
    parser.add_argument("--cells", nargs="+", choices=names, default=names)
    parser.add_argument("--held", type=int, default=NUM_HELD, help="known tokens")
    parser.add_argument("--new", type=int, default=NUM_NEW, help="new tokens of a turn")
    parser.add_argument("--rounds", type=int, default=6, help="turns of a place")
    parser.add_argument("--starts", type=int, default=2, help="of the server with the directory")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    print_head("start of a turn, milliseconds")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as tokenizer:
        write_tokenizer(Path(tokenizer))
        for cell in CELLS:
            name = "demo" if cell.has_tokenizer else tokenizer
            if cell.name in options.cells:
                with tempfile.TemporaryDirectory() as folder:
                    rows += asyncio.run(measure_cell(cell, name, options, Path(folder)))
        times, _ = turn_parts.measure(tokenizer, options.held, options.new, turn_parts.ROUNDS)
    rows += [{"part": part, "cpu_ms": time_ms} for part, time_ms in times.medians().items()]
    print("\n".join(printed([row for row in rows if "cell" in row])), flush=True)
    for part, time_ms in times.medians().items():
        print(f"{part:>10} {time_ms:6.2f} ms of CPU time")
    write(options.output_json, "server.turns", rows, options_of(options), plain_facts)


if __name__ == "__main__":
    main()
