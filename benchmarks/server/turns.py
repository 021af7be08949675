"""Measure how much later than the model's own time a turn of a long conversation starts.

    python -m benchmarks.server.turns --output-json turns.json

A conversation of 16,000 tokens is known to the server. The client sends it again with a new message
of 500 tokens, as chat clients do. Its keys and values are in one of three places: on the device, in
host memory, or in a directory. Two conversations alternate in a pool for one, with two turns each.
The first turn loads the blocks from host memory, and the second finds them on the device. For the
directory the server is started again.

first token    from sending the body to the first chunk, at the client
model          the runner's own time of the steps of this turn. For other places it is the median
               of the device, so that it does not include moved blocks
later          the first minus the second; the aim is 10 ms on the device
limit          elsewhere: 10 ms, and 1.3 times the moved bytes over the bandwidth of copying memory,
               or of reading the same files once more

`turn_parts.py` measures the parts of the rest. `wide` is two layers of Qwen3-0.6B with random
weights, and the tokenizer of `turn_parts.py`. Its keys and values take 8 KiB per token, a
fourteenth of the whole model's.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.result_files import Row, options_of, write
from benchmarks.server import turn_parts
from benchmarks.server.servers import free_port, running
from benchmarks.server.turn_parts import (
    BLOCK_SIZE,
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
READ_S, PAUSE_S = 2.0, 0.1  # between two snapshots during a turn, and after it
AIM_MS = 10.0
SLACK = 1.3  # of moving blocks, relative to their bytes over the bandwidth
SPARE = 1.1  # size of the pool, relative to one conversation
METRIC = re.compile(r"^quire:(\w+?)(?:_total)?(?:\{[^}]*\})? ([-+.\deE]+)$", re.MULTILINE)
# Turns that do not count, by place: what is done once, and turns while blocks are still written
NUM_SKIPPED = {"device": 1, "host": 2, "directory": 0}


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
    Cell("wide", "shape:qwen3-0.6b", 8192, {"num_hidden_layers": 2}),
)


@dataclass
class Turn:
    """Times of one turn in milliseconds. num_moved: bytes that came from the place."""

    place: str
    first_ms: float
    steps_ms: float
    num_prompt: int
    num_cached: int
    num_moved: int = 0


def row_of(cell: str, turns: list[Turn], model_ms: float, bytes_per_s: float) -> Row:
    """Return the figures of the turns of one place. model_ms: the model's own time. bytes_per_s:
    bandwidth of the place; infinity for the device."""
    moved_ms = SLACK * statistics.median(turn.num_moved for turn in turns) / bytes_per_s * 1e3
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
    }


class StepTimes:
    """Durations of the server's steps in milliseconds, by number, from snapshots of its live view.

    The core notes steps for some seconds after each snapshot. Snapshots are not taken during a
    turn, unless it is long, since they would delay it.
    """

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._steps: dict[int, float] = {}
        self._at_s = 0.0  # of the last snapshot, on the machine's monotonic clock

    async def read(self) -> None:
        """Take a snapshot."""
        events = self._client.stream_json("/v1/engine/live", None, method="GET")
        async with contextlib.aclosing(events) as payloads:
            async for payload in payloads:
                self.take(json.loads(payload))
                return

    def take(self, snapshot: dict[str, Any]) -> None:
        """Add the steps of a snapshot."""
        self._at_s = snapshot["at_s"]
        for step in snapshot["steps"]:
            self._steps[step["step"]] = step["duration_ms"]

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Have the core note all steps within the block."""
        await self.read()
        task = asyncio.create_task(self._read_often())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _read_often(self) -> None:
        while True:
            await asyncio.sleep(READ_S)
            await self.read()

    @property
    def num_steps(self) -> int:
        """The number of steps so far."""
        return len(self._steps)

    async def since(self, num_before: int) -> float:
        """Return the sum of all steps after the first num_before, up to now."""
        now_s = time.monotonic()
        while self._at_s < now_s:
            await asyncio.sleep(PAUSE_S)
            await self.read()
        return sum(list(self._steps.values())[num_before:])


class Player:
    """Sends turns to one server and measures them."""

    def __init__(self, client: HttpClient, cell: Cell) -> None:
        self._client, self._cell, self._steps = client, cell, StepTimes(client)

    async def turn(self, messages: list[Message], place: str) -> Turn:
        """Send a conversation and measure its first token. Raises HttpError."""
        body, counted = body_of(messages, self._cell.model), await self._counted()
        async with self._steps.kept():
            num_before = self._steps.num_steps
            first_ms, usage = await self._first_token(body)
        steps_ms = await self._steps.since(num_before)
        num_cached = usage["prompt_tokens_details"].get("cached_tokens") or 0
        turn = Turn(place, first_ms, steps_ms, usage["prompt_tokens"], num_cached)
        if place != "device":
            num_blocks = await self._counted() - counted
            turn.num_moved = int(num_blocks * self._cell.kv_bytes * BLOCK_SIZE)
        return turn

    async def _first_token(self, body: bytes) -> tuple[float, dict[str, Any]]:
        """Return the time to the first chunk in milliseconds, and the usage."""
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
        return first_ms, usage

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
    with running(command):
        client = HttpClient(f"http://127.0.0.1:{port}")
        await wait_until_ready(client, READY_S)
        yield Player(client, cell)
        await client.close()


class Play:
    """Plays two conversations, and collects the turns of each place.

    known: their messages. texts: new messages of num_new tokens each.
    """

    def __init__(self, known: list[list[Message]], texts: Texts, num_new: int) -> None:
        self.turns: dict[str, list[Turn]] = {}
        self._known, self._texts, self._num_new = known, texts, num_new

    async def begin(self, player: Player, which: int) -> None:
        """Let the server compute a conversation, which evicts the other one."""
        await player.turn(turn_of(self._known[which], "Begin."), "device")

    async def take(self, player: Player, place: str, which: int) -> None:
        """Continue a conversation in a new way."""
        messages = turn_of(self._known[which], self._texts.take(self._num_new))
        self.turns.setdefault(place, []).append(await player.turn(messages, place))


async def measure_cell(
    cell: Cell, name: str, options: argparse.Namespace, folder: Path
) -> list[Row]:
    """Return the rows of the places, always with the device. name: of the tokenizer."""
    tokenizer, places = text_of(name).tokenizer, options.places
    assert tokenizer is not None, "a chat needs a tokenizer"
    texts = Texts(tokenizer)
    play = Play([texts.conversation(options.held) for _ in range(2)], texts, options.new)
    num_tokens = round(1.1 * (options.held + options.new))
    async with served(cell, name, num_tokens, folder) as player:
        await play.begin(player, 0)
        if len(places) > 1:
            await play.begin(player, 1)
        for number in range(options.rounds + max(NUM_SKIPPED.values())):
            which = number % 2 if "host" in places else 0
            if "host" in places:
                await play.take(player, "host", which)
            await play.take(player, "device", which)
    for _ in range(options.starts if "directory" in places else 0):
        async with served(cell, name, num_tokens, folder) as player:
            await player.turn([{"role": "user", "content": "Begin."}], "device")
            for which in range(2):
                await play.take(player, "directory", which)
                await play.take(player, "device", which)
    turns = {place: play.turns[place][NUM_SKIPPED[place] :] for place in places}
    _check(turns, options.new)
    model_ms = statistics.median(turn.steps_ms for turn in turns["device"])
    rates = {"device": float("inf"), "host": copy_bandwidth() / 2}
    rates["directory"] = read_bandwidth(folder) if "directory" in places else 0.0
    return [row_of(cell.name, mine, model_ms, rates[place]) for place, mine in turns.items()]


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
    yield "cell   place      first token     model   later   limit      MB"
    for row in rows:
        first, later = (statistics.median(row[key]) for key in ("first_token_ms", "later_ms"))
        yield (
            f"{row['cell']:6} {row['place']:10} {first:11.1f} {row['model_ms']:9.1f} {later:7.1f}"
            f" {row['limit_ms']:7.1f} {row['moved_bytes'] / 1e6:7.0f}"
        )


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    names = [cell.name for cell in CELLS]
    parser.add_argument("--cells", nargs="+", choices=names, default=names)
    places = list(NUM_SKIPPED)
    parser.add_argument("--places", nargs="+", choices=places, default=places)
    parser.add_argument("--held", type=int, default=NUM_HELD, help="known tokens")
    parser.add_argument("--new", type=int, default=NUM_NEW, help="new tokens of a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of a place, at least")
    parser.add_argument("--starts", type=int, default=2, help="of the server with the directory")
    options = parser.parse_args()
    options.places = [place for place in places if place in {"device", *options.places}]
    return options


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
