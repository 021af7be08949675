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


def ending_tokens(sequence: Sequence) -> list[int]:
    """Return stop ids and the end of sequence, even where `min_tokens` still forbids them."""
    return [*sequence.request.stop_token_ids[:3], *sequence.request.eos_token_ids[:1]]


def forbidden_tokens(sequence: Sequence) -> list[int]:
    """Return bad words, tokens with a negative bias, the last tokens, and one outside the list."""
    params, known = sequence.request.params, sequence.known_tokens.tolist()
    banned = [word[-1] for word in sequence.request.bad_words_token_ids]
    banned += [token_id for token_id, bias in (params.logit_bias or {}).items() if bias < 0]
    return [*banned[:2], *known[-3:], 5]


def repeated_beginning(sequence: Sequence) -> list[int]:
    """Return the beginning again: a loop that penalties should break."""
    return sequence.known_tokens[:4].tolist()


def unknown_tokens(sequence: Sequence) -> list[int]:
    return [2**31 - 1, -1]


def invalid_after_valid(sequence: Sequence) -> list[int]:
    """Return invalid ids after a valid token."""
    return [262, -(2**31), 10**9, 262]


Proposal = Callable[[Sequence], list[int]]
ALL: list[Proposal] = [
    ending_tokens, forbidden_tokens, repeated_beginning, unknown_tokens, invalid_after_valid,
]  # fmt: skip


class BadDrafter(StandIn):
    """A drafter that replaces the engine's own."""

    def __init__(self, propose: Proposal) -> None:
        self._propose = propose

    def propose(self, sequences: list[Sequence], num_running: int) -> list[Draft]:
        return [
            Draft(s.request.request_id, s.index, s.num_known_tokens, self._propose(s))
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
def test_bad_drafts_do_not_change_answers(llm: LLM, plain: list[Any], propose: Proposal) -> None:
    core, drafted = llm.engine.client.core, set[int]()
    before = drafter_of(core)

    def note(event: Any) -> None:
        if isinstance(event, Planned) and event.plan is not None:
            drafted.update(t for draft in event.plan.drafts for t in draft.token_ids.tolist())

    core.subscribe(note)
    draft_with(core, BadDrafter(propose))
    assert answers(llm) == plain
    draft_with(core, before)
    size = llm.engine.spec.vocab_size
    assert all(0 <= token_id < size for token_id in drafted)
    assert bool(drafted) == (propose is not unknown_tokens)
