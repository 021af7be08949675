"""Drafters that propose bad tokens: forbidden tokens, tokens that would end the answer, invalid
ids. Answers equal those without drafts, bit for bit."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.events import Planned
from quire.base.messages import Draft
from quire.scheduler.core.sequence import Sequence
from tests.support.engine.attachments import StandIn, draft_with, drafter_of

PROMPTS = ["Once upon a time", "The cat and the cat and the cat", "1, 2, 3, 1, 2, 3", "a"] * 2
COMMON: dict[str, Any] = {"max_tokens": 24, "logprobs": 2}
PARAMS = [
    SamplingParams(temperature=0.9, seed=1, stop_token_ids=[11, 13, 262], **COMMON),
    SamplingParams(temperature=0.0, dry_multiplier=4.0, dry_allowed_length=1, **COMMON),
    SamplingParams(temperature=1.0, seed=2, repetition_penalty=1.5, frequency_penalty=1, **COMMON),
    SamplingParams(temperature=1.0, seed=3, allowed_token_ids=[11, 40, 41, 262, 300], **COMMON),
    SamplingParams(temperature=1.5, seed=4, min_tokens=9, stop_token_ids=[11, 40, 262], **COMMON),
    SamplingParams(temperature=0.8, seed=5, bad_words=["cat", " the"], ignore_eos=True, **COMMON),
    SamplingParams(temperature=1.0, seed=6, logit_bias={262: -100, 40: 5}, n=2, **COMMON),
    SamplingParams(temperature=2.0, seed=7, top_p=0.9, min_p=0.02, **COMMON),
]


def what_ends(sequence: Sequence) -> list[int]:
    """Stop ids and end of sequence, also where they may not come yet."""
    return [*sequence.request.stop_token_ids[:3], *sequence.request.eos_token_ids[:1]]


def what_is_forbidden(sequence: Sequence) -> list[int]:
    """Bad words, tokens that a bias or a list keeps out, and what was just said, again."""
    params, known = sequence.request.params, sequence.known_tokens.tolist()
    banned = [word[-1] for word in sequence.request.bad_words_token_ids]
    banned += [token_id for token_id, bias in (params.logit_bias or {}).items() if bias < 0]
    return [*banned[:2], *known[-3:], 5]


def what_was_said(sequence: Sequence) -> list[int]:
    """The beginning once more: a loop that penalties are there to break."""
    return sequence.known_tokens[:4].tolist()


def nobody_knows(sequence: Sequence) -> list[int]:
    return [2**31 - 1, -1]


def what_is_no_token(sequence: Sequence) -> list[int]:
    """Behind one that is."""
    return [262, -(2**31), 10**9, 262]


Guess = Callable[[Sequence], list[int]]
ALL: list[Guess] = [
    what_ends, what_is_forbidden, what_was_said, nobody_knows, what_is_no_token,
]  # fmt: skip


class Liar(StandIn):
    """A guesser in the place of the engine's own."""

    def __init__(self, propose: Guess) -> None:
        self._guess = propose

    def propose(self, sequences: list[Sequence], num_running: int) -> list[Draft]:
        return [
            Draft(s.request.request_id, s.index, s.num_known_tokens, self._guess(s))
            for s in sequences
        ]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        "demo", max_model_len=64, dtype="float32", disable_log_stats=True,
        kv_cache_memory_bytes=8 << 20, enable_prefix_caching=False,
    ) as made:  # fmt: skip
        yield made


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [
        [(c.token_ids, c.finish_reason, c.stop_reason, c.logprobs) for c in output.outputs]
        for output in outputs
    ]


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[Any]:
    return answers(llm)


@pytest.mark.parametrize("propose", ALL)
def test_nothing_changes(llm: LLM, plain: list[Any], propose: Guess) -> None:
    core, tried = llm.engine.client.core, set[int]()
    before = drafter_of(core)

    def note(event: Any) -> None:
        if isinstance(event, Planned) and event.plan is not None:
            tried.update(t for draft in event.plan.drafts for t in draft.token_ids.tolist())

    core.subscribe(note)
    draft_with(core, Liar(propose))
    assert answers(llm) == plain
    draft_with(core, before)
    size = llm.engine.spec.vocab_size
    assert all(0 <= token_id < size for token_id in tried)
    assert bool(tried) == (propose is not nobody_knows)
