"""Serve the same sessions of agents by quire, by llama.cpp's server and by vLLM's.

    python -m benchmarks.server.agents --llama-python VENV/bin/python --models FOLDER \
        --vllm-python OTHER/bin/python --output-json agents.json

Each session sends its turns one after the other, and all sessions run at once. A turn resends the
whole text so far: the system prompt, which all share, the turns, and the server's own answers. The
texts come from the documentation. The servers generate the same number of tokens, greedily.

llama.cpp's server is `python -m llama_cpp.server`, of `llama-cpp-python[server]`. It has one
context, and gets a cache in memory for the states of all sessions. vLLM's is the build for CPUs
(see `benchmarks.cpu.engines`). quire and llama.cpp read the same GGUF file. vLLM reads the
checkpoint, and computes in float32, where it is fastest on AVX2. All get all cores and memory for
all sessions. quire and vLLM report computed tokens in `usage`, llama.cpp in its log.
"""

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from benchmarks.cpu.checkpoints import DOCUMENTS, write_checkpoint, write_gguf_file
from benchmarks.cpu.drivers.vllm_llm import variables
from benchmarks.cpu.workloads import QWEN
from benchmarks.result_files import Row, options_of, write
from benchmarks.server.servers import free_port, running
from quire.ops.host.threads import num_threads
from quire.tools.bench.serve import wait_until_ready
from quire.tools.http_client import DONE, HttpClient, HttpError, first_model
from quire.tools.report import benchmark_parser, plain_facts

READY_S = 180.0
BAN = -100.0  # of tokens that would end an answer early
COMPUTED = re.compile(rb"prompt eval time =.*?/\s*(\d+) tokens")
DEMO = Path(__file__).parents[2] / "src" / "quire" / "demo"
CACHE_BYTES = 4 << 30  # limit of llama.cpp's cache, and of quire's KV pool


@dataclass(frozen=True)
class Cell:
    """Sessions of one model. Sizes of texts in characters: of the system prompt, of a session's
    first text, and of each later text. num_output: tokens of an answer. kind: of the GGUF file.
    kv_bytes: memory of quire's pool."""

    model: str
    kind: str
    num_sessions: int
    num_turns: int
    system: int
    first: int
    turn: int
    num_output: int
    kv_bytes: int
    length: int = 2048


CELLS = (
    Cell("qwen3-0.6b", "q8_0", 2, 10, 800, 400, 240, 16, 1 << 30, 4096),
    Cell("demo", "f16", 20, 10, 800, 300, 120, 16, 1 << 29),
)


@dataclass
class Turn:
    """Times of one turn, in seconds. num_computed: computed prompt tokens; None if unknown."""

    first_s: float
    whole_s: float
    num_prompt: int | None = None
    num_cached: int = 0


@dataclass
class Served:
    """Times and counts of one server with a cell's sessions."""

    turns: list[Turn] = field(default_factory=list)
    seconds: float = 0.0
    num_logged: int | None = None  # computed prompt tokens by the server's log

    @property
    def num_computed(self) -> int | None:
        """Return the computed prompt tokens; None if unknown."""
        if self.num_logged is not None:
            return self.num_logged
        counts = [t.num_prompt - t.num_cached for t in self.turns if t.num_prompt is not None]
        return sum(counts) if len(counts) == len(self.turns) else None

    def row(self) -> Row:
        """Return the figures of a result file."""
        firsts = [turn.first_s * 1e3 for turn in self.turns]
        return {
            "seconds": self.seconds,
            "num_turns": len(self.turns),
            "first_token_ms": {
                "median": statistics.median(firsts),
                "p90": statistics.quantiles(firsts, n=10)[-1],
                "most": max(firsts),
            },
            "turn_s": statistics.mean(turn.whole_s for turn in self.turns),
            "computed_tokens": self.num_computed,
        }


def texts_of(cell: Cell, source: str) -> list[list[str]]:
    """Return the texts that each session sends in its turns. The first begins with the system
    prompt. The others are different pieces of the source."""
    system, place = source[: cell.system], cell.system
    sessions = []
    for _ in range(cell.num_sessions):
        sizes = [cell.first] + [cell.turn] * (cell.num_turns - 1)
        ends = [place]
        for size in sizes:
            ends.append(ends[-1] + size)
        assert ends[-1] <= len(source), "the source is too short"
        texts = [source[begin:end] for begin, end in pairwise(ends)]
        sessions.append([system + texts[0], *texts[1:]])
        place = ends[-1]
    return sessions


class Player:
    """Plays the sessions of a cell against one server. extra: more fields of each body."""

    def __init__(self, client: HttpClient, cell: Cell, extra: dict[str, Any]) -> None:
        self._client, self._cell, self._extra = client, cell, extra
        self.served = Served()

    async def play(self, sessions: list[list[str]]) -> Served:
        """Play all sessions at once."""
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for texts in sessions:
                group.create_task(self._session(texts))
        self.served.seconds = time.perf_counter() - began
        return self.served

    async def _session(self, texts: list[str]) -> None:
        context = ""
        for text in texts:
            context += text
            context += await self._turn(context)

    async def _turn(self, prompt: str) -> str:
        """Send a turn, and return the answer. Raises HttpError."""
        given = self._extra | {"prompt": prompt, "max_tokens": self._cell.num_output}
        body = json.dumps(given | {"stream": True, "temperature": 0.0}).encode()
        began, first_s, parts = time.perf_counter(), 0.0, []
        turn = Turn(0.0, 0.0)
        async with aclosing(self._client.stream_json("/v1/completions", body)) as payloads:
            async for payload in payloads:
                if payload == DONE:
                    continue
                chunk = json.loads(payload)
                if chunk.get("error"):
                    raise HttpError(str(chunk["error"]))
                if chunk.get("choices"):
                    first_s = first_s or time.perf_counter() - began
                    parts.append(chunk["choices"][0].get("text") or "")
                if usage := chunk.get("usage"):
                    turn.num_prompt = usage["prompt_tokens"]
                    details = usage.get("prompt_tokens_details") or {}
                    turn.num_cached = details.get("cached_tokens") or 0
        turn.first_s, turn.whole_s = first_s, time.perf_counter() - began
        self.served.turns.append(turn)
        return "".join(parts)


# ---- servers ---------------------------------------------------------------------------------


def quire_command(path: Path, cell: Cell, port: int) -> list[str]:
    """Return the command of quire's server."""
    return [
        sys.executable, "-m", "quire.cli.main", "serve", str(path), "--port", str(port),
        "--max-model-len", str(cell.length), "--max-num-seqs", str(cell.num_sessions),
        "--kv-cache-memory-bytes", str(cell.kv_bytes), "--reuse-partial-blocks",
    ]  # fmt: skip


def llama_command(python: str, path: Path, cell: Cell, port: int) -> list[str]:
    """Return the command of llama.cpp's server."""
    threads = str(num_threads())
    return [
        python, "-m", "llama_cpp.server", "--model", str(path), "--host", "127.0.0.1",
        "--port", str(port), "--n_ctx", str(cell.length), "--n_batch", "512",
        "--n_threads", threads, "--n_threads_batch", threads, "--logits_all", "false",
        "--cache", "true", "--cache_type", "ram", "--cache_size", str(CACHE_BYTES),
        "--interrupt_requests", "false", "--verbose", "true",
    ]  # fmt: skip


def vllm_command(python: str, checkpoint: Path, cell: Cell, port: int) -> list[str]:
    """Return the command of vLLM's server."""
    environment = variables(num_threads(), Path(python)) | {
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, cell.kv_bytes >> 30))
    }
    return [
        "env", *(f"{name}={value}" for name, value in environment.items()),
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint),
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
        "--max-model-len", str(cell.length), "--max-num-seqs", str(cell.num_sessions),
        "--enable-prompt-tokens-details",
    ]  # fmt: skip


def num_computed(log: bytes) -> int | None:
    """Return the prompt tokens that llama.cpp's log counts; None if it counts none."""
    found = [int(match) for match in COMPUTED.findall(log)]
    return sum(found) if found else None


@contextmanager
def served(command: list[str], log: IO[bytes]) -> Iterator[None]:
    """Run a server that writes its output to a file. Its last lines are shown if it fails."""
    shell = ["sh", "-c", 'exec "$@" >> "$0" 2>&1', log.name, *command]
    try:
        with running(shell):
            yield
    except (HttpError, ExceptionGroup):
        print(Path(log.name).read_text(errors="replace")[-2000:], file=sys.stderr)
        raise


def serve(
    name: str, command: list[str], port: int, cell: Cell, eos: list[int], sessions: list[list[str]]
) -> Served:
    """Run a server and play a cell's sessions against it."""
    extra: dict[str, Any] = {"logit_bias": {str(token): BAN for token in eos}}
    if name == "llama.cpp":
        extra |= {"repeat_penalty": 1.0}
    else:
        extra |= {"stream_options": {"include_usage": True}}
    with tempfile.NamedTemporaryFile(suffix=".log") as log, asyncio.Runner() as runner:
        with served(command, log):
            client = HttpClient(f"http://127.0.0.1:{port}")
            runner.run(wait_until_ready(client, READY_S))
            extra["model"] = runner.run(first_model(client))
            warm = Player(client, cell, extra)
            runner.run(warm.play([["A short text to begin with."]]))
            skipped = num_computed(Path(log.name).read_bytes()) or 0
            found = runner.run(Player(client, cell, extra).play(sessions))
            runner.run(client.close())
        if name == "llama.cpp":
            counted = num_computed(Path(log.name).read_bytes())
            found.num_logged = None if counted is None else counted - skipped
    return found


def model_of(cell: Cell, folder: Path) -> tuple[Path, Path, list[int]]:
    """Write a cell's model as a GGUF file, unless it exists. Return the checkpoint, the file, and
    the ids of tokens that end an answer."""
    folder.mkdir(parents=True, exist_ok=True)
    directory = DEMO if cell.model == "demo" else write_checkpoint(QWEN, folder / cell.model)
    path = write_gguf_file(directory, cell.kind, folder / f"{cell.model}-{cell.kind}.gguf")
    config = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
    eos = config["eos_token_id"]
    return directory, path, eos if isinstance(eos, list) else [eos]


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--llama-python", help="Python that has llama_cpp.server")
    parser.add_argument("--vllm-python", help="Python that has vLLM")
    default = Path(tempfile.gettempdir()) / "quire-bench-cpu" / "models"
    parser.add_argument("--models", type=Path, default=default, help="folder of the models")
    parser.add_argument("--rounds", type=int, default=2)
    names = [cell.model for cell in CELLS]
    parser.add_argument("--cells", nargs="+", choices=names, default=names)
    parser.add_argument("--turns", type=int, help="of each session, instead of 10")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    source = "\n".join(path.read_text("utf-8") for path in DOCUMENTS)
    rows: list[Row] = []
    for cell in CELLS:
        if cell.model not in options.cells:
            continue
        checkpoint, path, eos = model_of(cell, options.models)
        sessions = [texts[: options.turns] for texts in texts_of(cell, source)]
        for number in range(options.rounds):
            port = free_port()
            commands = {"quire": quire_command(path, cell, port)}
            if options.llama_python:
                commands["llama.cpp"] = llama_command(options.llama_python, path, cell, port)
            if options.vllm_python:
                commands["vllm"] = vllm_command(options.vllm_python, checkpoint, cell, port)
            for name, command in list(commands.items())[:: -1 if number % 2 else 1]:
                found = serve(name, command, port, cell, eos, sessions)
                row = {"model": cell.model, "sessions": cell.num_sessions, "engine": name}
                rows.append(row | {"round": number} | found.row())
                print(json.dumps(rows[-1]), flush=True)
    write(options.output_json, "server.agents", rows, options_of(options), plain_facts)


if __name__ == "__main__":
    main()
