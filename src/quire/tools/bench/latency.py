"""Measure the time of one batch from its first prompt token to its last output token.

    quire bench latency --model shape:qwen3-0.6b --batch-size 8 --input-len 32 --output-len 128

All prompts of a batch arrive at once, with random tokens, and none ends before its last token. The
prefix cache is off, so that each batch computes its prompts. The printed lines and the JSON keys
are the same as in `vllm bench latency`.
"""

import argparse
import time
from typing import Any

import numpy as np

from quire.base.errors import ConfigError
from quire.base.requests.sampling_params import SamplingParams
from quire.serve.python.llm import LLM
from quire.tools.report import print_head, write_report

PERCENTILES = (10, 25, 50, 75, 90, 99)


def make_params(options: argparse.Namespace) -> SamplingParams:
    """Return the parameters of each request. Raises RequestError for wrong numbers."""
    return SamplingParams(
        n=options.n,
        use_beam_search=options.use_beam_search,
        temperature=1.0,
        max_tokens=options.output_len,
        ignore_eos=True,
        detokenize=not options.disable_detokenize,
    )


def make_batch(llm: LLM, options: argparse.Namespace, seed: int) -> list[list[int]]:
    """Return the prompts of one batch as random token ids."""
    size = (options.batch_size, options.input_len)
    ids: list[list[int]] = np.random.default_rng(seed).integers(
        llm.engine.spec.vocab_size, size=size
    ).tolist()  # fmt: skip
    return ids


def measure(llm: LLM, options: argparse.Namespace, seed: int) -> list[float]:
    """Run the warm-ups, then return the seconds of each measured batch."""
    prompts, params = make_batch(llm, options, seed), make_params(options)
    latencies = []
    for _ in range(options.num_iters_warmup + options.num_iters):
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        latencies.append(time.perf_counter() - began)
    return latencies[options.num_iters_warmup :]


def results(model: str, latencies: list[float]) -> dict[str, Any]:
    """Return the keys of `vllm bench latency`."""
    values = np.percentile(latencies, PERCENTILES).tolist()
    return {
        "model_id": model,
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies,
        "percentiles": {str(each): value for each, value in zip(PERCENTILES, values, strict=True)},
    }


def run(options: argparse.Namespace, given: dict[str, Any]) -> int:
    """Run the command with the engine's given settings; return the exit status."""
    if given.get("enable_prefix_caching"):
        raise ConfigError("the prefix cache would skip the prompts; leave enable_prefix_caching.")
    model = given.get("model", "demo")
    made = f"{options.batch_size} prompts of {options.input_len} tokens"
    print_head(f"{model}: {made}, {options.output_len} output tokens each")
    length = options.input_len + options.output_len
    settings = {"model": model, "max_model_len": length, "max_num_seqs": _rows(options)}
    with LLM(**(settings | given | {"enable_prefix_caching": False})) as llm:
        found = results(model, measure(llm, options, given.get("seed", 0)))
    print(f"Avg latency: {found['avg_latency']} seconds")
    for percentile, value in found["percentiles"].items():
        print(f"{percentile}% percentile latency: {value} seconds")
    write_report(options.output_json, found)
    return 0


def _rows(options: argparse.Namespace) -> int:
    rows: int = options.batch_size * options.n
    return rows
