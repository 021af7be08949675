"""Requests that use every feature of an engine, for any executor."""

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.base.plan import Plan, StepResult
from quire.base.requests.outputs import RequestOutput
from quire.engine.executors.executor import Executor
from tests.support.models.reference_checkpoints import pool_bytes, text_checkpoint

COMMON: dict[str, Any] = {
    "dtype": "float64",
    "max_model_len": 96,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "watermark": 0.0,
    "disable_log_stats": True,
}
NUM_ASKED = 10  # requests of `asked`
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "yz"]}}, "required": ["a"]}
WORDS = [5, 6, 7, 90, 2, 2, 8, 41, 33, 12, 44, 80, 23, 61, 9, 17]


def asked() -> list[tuple[list[int], SamplingParams]]:
    """Prompts longer than a step's tokens, some alike, and ways to sample."""
    base: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "temperature": 1.0}
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 3},
        {"seed": 4, "top_k": 7, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.2},
        {"seed": 5, "logprobs": 3, "prompt_logprobs": 2},
        {"seed": 6, "n": 3},
        {"use_beam_search": True, "n": 2, "beam_width": 3},
        {"seed": 7, "logit_bias": {9: 4.0}, "allowed_token_ids": [5, 9, 11, 40]},
        {"seed": 8, "frequency_penalty": 0.5, "xtc_probability": 0.5, "dry_multiplier": 1.0},
        {"seed": 9, "structured_outputs": StructuredOutputsParams(json=SCHEMA)},
        {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex="[ab]{3,9}")},
    ]
    return [
        (WORDS[: 3 + i] * (1 + i % 3) + [i], SamplingParams(**(base | way)))
        for i, way in enumerate(ways)
    ]


@dataclass
class Answers:
    """answers: of one wave of requests, told apart by what they gave. moves: of blocks, by kind;
    masked, guessed: steps with masks and with guesses."""

    answers: list[str] = field(default_factory=list)
    moves: dict[str, int] = field(default_factory=dict)
    num_masked: int = 0
    num_draft_tokens: int = 0
    num_plans: int = 0


class Seen:
    """Looks at what passes to an executor."""

    def __init__(self, inner: Executor, found: Answers) -> None:
        self.inner, self.found = inner, found
        self.start, self.is_ready = inner.start, inner.is_ready
        self.copy_bytes_per_s, self.close = inner.copy_bytes_per_s, inner.close

    def submit(self, plan: Plan, masks: Any = None) -> None:
        self.found.num_plans += 1
        self.found.num_masked += len(plan.masked_rows) > 0
        self.found.num_draft_tokens += len(plan.drafts) > 0
        for move in plan.moves:
            self.found.moves[move.kind] = self.found.moves.get(move.kind, 0) + 1
        self.inner.submit(plan, masks)

    def next_result(self) -> StepResult:
        return self.inner.next_result()


def answers_of(
    model: Path | None = None, num_blocks: int = 120, num_asked: int = NUM_ASKED, **settings: Any
) -> Answers:
    """Two waves of the first `num_asked` requests; in the second everything hits."""
    model, found = model or text_checkpoint(), Answers()
    memory = pool_bytes(model, num_blocks, 4)
    with LLM(str(model), kv_cache_memory_bytes=memory, **(COMMON | settings)) as llm:
        core = llm.engine.client.core
        core.executor = Seen(core.executor, found)
        prompts = [prompt for prompt, _ in asked()[:num_asked]]
        for _ in range(2):
            params = [params for _, params in asked()[:num_asked]]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.answers += [told(output) for output in outputs]
        core.scheduler.check_invariants()
    return found


@cache
def alone(architecture: str, num_blocks: int, settings: tuple[tuple[str, Any], ...]) -> Answers:
    """What the model gives in this process."""
    return answers_of(text_checkpoint(architecture), num_blocks, **dict(settings))


def told(output: RequestOutput) -> str:
    """Everything but times and names; numbers as far as sums of parts are those of the whole."""
    parts = [
        (each.index, each.token_ids, each.finish_reason, each.cumulative_logprob, each.logprobs)
        for each in output.outputs
    ]
    text = repr((parts, output.prompt_logprobs))
    return re.sub(r"-?\d+\.\d+(e-?\d+)?", lambda found: f"{float(found[0]):.6f}", text)
