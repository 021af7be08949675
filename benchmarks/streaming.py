"""Time to the first token after the last piece of a prompt that came in pieces.

    python benchmarks/streaming.py

The demo model, one request at a time, in one process, without prefix caching. Three ways to ask,
in alternating rounds; medians: the whole prompt at once; the whole prompt in two pieces, the first
of them computed before the second one comes; and a prompt of only the second piece. The aim: the
second way takes no longer than the third and one more step. Measured from when the last piece (or
the prompt) is given to the engine until the first token is there; also in steps.
"""

import random
import statistics
import time
from typing import Any

import msgspec

from quire.base.config import config_from_flat
from quire.base.sampling_params import SamplingParams
from quire.engine.build import Engine, build_engine
from quire.render.renderer import RenderedPrompt
from quire.tools.report import benchmark_parser, print_head, write_report

WAYS = ("whole", "streamed", "last piece alone")
PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def first_token(engine: Engine) -> tuple[float, int]:
    """Seconds and steps from now until the request has ended, which is with its first token."""
    began, num_steps = time.perf_counter(), 0
    while engine.client.num_unfinished:
        engine.client.step()
        num_steps += 1
    return time.perf_counter() - began, num_steps


def ask(engine: Engine, way: str, before: list[int], last: list[int]) -> tuple[float, int]:
    prompt = {"whole": before + last, "streamed": before, "last piece alone": last}[way]
    request = engine.requests.make(RenderedPrompt(prompt), PARAMS)
    if way != "streamed":
        began = time.perf_counter()
        engine.client.add(request)
        added_s = time.perf_counter() - began
        seconds, num_steps = first_token(engine)
        return added_s + seconds, num_steps
    request = msgspec.structs.replace(request, is_open=True)
    engine.client.add(request)
    scheduler = engine.client.core.scheduler
    while scheduler.sequences[request.request_id].num_computed_tokens < len(before) - 1:
        engine.client.step()
    while scheduler.flights:
        engine.client.step()
    began = time.perf_counter()
    engine.client.append(request.request_id, last, is_last=True)
    added_s = time.perf_counter() - began
    seconds, num_steps = first_token(engine)
    return added_s + seconds, num_steps


def measure(engine: Engine, options: Any) -> dict[str, Any]:
    rng = random.Random(1)
    found: dict[str, list[tuple[float, int]]] = {way: [] for way in WAYS}
    for index in range(options.rounds + 1):
        ids = [rng.randrange(3, 1500) for _ in range(options.input_len)]
        before, last = ids[: -options.last_len], ids[-options.last_len :]
        for way in WAYS:
            result = ask(engine, way, before, last)
            if index:  # the first round warms up
                found[way].append(result)
    return {
        way: {
            "median_ms": statistics.median([seconds for seconds, _ in results]) * 1e3,
            "ms": [seconds * 1e3 for seconds, _ in results],
            "steps": max([steps for _, steps in results]),
        }
        for way, results in found.items()
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--input-len", type=int, default=1536, help="tokens of the whole prompt")
    parser.add_argument("--last-len", type=int, default=32, help="tokens of the last piece")
    parser.add_argument("--budget", type=int, default=512, help="tokens per step")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print_head("streaming prefill")
    engine = build_engine(
        config_from_flat(
            model=options.model, max_num_seqs=4, max_num_batched_tokens=options.budget,
            enable_prefix_caching=False, pipeline_depth=1, disable_log_stats=True,
        )
    )  # fmt: skip
    ways = measure(engine, options)
    engine.client.close()
    print(
        f"{options.input_len} prompt tokens, the last {options.last_len} in the last piece,"
        f" {options.budget} per step; to the first token"
    )
    for way, result in ways.items():
        print(f"  {way:17} {result['median_ms']:8.2f} ms  {result['steps']} steps")
    alone = ways["last piece alone"]
    aim_ms = alone["median_ms"] * (1 + 1 / alone["steps"])
    print(f"  aim, streamed: <= {aim_ms:.2f} ms (the last piece alone and one more such step)")
    results = {
        name: getattr(options, name) for name in ("model", "input_len", "last_len", "budget")
    }
    write_report(options.output_json, results | {"ways": ways})


if __name__ == "__main__":
    main()
