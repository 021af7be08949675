r"""Measure the gain of draft tokens: the same requests by an engine with and one without, in turns.

    python -m benchmarks.models.speculation --model demo --dtype float32
    python -m benchmarks.models.speculation --model shape:qwen3-0.6b --workloads loop --batches 1 4
    python -m benchmarks.models.speculation --model shape:qwen3-0.6b --workloads random \
        --tokens 32 --kv-mib 2048 --rounds 2

    loop      greedy text that repeats itself: a model of random weights does so soon; in others one
              token is the only one that is allowed
    copy      the model is asked to say again what stands in the prompt, greedy
    random    temperature 1: hardly anything comes twice, so there is nothing to gain

There are some requests for each row, so that a request which ends early makes room for the next.
Both engines' answers are compared, token by token. The limit: with k accepted draft tokens a step
yields 1 + k tokens, and takes at least as long as a step of one token.
"""

import argparse
import json
import statistics
import time
from typing import Any

from benchmarks.result_files import options_of, write
from quire import LLM, SamplingParams
from quire.base.events import Stepped
from quire.tools.report import benchmark_parser, print_head

TEXT = (
    "Say this again, word by word: The little fox ran over the hill, and then the little fox ran"
    " back. "
)
AIMS = {"loop": 2.0, "copy": 2.0, "random": 0.98}


def requests_of(
    workload: str, batch: int, num_tokens: int, is_demo: bool
) -> tuple[list[Any], list[SamplingParams]]:
    """Return prompts as texts, or as token ids for a model without a tokenizer."""
    params = []
    for i in range(batch):
        own: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True}
        own |= {"temperature": 1.0, "seed": i} if workload == "random" else {"temperature": 0.0}
        if workload == "loop" and is_demo:
            own |= {"allowed_token_ids": [40 + i]}
        params.append(SamplingParams(**own))
    text = TEXT * 3 if workload == "copy" else "Once upon a time"
    if is_demo:
        return [f"{i} {text}" for i in range(batch)], params
    ids = [[i + 5, *(token * 37 % 1000 + 5 for token in range(32))] for i in range(batch)]
    return [{"prompt_token_ids": each} for each in ids], params


def run(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> tuple[float, Any]:
    """Output tokens per second, behind the first token of each, and the answers."""
    llm.generate(
        prompts, [SamplingParams(max_tokens=1, temperature=0.0)] * len(prompts), use_tqdm=False
    )
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    return sum(map(len, answers)) / seconds, answers


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    print("workload   rows    plain   guessing   tok/s    ratio (aim)   tried   right")
    for batch in options.batches:
        found += compare_rows(options, batch)
    print(f"The limit of a row with {options.guesses} guesses: {1 + options.guesses}.0")
    return found


def compare_rows(options: argparse.Namespace, batch: int) -> list[dict[str, Any]]:
    """Compare with so many rows, each of which serves some requests one after the other."""
    shared = {
        "model": options.model, "dtype": options.dtype, "quantization": options.quantization,
        "max_model_len": 512, "disable_log_stats": True, "max_num_seqs": batch,
        "kv_cache_memory_bytes": options.kv_mib << 20,
    }  # fmt: skip
    settings = options.speculative_config or {
        "method": "ngram", "num_speculative_tokens": options.guesses,
        "prompt_lookup_max": 4, "prompt_lookup_min": 2,
    }  # fmt: skip
    found = []
    with LLM(**shared) as plain, LLM(speculative_config=settings, **shared) as drafting:
        steps: list[Stepped] = []
        core = drafting.engine.client.core
        core.subscribe(lambda event: steps.append(event) if isinstance(event, Stepped) else None)
        for workload in options.workloads:
            arguments = workload, batch * options.per_row, options.tokens, options.model == "demo"
            prompts, params = requests_of(*arguments)
            ones, others = list[float](), list[float]()
            for number in range(-1, options.rounds):
                steps.clear()
                one, answers = run(plain, prompts, params)
                other, same = run(drafting, prompts, params)
                assert answers == same, "a guess has changed an answer"
                if number >= 0:
                    ones.append(one)
                    others.append(other)
            drafted = sum(step.num_draft_tokens for step in steps)
            right = sum(step.num_accepted for step in steps)
            ratio = statistics.median(b / a for a, b in zip(ones, others, strict=True))
            print(
                f"{workload:10} {batch:4} {statistics.median(ones):8.1f}"
                f" {statistics.median(others):10.1f} {'':8} {ratio:5.2f} ({AIMS[workload]})"
                f"  {drafted:6} {right:7}", flush=True,
            )  # fmt: skip
            found.append({"workload": workload, "rows": batch, "ratio": ratio,
                          "rates": {"plain": ones, "guessing": others},
                          "tried": drafted, "right": right})  # fmt: skip
    return found


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--guesses", type=int, default=4)
    parser.add_argument("--speculative-config", type=json.loads, help="instead of n-grams, as JSON")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--per-row", type=int, default=4, help="requests that a row serves in turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--kv-mib", type=int, default=512, help="of each engine")
    parser.add_argument("--workloads", nargs="+", default=list(AIMS), choices=list(AIMS))
    options = parser.parse_args()
    print_head(
        f"Guessing ahead, {options.model}, {options.dtype}, {options.quantization or 'plain'}"
    )
    write(options.output_json, "models.speculation", compare(options), options_of(options))


if __name__ == "__main__":
    main()
