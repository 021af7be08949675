"""Piece `guesses`: Qwen3-0.6B's shape with two plans in flight, with and without n-gram drafts from
the device. The two engines take the same requests in turns.

    copying   one token is allowed, so all drafts are right: the cost of a step with drafts, and
              the remaining gain of pipelining
    nothing   temperature 1: almost no text repeats

Tokens per second are the output's over the whole time, prompts of 64 tokens included.
"""

import statistics
import time
from typing import Any

from benchmarks.gpu.context import Bench
from benchmarks.gpu.engine import engine
from benchmarks.gpu.report import Row
from benchmarks.gpu.table import SMALL
from benchmarks.gpu.workload import random_requests
from quire.base.events import Event, Planned, Stepped
from quire.base.requests.sampling_params import SamplingParams
from quire.serve.python.llm import LLM

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
ROUNDS = 3
MIN_RATIOS = {"copying": 2.0, "nothing": 0.98}  # times the speed without drafts


class DraftCounts:
    """Counts of an engine's draft tokens. num_after: plans with drafts that follow others in
    flight."""

    def __init__(self, llm: LLM) -> None:
        self.num_plans = self.num_after = self.num_drafted = self.num_right = 0
        self._flown: set[int] = set()  # plans with drafts that are in flight
        llm.engine.client.core.subscribe(self.note)

    def note(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self.num_drafted += event.num_draft_tokens
            self.num_right += event.num_accepted
            self._flown.discard(event.step_id)
        elif isinstance(event, Planned) and event.plan is not None and event.plan.is_guessing:
            self.num_plans += 1
            self.num_after += len(self._flown) > 0
            self._flown.add(event.step_id)

    @property
    def detail(self) -> dict[str, Any]:
        return {
            "guessed": self.num_drafted,
            "right": self.num_right,
            "plans": self.num_plans,
            "behind another": self.num_after,
        }


def run(bench: Bench) -> None:
    """Measure all lines, with both engines in memory."""
    common: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 64, "pipeline_depth": 2}
    if bench.is_cuda:
        common |= {"kv_cache_memory_bytes": 8 << 30}
    with (
        engine(bench, SMALL, speculative_config={"method": "none"}, **common) as plain,
        engine(bench, SMALL, speculative_config=NGRAM, **common) as drafting,
    ):
        both = plain, drafting
        for name in MIN_RATIOS:
            for batch in (1, 4) if bench.is_tiny else (1, 4, 16, 64):
                bench.attempt(
                    f"{name}, {batch} rows", lambda n=name, b=batch: _case(bench, both, n, b)
                )


def _case(bench: Bench, both: tuple[LLM, LLM], name: str, batch: int) -> None:
    """Measure a line. both: the engines without and with drafts."""
    counts, rates = DraftCounts(both[1]), list[tuple[float, float]]()
    for number in range(1 + (1 if bench.is_tiny else ROUNDS)):
        (one, answers), (other, same) = (_rate(bench, llm, name, batch) for llm in both)
        if name == "copying" and answers != same:
            raise ValueError("a guess has changed an answer")
        if number:
            rates.append((one, other))
    ratio = statistics.median(other / one for one, other in rates)
    before, after = (statistics.median(each) for each in zip(*rates, strict=True))
    min_ratio = MIN_RATIOS[name]
    figure = f"{after:,.0f} tokens/s, {ratio:.2f} x"
    detail = {"without": f"{before:,.0f}"} | counts.detail
    bench.report.add(
        Row(
            f"{name}, {batch} rows",
            figure=figure,
            aim=f">= {min_ratio} x",
            is_reached=ratio >= min_ratio,
            detail=detail,
        )
    )


def _rate(bench: Bench, llm: LLM, name: str, batch: int) -> tuple[float, list[list[int]]]:
    """Output tokens per second, and the answers."""
    length, num_tokens = (8, 12) if bench.is_tiny else (64, 256)
    prompts = [each.prompt for each in random_requests(1000, batch, length, length, seed=3)]
    params = [
        SamplingParams(
            temperature=0.0 if name == "copying" else 1.0, seed=i, max_tokens=num_tokens,
            ignore_eos=True, detokenize=False,
            allowed_token_ids=[40 + i] if name == "copying" else None,
        )
        for i in range(batch)
    ]  # fmt: skip
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    return sum(map(len, answers)) / seconds, answers
