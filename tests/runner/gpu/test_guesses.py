"""Steps with draft tokens by kernels: more masks than rows, and penalties counted piecewise."""

import functools
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.events import Planned, Stepped
from quire.base.requests.sampling_params import StructuredOutputsParams
from quire.engine.drafting.draft_pace import StepTimes
from tests.runner.gpu.test_kernel_ops import devices, one_layer, summary_of  # noqa: F401 (a fixture)
from tests.support.runner.late_device import on_the_host


def answers(**settings: Any) -> tuple[list[Any], int]:
    """Return the tokens of two consecutive requests, and the number of accepted draft tokens."""
    masked = SamplingParams(temperature=0.0, max_tokens=24)
    masked.structured_outputs = StructuredOutputsParams(choice=["the little fox ran home"])
    penalised = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
    penalised.allowed_token_ids, penalised.frequency_penalty = [40, 41], 0.01
    with LLM(
        **one_layer(), max_num_seqs=1, dtype="float32", max_model_len=64, block_size=8,
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


@functools.cache
def answers_without_drafts() -> list[Any]:
    with on_the_host():
        return answers(
            speculative_config={"method": "none"}, attention_backend="torch", pipeline_depth=2
        )[0]


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_masks_and_penalties_apply_at_each_draft_token(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)
    ngram = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    found, num_correct = answers(
        speculative_config=ngram, attention_backend="triton", pipeline_depth=depth
    )
    assert found == answers_without_drafts()
    assert num_correct > 10


PARAMS = [
    SamplingParams(temperature=1.0, seed=1, max_tokens=20, allowed_token_ids=[40, 41], logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=18, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=2, max_tokens=20, n=2, logit_bias={50: 9.0, 51: 9.0},
                   repetition_penalty=1.1),
    SamplingParams(temperature=0.8, seed=3, max_tokens=19, min_tokens=6, top_k=3,
                   bad_words=["fox"], stop_token_ids=[40], allowed_token_ids=[40, 42, 43]),
]  # fmt: skip


class PlansInFlight:
    """Count the plans with drafts by the device, and those launched while another was in flight."""

    def __init__(self, llm: LLM) -> None:
        self.num_drafting = self.num_queued = self.num_correct = 0
        self._in_flight: set[int] = set()
        llm.engine.client.core.subscribe(self.note)

    def note(self, event: Any) -> None:
        if isinstance(event, Stepped):
            self.num_correct += event.num_accepted
            self._in_flight.discard(event.step_id)
        if isinstance(event, Planned) and event.plan is not None and event.plan.is_guessing:
            self.num_drafting += 1
            self.num_queued += len(self._in_flight) > 0
            self._in_flight.add(event.step_id)


def run_kernels(**settings: Any) -> tuple[list[Any], PlansInFlight]:
    with LLM(
        **one_layer(), dtype="float32", max_model_len=64, block_size=4, max_num_seqs=6,
        disable_log_stats=True, **{"attention_backend": "triton"} | settings,
    ) as llm:  # fmt: skip
        in_flight = PlansInFlight(llm)
        prompts = ["one two one two", "a", "the fox the fox", "one one one"]
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        return [summary_of(output) for output in outputs], in_flight


@pytest.mark.slow
@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_depth": 2, "kv_cache_memory_bytes": 1 << 20},
        {"pipeline_depth": 3, "kv_cache_memory_bytes": 1 << 16, "enforce_eager": True},
    ],
    ids=["recorded", "few blocks"],
)
def test_drafts_by_the_device_never_wait_for_the_host(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans with drafts by the device are launched one after another, with plain steps in between.
    Tokens and log-probabilities equal those of steps without drafts."""
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)
    ngram = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    found, in_flight = run_kernels(speculative_config=ngram, **settings)
    assert in_flight.num_queued >= 3 and in_flight.num_correct > 10
    with on_the_host():
        plain = {"speculative_config": {"method": "none"}, "attention_backend": "torch"}
        assert found == run_kernels(**settings | plain)[0]
