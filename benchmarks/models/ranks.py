"""Measure the cost of ranks on this machine: one model by one process, by a separate rank, by
several.

    python -m benchmarks.models.ranks [--model shape:qwen3-0.6b] [--dtype bfloat16] [--rounds 3]

Each way is a fresh interpreter, in turn. Measured are the time until `LLM(...)` returns, output
tokens per second with 1 and with 16 rows, and prompt tokens per second of one prompt. The ways
share the same processor cores, so several ranks can gain only by overlap. The difference is the
cost of ranks: messages, sums, and waiting for each other. Tokens are compared with one process's.
They may differ in 16 bits, where sums of parts round otherwise.
"""

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.result_files import columns, options_of, write
from quire.tools.report import benchmark_parser, print_head

WAYS: dict[str, dict[str, Any]] = {
    "one process": {},
    "one rank": {"distributed_executor_backend": "mp"},
    "2 ranks": {"tensor_parallel_size": 2},
    "2 stages": {"pipeline_parallel_size": 2},
    "2 cores": {"data_parallel_size": 2},
}
WORK = """
import json, sys, time
from quire import LLM, SamplingParams

def main():
    job = json.loads(sys.argv[1])
    began = time.perf_counter()
    with LLM(job["model"], dtype=job["dtype"], max_model_len=1024, disable_log_stats=True,
             kv_cache_memory_bytes=512 << 20, **job["settings"]) as llm:
        found = {"start_s": time.perf_counter() - began}
        def run(rows, length, tokens):
            prompts = [{"prompt_token_ids": [5 + (i * 37 + row) % 900 for i in range(length)]}
                       for row in range(rows)]
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
            return seconds, [list(each.outputs[0].token_ids) for each in outputs]
        run(2, 16, 4)
        for rows in (1, 16):
            few, _ = run(rows, 16, 2)
            many, answers = run(rows, 16, 2 + job["tokens"])
            found[f"decode_{rows}"] = rows * job["tokens"] / (many - few)
            found[f"answers_{rows}"] = answers
        run(1, 16, 1)
        seconds, _ = run(1, 700, 1)
        found["prompt"] = 700 / seconds
    print(json.dumps(found))

if __name__ == "__main__":
    main()
"""
COLUMNS = "start_s", "decode_1", "decode_16", "prompt"


def run_way(options: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any] | str:
    """Return what one way gave, or what it said when it could not."""
    job = {"model": options.model, "dtype": options.dtype, "tokens": options.tokens}
    command = [sys.executable, "-c", WORK, json.dumps(job | {"settings": settings})]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no word"])[-1]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.ways}
    for _ in range(options.rounds):
        for name in options.ways:
            found = run_way(options, WAYS[name])
            if isinstance(found, str):
                print(f"{name}: {found}", flush=True)
            else:
                runs[name].append(found)
    print(f"{'':20} start s   decode 1   decode 16   prompt   tokens/s; equal tokens of 16 rows")
    medians: dict[str, Any] = {}
    for name, each in runs.items():
        if not each:
            continue
        one = {column: statistics.median(run[column] for run in each) for column in COLUMNS}
        if runs["one process"]:
            one["equal"] = equal_share(runs["one process"][0], each[0])
        medians[name] = one
        print(
            f"{name:20} {one['start_s']:7.2f} {one['decode_1']:10.1f} {one['decode_16']:11.1f}"
            f" {one['prompt']:8.0f}            {one.get('equal', 0.0):.3f}", flush=True,
        )  # fmt: skip
    raw = {name: [{c: run[c] for c in COLUMNS} for run in each] for name, each in runs.items()}
    return {"medians": medians, "runs": raw}


def equal_share(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return how many of the answers' tokens are equal up to the first that is not."""
    total = equal = 0
    for ours, theirs in zip(one["answers_16"], other["answers_16"], strict=True):
        differs = [a != b for a, b in zip(ours, theirs, strict=True)]
        total, equal = (
            total + len(ours),
            equal + (differs.index(True) if any(differs) else len(ours)),
        )
    return equal / total


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="shape:qwen3-0.6b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    options = parser.parse_args()
    print_head(f"Ranks, {options.model}, {options.dtype}")
    found = measure(options)
    rows = [
        {"way": way, **medians, "runs": columns(found["runs"][way])}
        for way, medians in found["medians"].items()
    ]
    write(options.output_json, "models.ranks", rows, options_of(options))


if __name__ == "__main__":
    main()
