"""Measure the same 16 requests of 128 + 64 tokens, by transformers' `generate` and by quire.

    python -m benchmarks.models.against_transformers --dtype bfloat16

One process, alternating rounds, medians. Both load one checkpoint of random weights, made for this
in a temporary directory. transformers gets its best case: one static batch of equal lengths,
without padding, greedy, with scaled dot product attention. It runs with its dynamic cache, which is
the default, and with its static one. The report shows times, the limit by arithmetic and memory,
and the number of equal tokens. With random weights the best logits are almost equal. So rounding
makes some sequences diverge, and then all later tokens differ.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.result_files import Row, options_of, write
from quire.models.checkpoint.source import resolve_model
from quire.serve.python.llm import LLM
from quire.tools.bench.throughput import StepTimes, run_once
from quire.tools.limits import measure_limits, step_cost
from quire.tools.report import benchmark_parser, print_head
from quire.tools.workloads import random_prompts

try:
    import transformers
except ImportError:
    transformers = None

AIM = 1.5
Tokens = list[list[int]]
Generate = Callable[[], Tokens]


def write_checkpoint(model: str, dtype: torch.dtype, directory: Path) -> None:
    """Write random weights, seeded, in the architecture's own format."""
    config = transformers.AutoConfig.from_pretrained(resolve_model(model).directory)
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    made.save_pretrained(directory)


def transformers_generate(
    directory: Path, dtype: torch.dtype, prompts: Tokens, output_len: int
) -> dict[str, Generate]:
    """Return one function for each kind of cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids = torch.tensor(prompts)

    def generate(cache: str | None) -> Tokens:
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=output_len,
                max_new_tokens=output_len,
                do_sample=False,
                cache_implementation=cache,
            )
        tokens: Tokens = out[:, ids.shape[1] :].tolist()
        return tokens

    return {
        "transformers (dynamic cache)": lambda: generate(None),
        "transformers (static cache)": lambda: generate("static"),
    }


def timed(generate: Generate) -> tuple[float, Tokens]:
    began = time.perf_counter()
    tokens = generate()
    return time.perf_counter() - began, tokens


def working(kinds: dict[str, Generate]) -> dict[str, Generate]:
    """Warm each function up, and return the working ones."""
    found = {}
    for name, generate in kinds.items():
        try:
            generate()
            found[name] = generate
        except Exception as error:
            print(f"transformers, {name}: does not work here ({type(error).__name__}: {error})")
    return found


def agreement(ours: Tokens, theirs: Tokens) -> float:
    """Return the share of output tokens before the first difference of each sequence."""
    equal = 0
    for a, b in zip(ours, theirs, strict=True):
        differing = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        equal += differing[0] if differing else len(a)
    return equal / sum(map(len, ours))


def compare(options: Any, directory: Path) -> dict[str, Any]:
    """Run all rounds; prints as it goes."""
    dtype = getattr(torch, options.dtype)
    write_checkpoint(options.model, dtype, directory)
    llm = LLM(
        str(directory),
        dtype=options.dtype,
        device="cpu",
        max_model_len=options.input_len + options.output_len,
        max_num_seqs=options.num_prompts,
        disable_log_stats=True,
    )
    spec, times = llm.engine.spec, StepTimes.of(llm)
    prompts = random_prompts(options.num_prompts, options.input_len, spec.vocab_size, seed=0)
    kinds = working(transformers_generate(directory, dtype, prompts, options.output_len))
    run_once(llm, times, prompts, 2)
    seconds: dict[str, list[float]] = {name: [] for name in (*kinds, "quire")}
    for _ in range(options.rounds):
        for name, generate in kinds.items():
            spent, their_tokens = timed(generate)
            seconds[name].append(spent)
        run = run_once(llm, times, prompts, options.output_len)
        seconds["quire"].append(run.elapsed_s)
        print("; ".join(f"{name} {spent[-1]:.2f} s" for name, spent in seconds.items()), flush=True)
    limits, cost = measure_limits(dtype, torch.device("cpu")), step_cost(spec, dtype)
    medians = {name: statistics.median(spent) for name, spent in seconds.items()}
    return {
        "model_id": options.model,
        "dtype": options.dtype,
        "transformers": transformers.__version__,
        "seconds": seconds,
        "medians": medians,
        "ratios": {name: medians[name] / medians["quire"] for name in kinds},
        "limit_s": sum(cost.min_s(step.num_tokens, step.num_rows, limits) for step in run.steps),
        "agreement": agreement(run.token_ids, their_tokens),
        "num_output_tokens": run.num_output_tokens,
    }


def rows_of(got: dict[str, Any]) -> list[Row]:
    """Return one row for each engine."""
    return [
        {"engine": name, "seconds": times, "median_s": got["medians"][name],
         "output_tokens_per_s": got["num_output_tokens"] / got["medians"][name],
         "ratio": got["ratios"].get(name), "limit_s": got["limit_s"]}
        for name, times in got["seconds"].items()
    ]  # fmt: skip


def settings_of(got: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return the options, and what is the same for all engines."""
    same = ("model_id", "dtype", "transformers", "agreement", "num_output_tokens")
    return options_of(options) | {name: got[name] for name in same}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="shape:qwen3-0.6b")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if transformers is None:
        print("skipped: transformers is not installed (pip install transformers)", file=sys.stderr)
        return
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print_head(
        f"{options.model} in {options.dtype}: {options.num_prompts} requests of {options.input_len}"
        f" + {options.output_len} tokens, against transformers {transformers.__version__}"
    )
    with tempfile.TemporaryDirectory() as directory:
        got = compare(options, Path(directory))
    for name, median in got["medians"].items():
        ratio = f", {got['ratios'][name]:.2f} x quire's time" if name in got["ratios"] else ""
        speed = got["num_output_tokens"] / median
        print(f"{name}: {median:.2f} s, {speed:.1f} output tokens/s{ratio}")
    print(f"limit: {got['limit_s']:.2f} s by arithmetic and memory, attention left out")
    print(f"ratio to the faster cache: {min(got['ratios'].values()):.2f} x (aim {AIM:g})")
    print(f"tokens equal up to the first difference: {got['agreement']:.0%}")
    write(
        options.output_json, "models.against_transformers", rows_of(got), settings_of(got, options)
    )


if __name__ == "__main__":
    main()
