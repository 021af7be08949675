"""Measure how much loading an adapter delays the tokens of other requests.

    python -m benchmarks.models.adapter_load [--model shape:qwen3-0.6b] [--rounds 5] [--mb 50]

Four requests stream. In the middle, a further request arrives: in turn without an adapter, and with
one of --mb megabytes that the engine has not loaded. The longest pause between two outputs of the
streams is compared, from the arrival until a few steps after the new request's first token. So both
contain the new request's prompt. Each round loads an adapter with a digest of its own.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.models.adapters import BYTES, Shapes, write_adapters
from benchmarks.models.adapters import shapes_of as adapted_shapes
from benchmarks.result_files import Row, options_of, write
from quire import AsyncLLM, LoRARequest, SamplingParams
from quire.base.settings.lora import LoraConfig
from quire.models.checkpoint.source import resolve_model
from quire.models.load.adapters import AdaptedModel
from quire.models.registry import make_model
from quire.spec.model_spec import ModelSpec, load_spec
from quire.tools.report import benchmark_parser, print_head
from quire.tools.workloads import random_prompts

STREAMS, PROMPT, NEW_PROMPT, NEW_TOKENS = 4, 64, 16, 8
BEFORE, AFTER = 16, 96  # outputs of a stream before the arrival; at most, after it
AIM_MS = 20.0
MAX_RANK = 256


def shapes_of(spec: ModelSpec) -> Shapes:
    """Return the shapes of all modules that adapters can change, also of each expert."""
    model = make_model(spec, torch.bfloat16, torch.device("meta"))
    AdaptedModel(model, spec, LoraConfig(enable_lora=True, max_loras=1), torch.bfloat16)
    return adapted_shapes(model)


def rank_of(shapes: Shapes, num_bytes: float) -> int:
    """Return the rank of an adapter of about this size, at most MAX_RANK."""
    per_rank = BYTES * sum(sum(shape) for shape in shapes.values())
    return max(1, min(MAX_RANK, round(num_bytes / per_rank)))


@dataclass
class Streams:
    """Times of the outputs of all streams, and when the new request was there and answered."""

    outputs: list[list[float]] = field(default_factory=list)
    arrival_s: float = 0.0
    first_token_s: float = 0.0

    def pauses_ms(self) -> tuple[list[float], list[float]]:
        """Return the pauses between two outputs, before the arrival and after it. Later pauses
        count until the new request's first token, with one more output."""
        before, during = list[float](), list[float]()
        for times in self.outputs:
            for begin, end in zip(times[1:], times[2:], strict=False):  # after the prompts
                if end <= self.arrival_s:
                    before.append(1e3 * (end - begin))
                elif begin <= self.first_token_s:
                    during.append(1e3 * (end - begin))
        return before, during


async def run_streams(
    llm: AsyncLLM, prompts: list[list[int]], adapter: LoRARequest | None
) -> Streams:
    """Stream some requests, and let a further one arrive."""
    found = Streams(outputs=[[] for _ in range(STREAMS)])
    is_time = asyncio.Event()

    async def stream(number: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=BEFORE + AFTER, ignore_eos=True)
        async for _ in llm.generate({"prompt_token_ids": prompts[number]}, params):
            found.outputs[number].append(time.perf_counter())
            if len(found.outputs[number]) == BEFORE:
                is_time.set()

    async def arrive() -> None:
        await is_time.wait()
        found.arrival_s = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        prompt: Any = {"prompt_token_ids": prompts[-1]}
        async for _ in llm.generate(prompt, params, lora_request=adapter):
            found.first_token_s = found.first_token_s or time.perf_counter()

    await asyncio.gather(*(stream(number) for number in range(STREAMS)), arrive())
    return found


async def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    """Return a row for each round and way, and one of the medians."""
    spec = load_spec(resolve_model(options.model).directory)
    shapes = shapes_of(spec)
    rank = rank_of(shapes, 1e6 * options.mb)
    paths = write_adapters(folder, shapes, rank, options.rounds + 1)
    settings: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    settings |= {"device": "cpu", "load_format": "dummy", "max_num_seqs": STREAMS + 1}
    settings |= {"max_model_len": 256, "enable_prefix_caching": False}
    lens = [PROMPT] * STREAMS + [NEW_PROMPT]
    rows: list[Row] = []
    async with await AsyncLLM.create(options.model, **settings) as llm:
        for round_, path in enumerate(paths):  # the first round warms up
            adapter = LoRARequest(f"adapter{round_}", round_ + 1, str(path))
            for way in (None, adapter) if round_ % 2 else (adapter, None):
                prompts = [random_prompts(1, n, spec.vocab_size, round_)[0] for n in lens]
                streams = await run_streams(llm, prompts, way)
                if round_:
                    rows.append(row_of(streams, round_, has_adapter=way is not None))
    return rows


def row_of(streams: Streams, round_: int, *, has_adapter: bool) -> Row:
    """Return the row of one run."""
    before, during = streams.pauses_ms()
    return {
        "round": round_,
        "arrival": "adapter" if has_adapter else "plain",
        "median_ms": statistics.median(before),
        "longest_ms": max(during),
        "first_token_ms": 1e3 * (streams.first_token_s - streams.arrival_s),
    }


def summary(rows: list[Row]) -> Row:
    """Return the medians of both ways, and the longest additional pause of a round."""
    longest = {
        way: {row["round"]: row["longest_ms"] for row in rows if row["arrival"] == way}
        for way in ("plain", "adapter")
    }
    more = [longest["adapter"][each] - longest["plain"][each] for each in longest["plain"]]
    return {
        "round": 0,
        "arrival": "both",
        "plain_ms": statistics.median(longest["plain"].values()),
        "adapter_ms": statistics.median(longest["adapter"].values()),
        "more_ms": statistics.median(more),
        "most_more_ms": max(more),
        "aim_ms": AIM_MS,
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="shape:qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=float, default=50.0, help="megabytes of an adapter")
    parser.add_argument("--scratch", type=Path, help="a directory for the adapters' file")
    options = parser.parse_args()
    if options.rounds < 1 or not 0 < options.mb < 1e4:
        parser.error("--rounds must be at least 1, and --mb above 0 and below 10,000.")
    print_head(f"{options.model}: load {options.mb:g} MB while {STREAMS} requests stream")
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        rows = asyncio.run(measure(options, Path(folder)))
    for row in rows:
        print(
            f"round {row['round']}, {row['arrival']:>7}: longest pause {row['longest_ms']:6.1f} ms,"
            f" median before {row['median_ms']:.1f} ms, first token {row['first_token_ms']:.0f} ms"
        )
    found = summary(rows)
    print(
        f"longest pause: {found['plain_ms']:.1f} ms without a load, {found['adapter_ms']:.1f} ms"
        f" with one, {found['more_ms']:+.1f} ms (aim: at most {AIM_MS:g} ms more)"
    )
    write(options.output_json, "models.adapter_load", [*rows, found], options_of(options))


if __name__ == "__main__":
    main()
