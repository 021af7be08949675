"""Measure the share of the core's time that one watcher of `/v1/engine/live` costs.

    python -m benchmarks.scheduler.live_watcher

The core's loop runs over a scheduler without a model, which ends no request. The pool has --blocks
blocks, and a share of it is in use. Steps are taken in turn with and without a watcher, so that
both run under the same load. A watcher then costs

    step      what the core's thread pays more for each step, to note it: medians
    frame     making one frame and encoding it for the socket, at most five a second and at most a
              two-hundredth of the time (`engine/observability/live.py`)
    share     of a second in which steps take --step-ms each: steps x step + frames x frame

Encoding JSON and sending it is another process's, which does nothing else meanwhile.
"""

import gc
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.result_files import options_of, write
from benchmarks.virtual.dry_run import VOCAB_SIZE, dry_request, dry_run
from quire.base.clock import MonotonicClock
from quire.base.messages import Live
from quire.base.requests.validation import RequestLimits
from quire.base.settings.config import SchedulerConfig
from quire.engine.loop.core import EngineCore
from quire.engine.observability.live import FRAME_S, ONE_IN, LiveFrames
from quire.engine.wire.wire import core_codec
from quire.tools.report import benchmark_parser, print_head

BLOCK_SIZE = 16
AIM = 0.01
TURN = 4  # steps in a row with or without a listener
WARM_UP = 64


def make_core(num_rows: int, num_blocks: int, num_steps: int) -> EngineCore:
    """Return a core whose rows all decode, with prompts that fill half of the pool; a pool that
    would run out is larger."""
    prompt_len = max(2 * BLOCK_SIZE, num_blocks * BLOCK_SIZE // (2 * num_rows))
    max_len = prompt_len + num_steps + WARM_UP + 64
    num_blocks = max(num_blocks, num_rows * (max_len // BLOCK_SIZE + 2))
    config = SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=num_rows * prompt_len)
    scheduler, executor = dry_run(num_blocks, BLOCK_SIZE, config, max_len, True)
    limits = RequestLimits(VOCAB_SIZE, max_len, 0, num_rows)
    core = EngineCore(scheduler, executor, MonotonicClock(), limits)
    rng = np.random.default_rng(1)
    for number in range(num_rows):
        prompt = rng.integers(0, VOCAB_SIZE, prompt_len - number % BLOCK_SIZE).tolist()
        core.add(dry_request(str(number), prompt, max_len - prompt_len))
    for _ in range(WARM_UP):
        core.step()
    return core


def compare(num_rows: int, num_blocks: int, num_steps: int, step_ms: list[float]) -> dict[str, Any]:
    """Return the results of one line."""
    core = make_core(num_rows, num_blocks, 2 * num_steps)
    frames, encode = LiveFrames(core, MonotonicClock()), core_codec().encode
    frames.frame()
    gc.collect()
    ms: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * num_steps // TURN):
        is_watched = bool((turn + turn // 2) % 2)
        core.unsubscribe(frames)
        if is_watched:
            core.subscribe(frames)
        for _ in range(TURN):
            began = time.perf_counter()
            core.step()
            ms[is_watched].append(1e3 * (time.perf_counter() - began))
    assert core.view().num_running == num_rows, "rows gave way"
    frame_ms = statistics.median(_frame_ms(core, encode) for _ in range(20))
    plain, watched = statistics.median(ms[False]), statistics.median(ms[True])
    step_costs = max(0.0, watched - plain)
    apart_s = max(FRAME_S, ONE_IN * frame_ms / 1e3)
    shares = {each: step_costs / each + frame_ms / 1e3 / apart_s for each in step_ms}
    return {
        "rows": num_rows,
        "blocks": core.view().num_blocks,
        "plain_ms": plain,
        "watched_ms": watched,
        "frame_ms": frame_ms,
        "shares": shares,
    }


def _frame_ms(core: EngineCore, encode: Any) -> float:
    """Time the making and encoding of a whole frame."""
    frames = LiveFrames(core, MonotonicClock())
    began = time.perf_counter()
    encode(Live(0, frames.frame()))
    spent = time.perf_counter() - began
    core.unsubscribe(frames)
    return 1e3 * spent


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 256, 1024])
    parser.add_argument("--blocks", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[5.0, 20.0])
    options = parser.parse_args()
    print_head("one watcher: milliseconds of the core's thread, and the share of its time")
    shown = "".join(f"{f'at {each:g} ms':>12}" for each in options.step_ms)
    print(f"  rows   blocks     plain   watched     frame{shown}    aim")
    results = []
    for num_rows in options.rows:
        for num_blocks in options.blocks:
            line = compare(num_rows, num_blocks, options.steps, options.step_ms)
            shares = "".join(f"{share:12.2%}" for share in line["shares"].values())
            print(
                f"{num_rows:6,} {line['blocks']:8,} {line['plain_ms']:9.3f}"
                f" {line['watched_ms']:9.3f} {line['frame_ms']:9.3f}{shares} {AIM:6.0%}",
                flush=True,
            )
            results.append(line)
    write(
        options.output_json, "scheduler.live_watcher", results, options_of(options) | {"aim": AIM}
    )


if __name__ == "__main__":
    main()
