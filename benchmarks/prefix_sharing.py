"""Requests that arrive together and share a prefix: how much time it saves to compute it once.

    python benchmarks/prefix_sharing.py

16 requests of 512 shared and 32 own prompt tokens, 32 tokens out, at once, with a cold cache;
against the same engine without prefix caching. Alternating rounds in one process; medians. The
limit: each distinct prompt token is computed once, at the cost that a prompt token has without
sharing, and the decode steps take as long as without it.
"""

import statistics
from dataclasses import dataclass, field
from typing import Any

from quire.serve.llm import LLM
from quire.tools.bench.throughput import Run, StepTimes, run_once
from quire.tools.report import benchmark_parser, print_head, write_report
from quire.tools.workloads import shared_prefix_prompts

AIM = 4.0


@dataclass
class Side:
    """An engine with or without sharing, and its runs."""

    llm: LLM
    times: StepTimes
    runs: list[Run] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(run.elapsed_s for run in self.runs)

    @property
    def num_computed(self) -> int:
        return sum(step.num_tokens for step in self.runs[0].steps)

    def prompt_seconds(self) -> float:
        """Time of the steps that computed prompts, in the median run."""
        totals = [sum(s.duration_s for s in run.steps if not s.is_decode) for run in self.runs]
        return statistics.median(totals)

    def summary(self) -> dict[str, Any]:
        return {
            "seconds": [run.elapsed_s for run in self.runs],
            "num_computed_tokens": self.num_computed,
            "num_cached_tokens": self.runs[0].num_cached_tokens,
        }


def open_side(options: Any, sharing: bool) -> Side:
    length = options.shared + options.own + options.output_len
    llm = LLM(
        options.model,
        dtype=options.dtype,
        max_model_len=length,
        max_num_seqs=options.num_prompts,
        enable_prefix_caching=sharing,
        disable_log_stats=True,
    )
    return Side(llm, StepTimes.of(llm))


def best_ratio(off: Side, num_own: int, num_prompts: int) -> float:
    """The limit of the docstring. num_own: prompt tokens that nobody shares."""
    num_all = off.runs[0].num_prompt_tokens
    num_distinct = num_own + (num_all - num_own) // num_prompts
    prompt_s = off.prompt_seconds()
    return off.seconds / (off.seconds - prompt_s + prompt_s * num_distinct / num_all)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="shape:qwen3-0.6b")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--shared", type=int, default=512)
    parser.add_argument("--own", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print_head(
        f"{options.model}: {options.num_prompts} requests that share {options.shared} tokens, with"
        f" {options.own} of their own, {options.output_len} out"
    )
    on, off = open_side(options, sharing=True), open_side(options, sharing=False)
    prompts = shared_prefix_prompts(
        options.num_prompts, options.shared, options.own, on.llm.engine.spec.vocab_size, seed=0
    )
    for side in (on, off):
        run_once(side.llm, side.times, [prompt[-options.own :] for prompt in prompts], 2)
    for _ in range(options.rounds):
        for side in (on, off):
            side.runs.append(run_once(side.llm, side.times, prompts, options.output_len))
    for name, side in (("sharing", on), ("without", off)):
        print(
            f"{name}: {side.seconds:.2f} s, {side.num_computed:,} tokens computed;"
            f" num_cached_tokens {side.runs[0].num_cached_tokens}"
        )
    limit = best_ratio(off, options.num_prompts * options.own, options.num_prompts)
    same = sum(a == b for a, b in zip(on.runs[0].token_ids, off.runs[0].token_ids, strict=True))
    print(f"ratio: {off.seconds / on.seconds:.2f} x (aim {AIM:g}; limit here {limit:.2f})")
    print(f"equal outputs: {same} of {options.num_prompts} (rounding may differ with the batch)")
    write_report(
        options.output_json,
        {
            "model_id": options.model,
            "ratio": off.seconds / on.seconds,
            "limit": limit,
            "sharing": on.summary(),
            "without": off.summary(),
        },
    )


if __name__ == "__main__":
    main()
