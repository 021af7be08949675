"""Measure the first token of an engine that continues another engine's prompt, relative to
computing it.

    python -m benchmarks.memory.handover --model shape:qwen3-0.6b --load-format dummy \
        --prompt 2048 --store shm:bench --runs 5

Two engines run in this process, one after the other on the same cores. Each run has a new prompt.
`cold` is the second engine's time to its first token without the first engine's blocks (another
salt). `warm` is the same with them, from the request on: look-up, fetch, loading, the tail of the
prompt. `stored_s` is the delay from the first engine's answer until its last block is in the store.
Moved bytes are compared with the size of the blocks that the second engine lacks. Run it on a quiet
machine. `CPU` is the time of all threads of this process during `warm`.

--second-store: the second engine's store, if it is another one, as with `serve://127.0.0.1:7400`
and `peer://127.0.0.1:7400`. These need `QUIRE_KV_SECRET` in the environment.
"""

import os
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.result_files import options_of, write
from quire import LLM, SamplingParams
from quire.tools.report import benchmark_parser

FIRST_LEG = {"do_remote_decode": True}
AIM = 0.10  # of cold


def first_token_s(llm: LLM, prompt: dict[str, Any], transfer: Any) -> tuple[float, Any]:
    """Return the time to one token, and the answer's params for the other leg."""
    params = SamplingParams(
        max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False,
        extra_args={"kv_transfer_params": transfer},
    )  # fmt: skip
    begin = time.perf_counter()
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return time.perf_counter() - begin, output


def wait_until_stored(llm: LLM) -> float:
    """Wait until all is in the store; how long that took."""
    core, begin = llm._alive.client.core, time.perf_counter()
    while any(each.num_open for each in core.attachments.pending):
        core.wait_for_answers()
    return time.perf_counter() - begin


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="shape:qwen3-0.6b")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--store", default=f"shm:bench-{os.getpid()}")
    parser.add_argument("--second-store", help="if it is another one")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    settings: dict[str, Any] = {
        "model": options.model, "load_format": options.load_format, "dtype": options.dtype,
        "max_model_len": options.prompt + 64, "disable_log_stats": True, "max_num_seqs": 4,
        "kv_cache_memory_bytes": 2 << 30,
    }  # fmt: skip
    numbers = np.random.default_rng(0)
    rows = []
    stores = (options.store,), (options.second_store or options.store,)
    with (
        LLM(**settings, kv_store=stores[0]) as first,
        LLM(**settings, kv_store=stores[1]) as second,
    ):
        scheduler = second._alive.client.core.scheduler
        block_bytes = sum(scheduler.memory.kv.block_bytes)
        for run in range(options.runs + 1):
            tokens = numbers.integers(10, 1000, options.prompt).tolist()
            prompt: dict[str, Any] = {"prompt_token_ids": tokens}
            cold, _ = first_token_s(second, prompt | {"cache_salt": f"cold {run}"}, None)
            _, first_output = first_token_s(first, prompt, FIRST_LEG)
            stored_s = wait_until_stored(first)
            before, cpu_s = scheduler.stores.view(), time.process_time()
            warm, output = first_token_s(second, prompt, first_output.kv_transfer_params)
            after, cpu_s = scheduler.stores.view(), time.process_time() - cpu_s
            moved = after.num_fetched_bytes - before.num_fetched_bytes
            missing = (options.prompt - 1) // scheduler.memory.block_size * block_bytes
            if run:  # the first one warms up
                rows.append((cold, warm, stored_s))
                print(
                    f"cold {cold * 1e3:8.1f} ms  warm {warm * 1e3:8.1f} ms ({warm / cold:6.1%},"
                    f" CPU {cpu_s * 1e3:.0f} ms)  kept {stored_s * 1e3:6.1f} ms later "
                    f" moved {moved / 1e6:8.1f} MB of"
                    f" {missing / 1e6:8.1f} MB missing  cached {output.num_cached_tokens}"
                )
    colds, warms, kepts = (statistics.median(each) for each in zip(*rows, strict=True))
    print(
        f"median: {warms / colds:.1%} of cold (aim {AIM:.0%}),"
        f" cold {colds * 1e3:.1f} ms, warm {warms * 1e3:.1f} ms, kept {kepts * 1e3:.1f} ms later"
    )
    medians = {
        "cold_s": colds,
        "warm_s": warms,
        "kept_s": kepts,
        "share": warms / colds,
        "aim": AIM,
    }
    write(options.output_json, "memory.handover", [medians], options_of(options))


if __name__ == "__main__":
    main()
