"""A draft model next to a target model whose steps run as kernels."""

import pytest

from quire.engine.drafting.draft_pace import StepTimes
from tests.runner.test_drafting import PARAMS, PROMPTS, Counts, answers, engine
from tests.support.models.reference_checkpoints import checkpoint


@pytest.mark.parametrize("architecture", ["mistral", pytest.param("llama", marks=pytest.mark.slow)])
def test_all_drafts_of_the_target_itself_are_accepted(
    monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """The kernels' sums do not depend on a row's position in the batch."""
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)
    model, few = checkpoint(architecture), {"attention_backend": "triton", "max_num_seqs": 4}
    short = [params.clone() for params in PARAMS[:2]]
    for params in short:
        params.max_tokens = 8
    with engine(model, **few) as llm:
        plain = answers(llm, short, PROMPTS[:2])
    with engine(model, model, **few) as llm:
        counts = Counts(llm)
        found = answers(llm, short, PROMPTS[:2])
    tokens = [[[choice[0] for choice in one] for one in each] for each in (plain, found)]
    assert tokens[0] == tokens[1]
    assert counts.right == counts.tried > 8
