"""Steps with guesses by kernels: more masks than rows, and penalties counted in parts."""

from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.events import Stepped
from quire.base.sampling_params import StructuredOutputsParams
from quire.engine.guess_pace import StepTimes
from tests.runner.gpu.test_kernel_ops import devices  # noqa: F401 (a fixture)
from tests.serve.checkpoints import text_checkpoint


def answers(**settings: Any) -> tuple[list[Any], int]:
    """What two requests get one after the other, and how many guesses were right."""
    masked = SamplingParams(temperature=0.0, max_tokens=24)
    masked.structured_outputs = StructuredOutputsParams(choice=["the little fox ran home"])
    penalised = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
    penalised.allowed_token_ids, penalised.frequency_penalty = [40, 41], 0.01
    with LLM(
        str(text_checkpoint()), max_num_seqs=1, dtype="float32", max_model_len=64, block_size=8,
        disable_log_stats=True, kv_cache_memory_bytes=1 << 20, **settings,
    ) as llm:  # fmt: skip
        steps: list[Stepped] = []
        core = llm.engine.client.core
        core.subscribe(lambda event: steps.append(event) if isinstance(event, Stepped) else None)
        outputs = [
            llm.generate(["one two one two"], params, use_tqdm=False)[0].outputs[0]
            for params in (masked, penalised)
        ]
        return [each.token_ids for each in outputs], sum(step.num_accepted for step in steps)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("depth", [1, 2])
def test_masks_and_penalties_at_each_guess(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)
    triton = {"attention_backend": "triton", "pipeline_depth": depth}
    ngram = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    found, num_right = answers(speculative_config=ngram, **triton)
    assert found == answers(speculative_config={"method": "none"}, **triton)[0]
    assert num_right > 10
