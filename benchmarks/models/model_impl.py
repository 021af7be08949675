"""Measure one model by quire's class and by transformers', in each way that this can run.

    python -m benchmarks.models.model_impl --model shape:qwen3-0.6b

All have the same seeded random weights, scheduler, packed products and paged attention. They run in
one process, in alternating rounds. Medians count, and each round's share of quire's own speed.
Translated: `--model-impl transformers`, if quire has an operation for everything in transformers'
code. Its own code: the same in other cases. Compiled: with `--torch-compile`; the rounds that
compile do not count.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.result_files import options_of, write
from quire import LLM, SamplingParams
from quire.models.hf.build import Rebuilt
from quire.tools.report import benchmark_parser, print_head
from quire.tools.workloads import random_prompts

AIM = 0.8
OURS = "quire's class"
OWN_CODE = "transformers', its own code"
WAYS: dict[str, dict[str, Any]] = {
    OURS: {"model_impl": "quire"},
    "transformers', translated": {"model_impl": "transformers"},
    OWN_CODE: {"model_impl": "transformers"},
    "transformers', compiled": {"model_impl": "transformers", "torch_compile": True},
}
VOCAB = 1000  # of the tokens that prompts are made of
MAX_ROWS, PROMPT_LEN, OUTPUT_LEN = 16, 32, 32


@dataclass(frozen=True)
class Workload:
    """So many prompts of so many random tokens, and what is made of each."""

    name: str
    num_requests: int
    prompt_len: int
    output_len: int

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the workload's figure counts."""
        return self.num_requests * (self.output_len if self.output_len > 1 else self.prompt_len)


WORKLOADS = (
    Workload("decode, 1 row", 1, PROMPT_LEN, OUTPUT_LEN),
    Workload("decode, 16 rows", MAX_ROWS, PROMPT_LEN, OUTPUT_LEN),
    Workload("prefill, 1 x 512", 1, 512, 1),
)


@contextmanager
def untranslated() -> Iterator[None]:
    """Let transformers' code run, as where it cannot be translated."""
    original = Rebuilt._lowered
    Rebuilt._lowered = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Rebuilt._lowered = original  # type: ignore[method-assign]


def opened(options: argparse.Namespace, name: str) -> LLM:
    return LLM(
        options.model, load_format="dummy", seed=0, dtype=options.dtype, max_model_len=1024,
        max_num_seqs=MAX_ROWS, enable_prefix_caching=False, disable_log_stats=True, **WAYS[name],
    )  # fmt: skip


def measured(llm: LLM, workload: Workload) -> float:
    """Return tokens per second; of decoding, without the time that the prompts take."""

    def seconds(output_len: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    sizes = workload.num_requests, workload.prompt_len, VOCAB
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts(*sizes, seed=0)]
    if workload.output_len == 1:
        return workload.num_tokens / seconds(1)
    first = seconds(1)
    return (workload.num_tokens - workload.num_requests) / (seconds(workload.output_len) - first)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="shape:qwen3-0.6b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print_head(f"{options.model} in {options.dtype}, by quire's class and by transformers'")
    with ExitStack() as stack:
        models = {}
        for name in WAYS:
            with untranslated() if name == OWN_CODE else ExitStack():
                models[name] = stack.enter_context(opened(options, name))
        results = [compared(models, workload, options.rounds) for workload in WORKLOADS]
    rows = [
        {
            "workload": got["workload"],
            "way": way,
            "tokens_per_s": speeds,
            "share": got["shares"][way],
        }
        for got in results
        for way, speeds in got["tokens_per_s"].items()
    ]
    write(options.output_json, "models.model_impl", rows, options_of(options))


def compared(models: dict[str, LLM], workload: Workload, rounds: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {name: [] for name in models}
    for number in range(-1, rounds):
        for name, llm in models.items():
            speed = measured(llm, workload)
            if number >= 0:
                found[name].append(speed)
    print(f"{workload.name:18} {'tokens/s':>9}  of quire's (aim {AIM})")
    shares = {}
    for name, speeds in found.items():
        shares[name] = [own / ours for own, ours in zip(speeds, found[OURS], strict=True)]
        low, middle, high = min(shares[name]), statistics.median(shares[name]), max(shares[name])
        speed = statistics.median(speeds)
        print(f"  {name:28} {speed:9.1f}  {middle:.2f} ({low:.2f} to {high:.2f})", flush=True)
    return {"workload": workload.name, "tokens_per_s": found, "shares": shares}


if __name__ == "__main__":
    main()
