"""Log-probabilities attach to a runner only while a row requests them. Covers
`runner/attachment.py`."""

import numpy as np
import pytest
import torch

from quire.base.plan import HostTokens, Plan, RowStart
from quire.base.requests.sampling_params import SamplingParams
from quire.runner.attachment import Attachment
from quire.runner.sampling.candidates import PromptScores
from quire.runner.setup.assemble import empty_rows


def start(row: int, num_prompt_tokens: int, scored: int | None) -> RowStart:
    tokens = np.arange(num_prompt_tokens, dtype=np.int32)
    params = SamplingParams(prompt_logprobs=scored)
    return RowStart(row, tokens, 0, num_prompt_tokens, params, seed=1)


def plan_of(row: int, first: int, num_tokens: int, **more: object) -> Plan:
    one = np.array([1], np.int32)
    return Plan(3, row * one, num_tokens * one, first * one, **more)  # type: ignore[arg-type]


@pytest.fixture
def attachments() -> list[Attachment]:
    return []


@pytest.fixture
def scores(attachments: list[Attachment]) -> PromptScores:
    state = empty_rows(torch.device("cpu"), 4, 16, 1, 4)
    return PromptScores(attachments, 97, state, lambda hidden_PD: hidden_PD)


def test_scores_attach_only_while_a_row_requests_them(
    scores: PromptScores, attachments: list[Attachment]
) -> None:
    scores.start(start(0, 5, None))
    assert attachments == []
    scores.start(start(1, 5, 2))
    scores.start(start(2, 5, -1))
    assert attachments == [scores]
    scores.release(1)
    assert attachments == [scores]
    scores.release(2)
    assert attachments == []


def test_every_prompt_position_but_the_last_is_scored(
    scores: PromptScores,
) -> None:
    scores.start(start(1, 5, 2))
    prepared = [scores.prepare(plan_of(1, first, num)) for first, num in ((0, 3), (3, 2), (5, 1))]
    assert prepared[0] is not None and prepared[1] is not None and prepared[2] is None
    assert [len(part.counts) for part in prepared[0]._scores] == [3]
    assert [(part.first, part.last) for part in prepared[1]._scores] == [(3, 4)]
    assert not prepared[0].can_be_recorded
    assert scores.prepare(plan_of(0, 0, 3)) is None, "another row"


def test_appended_prompt_tokens_are_scored(scores: PromptScores) -> None:
    scores.start(start(1, 3, 0))
    more = HostTokens(1, 3, np.array([7, 8], np.int32), is_prompt=True)
    part = scores.prepare(plan_of(1, 2, 3, host_tokens=(more,)))
    assert part is not None and [(each.first, each.last) for each in part._scores] == [(2, 4)]
