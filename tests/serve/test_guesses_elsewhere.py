"""Draft tokens compared with transformers. Sampled tokens have the distribution that transformers
computes, and greedy ones equal its assisted generation."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.base.events import Stepped
from quire.base.messages import Draft
from quire.engine.drafting.draft_pace import StepTimes
from quire.scheduler.core.sequence import Sequence
from tests.support.engine.attachments import StandIn, draft_with
from tests.support.models.reference_checkpoints import (
    checkpoint,
    reference_logits,
    reference_model,
    write_checkpoint,
)

VOCAB = 5
PROMPT = [1, 3, 2]
NUM_TOKENS = 4
NUM_DRAWS = 3000
TEMPERATURE = 2.0  # the tiny model is confident
MIN_P = 1e-3  # for a fixed draw: the seeds never change


def open_llm(folder: Any, **settings: Any) -> LLM:
    return LLM(
        str(folder), dtype="float64", max_model_len=96, block_size=4, attention_backend="torch",
        disable_log_stats=True, **settings,
    )  # fmt: skip


@cache
def chances_of_answers() -> dict[tuple[int, ...], float]:
    """Return the probability of each answer, computed by transformers."""
    found = {}
    for answer in itertools.product(range(VOCAB), repeat=NUM_TOKENS - 1):
        logits = reference_logits(checkpoint("llama", VOCAB), [*PROMPT, *answer])
        chances = torch.softmax(logits[len(PROMPT) - 1 :] / TEMPERATURE, -1)
        before = [float(chances[i, token]) for i, token in enumerate(answer)]
        for last in range(VOCAB):
            found[(*answer, last)] = float(torch.tensor(before).prod() * chances[-1, last])
    return found


@cache
def by_chance(prefix: tuple[int, ...], choose: Callable[..., int]) -> tuple[int, ...]:
    """Extend a prefix to the end with the most likely (max) or least likely (min) tokens."""

    def chance(token_id: int) -> float:
        begins, chances = (*prefix, token_id), chances_of_answers()
        return sum(p for answer, p in chances.items() if answer[: len(begins)] == begins)

    if len(prefix) == NUM_TOKENS:
        return prefix
    return by_chance((*prefix, choose(range(VOCAB), key=chance)), choose)


class AnswerDrafter(StandIn):
    """Drafts all remaining tokens of an answer."""

    def __init__(self, kind: str) -> None:
        self._kind, self._random = kind, random.Random(0)

    def propose(self, sequences: list[Sequence], num_running: int) -> list[Draft]:
        drafts = []
        for sequence in sequences:
            known = sequence.num_known_tokens
            prefix = sequence.known_tokens[len(PROMPT) :].tolist()
            if self._kind == "random":
                draft_tokens = [
                    self._random.randrange(VOCAB) for _ in range(NUM_TOKENS - len(prefix))
                ]
            else:
                choose = {"likely": max, "unlikely": min}[self._kind]
                draft_tokens = list(by_chance(tuple(prefix), choose)[len(prefix) :])
            drafts.append(Draft(sequence.request.request_id, sequence.index, known, draft_tokens))
        return drafts


def p_value(counts: Counter[tuple[int, ...]]) -> float:
    """Return the p-value of a chi-square test against the exact chances; merge rare answers."""
    expected = {answer: p * NUM_DRAWS for answer, p in chances_of_answers().items()}
    pairs = [(counts[answer], num) for answer, num in expected.items() if num >= 5]
    rest = NUM_DRAWS - sum(n for n, _ in pairs), NUM_DRAWS - sum(e for _, e in pairs)
    pairs += [rest] if rest[1] >= 5 else []
    statistic = sum((n - wanted) ** 2 / wanted for n, wanted in pairs)
    half = torch.tensor([len(pairs) - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))


def test_chi_square_test_detects_another_distribution() -> None:
    """Draw from a temperature that is a tenth off."""
    answers = list(chances_of_answers())
    chances = torch.tensor(list(chances_of_answers().values()), dtype=torch.float64)
    for power, is_seen in ((1.0, False), (1.1, True)):
        torch.manual_seed(0)
        drawn = torch.multinomial(chances**power, NUM_DRAWS, replacement=True)
        assert (p_value(Counter(answers[i] for i in drawn.tolist())) < MIN_P) == is_seen


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    with open_llm(checkpoint("llama", VOCAB), max_num_seqs=256) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["likely", "unlikely", "random"],
)
def test_sampled_tokens_have_the_distribution_of_the_model(tiny: LLM, kind: str) -> None:
    """Drafts are often accepted (likely) or hardly ever (unlikely)."""
    core, steps = tiny.engine.client.core, list[Stepped]()
    core.subscribe(lambda event: steps.append(event) if isinstance(event, Stepped) else None)
    draft_with(core, AnswerDrafter(kind))
    params = [
        SamplingParams(temperature=TEMPERATURE, seed=seed, max_tokens=NUM_TOKENS)
        for seed in range(NUM_DRAWS)
    ]
    outputs = tiny.generate(
        [{"prompt_token_ids": PROMPT}] * NUM_DRAWS, params, use_tqdm=False
    )  # fmt: skip
    counts = Counter(tuple(output.outputs[0].token_ids) for output in outputs)
    assert p_value(counts) > MIN_P
    accepted, drafted = sum(s.num_accepted for s in steps), sum(s.num_draft_tokens for s in steps)
    assert drafted > accepted > {"likely": 0.3, "unlikely": 0.0, "random": 0.1}[kind] * drafted


@pytest.mark.parametrize(
    ("speculation", "assistant"),
    [
        ({"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1}, False),
        ({"method": "suffix"}, False),
        pytest.param({"method": "suffix"}, True, marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_match_assisted_generation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, speculation: dict[str, Any], assistant: bool
) -> None:
    """transformers drafts by prompt look-up, or with an assistant model."""
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)
    folder = checkpoint("llama", 11)  # a small vocabulary: it repeats itself
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    if assistant:
        other = write_checkpoint(tmp_path, "llama", 11, seed=1)
        options = {"assistant_model": reference_model(other)}
    line = random.Random(4)
    prompts = [[line.randrange(11) for _ in range(length)] * 3 for length in (3, 7, 12)]
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = reference_model(folder).generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False,
                eos_token_id=None, pad_token_id=0, **options,
            )  # fmt: skip
        wanted.append(out[0, len(prompt) :].tolist())
    with open_llm(folder, speculative_config=speculation) as llm:
        steps = list[Stepped]()
        core = llm.engine.client.core
        core.subscribe(lambda event: steps.append(event) if isinstance(event, Stepped) else None)
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in found] == wanted
    assert sum(step.num_accepted for step in steps) > 20
