"""Recorded steps with draft tokens of models whose layers have states.

A graph stores the states after the accepted tokens, whose number only the device knows. Tokens
and log-probabilities equal the results without draft tokens.
"""

from collections import Counter
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.engine.drafting.draft_pace import StepTimes
from quire.ops import gpu
from quire.ops.kernels.launch import INTERPRETED
from quire.runner.drafting.draft_steps import VerifyStep
from quire.runner.gpu import graphs
from tests.runner.gpu.test_kernel_ops import devices, summary_of  # noqa: F401 (a fixture)
from tests.runner.test_guesses import Oracle
from tests.support.engine.attachments import draft_with
from tests.support.models.checkpoints import random_tokens
from tests.support.models.reference_checkpoints import checkpoint

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="the stand-in's memory is the CPU's"),
    pytest.mark.usefixtures("devices"),
]

IDS = random_tokens(5, 9, seed=4)
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.9, seed=5, max_tokens=8, ignore_eos=True, n=2, logprobs=1),
]


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the steps with draft tokens: launched directly, recorded, recorded with prompts. A kind
    is recorded at its first step."""
    counted: Counter[str] = Counter()
    direct, replay = VerifyStep.first, graphs.Recorded.first

    def count_direct(step: Any, shape: Any) -> Any:
        counted["direct"] += 1
        return direct(step, shape)

    def count_replay(recorded: Any, shape: Any) -> Any:
        if recorded.size.drafts:
            counted["mixed" if recorded.size.is_mixed else "drafted"] += 1
        return replay(recorded, shape)

    monkeypatch.setattr(VerifyStep, "first", count_direct)
    monkeypatch.setattr(graphs.Recorded, "first", count_replay)
    monkeypatch.setattr(graphs, "FIRST_TIMES", 0)
    monkeypatch.setattr(graphs, "FIRST_TIMES_MIXED", 0)
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)
    monkeypatch.setattr(gpu, "is_gpu", lambda device: True)
    return counted


def answers_of(llm: LLM) -> list[RequestOutput]:
    prompts = [{"prompt_token_ids": each} for each in IDS]
    return llm.generate(prompts, PARAMS, use_tqdm=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "num", "right"),
    [
        ("qwen3_5_text", 3, 0.7),
        *(
            (name, *case)
            for name in ("qwen3_5_text", "qwen3_5")
            for case in ((1, 1.0), (5, 0.0), (9, 0.9))
        ),
    ],
)
def test_steps_with_draft_tokens_are_replayed_and_exact(
    architecture: str, num: int, right: float, verified: Counter[str], caplog: Any
) -> None:
    settings: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 32, "block_size": 4, "max_num_seqs": 4,
        "max_num_batched_tokens": 12, "kv_cache_memory_bytes": 1 << 18, "pipeline_depth": 1,
        "attention_backend": "triton", "disable_log_stats": True,
    }  # fmt: skip
    with LLM(str(checkpoint(architecture)), enforce_eager=True, **settings) as llm:
        draft_with(llm.engine.client.core, None)
        plain = answers_of(llm)
    known = {
        (tuple(o.prompt_token_ids or ()), c.index): list(c.token_ids)
        for o in plain
        for c in o.outputs
    }
    with LLM(str(checkpoint(architecture)), **settings) as llm:
        oracle = Oracle(known, num, right)
        draft_with(llm.engine.client.core, oracle)
        assert list(map(summary_of, answers_of(llm))) == list(map(summary_of, plain))
    assert oracle.num_tried > 6 and "failed" not in caplog.text
    assert verified["direct"] == 0 and verified["drafted"] + verified["mixed"] > 2
