"""Measure the time saved by computing a shared prefix once, for requests that arrive together.

    python -m benchmarks.memory.prefix_sharing

16 requests of 512 shared and 32 own prompt tokens, 32 tokens out, at once, with a cold cache. They
run against the same engine without prefix caching, and against one that has the shared tokens
pinned (P 4.4, fig. 16: 1-shot is --shared 80, 5-shot --shared 341). Alternating rounds in one
process; medians.

The limit: each distinct prompt token is computed once, at the cost of a prompt token without
sharing, and decode steps take equally long. Pinned tokens are not computed.
"""

import statistics
from dataclasses import dataclass, field
from typing import Any

from benchmarks.result_files import options_of, write
from quire.serve.python.llm import LLM
from quire.tools.bench.throughput import Run, StepTimes, run_once
from quire.tools.report import benchmark_parser, print_head
from quire.tools.workloads import shared_prefix_prompts

AIM = 4.0


@dataclass
class Side:
    """An engine with or without sharing, and its runs."""

    llm: LLM
    times: StepTimes
    resets: bool = True
    runs: list[Run] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(run.elapsed_s for run in self.runs)

    @property
    def num_computed(self) -> int:
        return sum(step.num_tokens for step in self.runs[0].steps)

    def prompt_seconds(self) -> float:
        """Return the time of the steps that computed prompts, in the median run."""
        totals = [sum(s.duration_s for s in run.steps if not s.is_decode) for run in self.runs]
        return statistics.median(totals)

    def summary(self) -> dict[str, Any]:
        return {
            "seconds": [run.elapsed_s for run in self.runs],
            "num_computed_tokens": self.num_computed,
            "num_cached_tokens": self.runs[0].num_cached_tokens,
        }


def open_side(options: Any, sharing: bool, pinned: list[int] | None = None) -> Side:
    length = options.shared + options.own + options.output_len
    llm = LLM(
        options.model,
        dtype=options.dtype,
        max_model_len=length,
        max_num_seqs=options.num_prompts,
        enable_prefix_caching=sharing,
        disable_log_stats=True,
    )
    if pinned is not None:
        llm.pin_prefix(pinned)
    return Side(llm, StepTimes.of(llm), resets=pinned is None)


def best_ratio(off: Side, num_distinct: int) -> float:
    """Return the limit of the docstring. num_distinct: prompt tokens that must be computed."""
    num_all = off.runs[0].num_prompt_tokens
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
    pinned = open_side(options, sharing=False, pinned=prompts[0][: options.shared])
    sides = {"sharing": on, "pinned": pinned, "without": off}
    for side in sides.values():
        own = [prompt[-options.own :] for prompt in prompts]
        run_once(side.llm, side.times, own, 2, side.resets)
    for _ in range(options.rounds):
        for side in sides.values():
            side.runs.append(
                run_once(side.llm, side.times, prompts, options.output_len, side.resets)
            )
    for name, side in sides.items():
        print(
            f"{name}: {side.seconds:.2f} s, {side.num_computed:,} tokens computed;"
            f" num_cached_tokens {side.runs[0].num_cached_tokens}"
        )
    num_own = options.num_prompts * options.own
    limit, pinned_limit = best_ratio(off, num_own + options.shared), best_ratio(off, num_own)
    print(f"ratio: {off.seconds / on.seconds:.2f} x (aim {AIM:g}; limit here {limit:.2f})")
    print(f"pinned: {off.seconds / pinned.seconds:.2f} x (limit here {pinned_limit:.2f})")
    for name in ("sharing", "pinned"):
        pairs = zip(sides[name].runs[0].token_ids, off.runs[0].token_ids, strict=True)
        same = sum(a == b for a, b in pairs)
        print(f"{name}: {same} of {options.num_prompts} outputs equal (rounding may differ)")
    ratios = {
        "sharing": {"ratio": off.seconds / on.seconds, "limit": limit},
        "pinned": {"ratio": off.seconds / pinned.seconds, "limit": pinned_limit},
    }
    rows = [
        {"side": name, **ratios.get(name, {}), **side.summary()} for name, side in sides.items()
    ]
    write(options.output_json, "memory.prefix_sharing", rows, options_of(options))


if __name__ == "__main__":
    main()
