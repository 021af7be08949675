"""Steps with draft tokens give exactly the tokens and log-probabilities of plain steps, for any
draft tokens."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.base.messages import Draft
from quire.base.plan import Plan, RowDraft
from quire.ops.host.native import core
from quire.ops.sampling.device_drafts import NO_TOKEN, DraftPositions, accept_drafts
from quire.runner.drafting.draft_steps import sampling_positions
from quire.runner.setup.assemble import empty_rows
from quire.scheduler.core.sequence import Sequence
from tests.support.cases import slow_but
from tests.support.engine.attachments import StandIn, draft_with

PROMPTS = ["Once upon a time", "The little fox said: 1, 2, 3, 1, 2, 3,", "a", "def add(x, y):"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=30, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, max_tokens=25, top_p=0.9, n=2, logprobs=0),
    SamplingParams(
        temperature=0.8, seed=6, max_tokens=30, repetition_penalty=1.2, frequency_penalty=0.3,
        logprobs=2, dry_multiplier=0.8,
    ),
    SamplingParams(temperature=0.7, seed=8, max_tokens=20, min_tokens=10, stop=["the"]),
]  # fmt: skip


class Oracle(StandIn):
    """A drafter that knows the answers. Each of `num` draft tokens is correct with the probability
    `right`."""

    def __init__(self, answers: dict[Any, list[int]], num: int, right: float) -> None:
        self._answers, self._num, self._right = answers, num, right
        self._choose = random.Random(3)
        self.num_right = self.num_tried = 0

    def propose(self, sequences: list[Sequence], num_running: int) -> list[Draft]:
        drafts = []
        for sequence in sequences:
            prompt = tuple(sequence.known_tokens[: sequence.num_prompt_tokens].tolist())
            at = sequence.num_output_tokens
            rest = self._answers[prompt, sequence.index][at : at + self._num]
            draft_ids = [t if self._choose.random() < self._right else 7 for t in rest]
            name, known = sequence.request.request_id, sequence.num_known_tokens
            drafts.append(Draft(name, sequence.index, known, draft_ids))
        return drafts


def engine(**settings: Any) -> LLM:
    return LLM(
        "demo", max_model_len=64, disable_log_stats=True, enable_prefix_caching=False,
        kv_cache_memory_bytes=8 << 20, **settings,
    )  # fmt: skip


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [
        [
            (c.token_ids, c.text, c.finish_reason, c.cumulative_logprob, c.logprobs)
            for c in o.outputs
        ]
        for o in outputs
    ]


FORMATS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8"},
]


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
@pytest.mark.parametrize(
    "settings", slow_but(FORMATS, FORMATS[0], FORMATS[3]), ids=lambda s: "-".join(s.values())
)
def test_drafts_do_not_change_answers(settings: dict[str, Any]) -> None:
    with engine(**settings) as llm:
        plain = answers(llm)
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        known = {
            (tuple(o.prompt_token_ids or ()), c.index): list(c.token_ids)
            for o in outputs
            for c in o.outputs
        }
        for num, right in [(1, 1.0), (4, 1.0), (3, 0.0), (4, 0.7)]:
            oracle = Oracle(known, num, right)
            draft_with(llm.engine.client.core, oracle)
            assert answers(llm) == plain, (num, right)
            assert oracle.num_tried > 20


def test_accepted_drafts_save_steps() -> None:
    with engine(dtype="float32") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True)
        [output] = llm.generate(PROMPTS[:1], params, use_tqdm=False)
        known = {(tuple(output.prompt_token_ids or ()), 0): list(output.outputs[0].token_ids)}
        oracle = Oracle(known, 4, 1.0)
        draft_with(llm.engine.client.core, oracle)
        scheduler = llm.engine.client.core.scheduler
        before = scheduler.planner.next_step_id
        llm.generate(PROMPTS[:1], params, use_tqdm=False)
        # One step for the prompt and the first token; then five tokens each.
        assert scheduler.planner.next_step_id - before == 5


def test_accepted_tokens_end_where_no_token_can_follow() -> None:
    """A grammar that ends, or that allows no token, leaves no choice at that position."""
    drafts = RowDraft(3, np.array([5, 6, 7], np.int32)), RowDraft(1, np.array([8], np.int32))
    plan = Plan(
        0, rows=np.array([3, 1]), num_tokens=np.array([4, 2]), computed_bound=np.array([0, 0]),
        sample_rows=np.array([3, 1]), sources=np.array([3, 1]), drafts=drafts,
    )  # fmt: skip
    places = sampling_positions(plan)
    assert places.depths.tolist() == [0, 0, 1, 2, 3, 1]
    state = empty_rows(torch.device("cpu"), 4, 8, 1, 4)
    state.tokens_RM[3, 1:4], state.tokens_RM[1, 1] = torch.tensor([5, 6, 7]), 8
    rows, lengths = torch.tensor([3, 1]), torch.tensor([1, 1])
    draft_positions = DraftPositions(places.sampling, places.depths)
    for chosen, counts in [
        ([5, 8, 6, 7, 4, 2], [4, 2]),  # all drafts are accepted, and a token follows each
        ([5, 8, 6, 9, 4, 2], [3, 2]),  # the third draft is wrong
        ([5, 8, 6, NO_TOKEN, 4, NO_TOKEN], [2, 1]),
        ([5, 8, NO_TOKEN, NO_TOKEN, NO_TOKEN, 2], [1, 2]),
    ]:
        _, accepted = accept_drafts(state, rows, lengths, torch.tensor(chosen), draft_positions)
        assert accepted.tolist() == counts, chosen
