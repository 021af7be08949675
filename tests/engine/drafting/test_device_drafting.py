"""Drafting on the device, with plans in flight: the same answers in fewer steps, at any depth.

The whole engine on a CPU, by torch's operations and by the C++ core. `tests/runner/gpu` has the
kernels.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.events import Event, Planned, Stepped
from quire.base.requests.sampling_params import StructuredOutputsParams
from quire.engine.drafting.device_drafting import DeviceDrafting
from quire.engine.drafting.draft_pace import StepTimes
from quire.engine.recording.files import read_recording
from quire.tools.replay import replay_all
from quire.tools.replay_model import replay_with_model
from tests.support.cases import slow_but
from tests.support.engine.attachments import drafter_of

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
TEXTS = [
    "one two three. one two three. one two three. one two",
    "The little fox said: 1, 2, 3, 1, 2, 3,",
    "Once upon a time",
    "def add(x, y):\n    return x + y\n\ndef add(x, y):",
]
COMMON: dict[str, Any] = {"ignore_eos": True, "logprobs": 1}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=50, **COMMON),
    SamplingParams(temperature=0.7, seed=3, max_tokens=44, n=2, top_p=0.9, **COMMON),
    SamplingParams(temperature=0.0, max_tokens=40, frequency_penalty=0.2, xtc_probability=0.3,
                   repetition_penalty=1.1, **COMMON),
    SamplingParams(temperature=1.0, seed=4, max_tokens=60, min_tokens=20, stop=["x"],
                   bad_words=["add"], logit_bias={40: 1.0}, logprobs=1),
]  # fmt: skip

OBSERVE = StepTimes.observe


@pytest.fixture(autouse=True)
def no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure no steps, so that every step gets drafts, whatever the speed of the machine."""
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)


def engine(depth: int, method: Any = NGRAM, **settings: Any) -> LLM:
    common = {"speculative_config": method, "dtype": "float32", "max_num_seqs": 8}
    return LLM(
        "demo", max_model_len=112, disable_log_stats=True, block_size=16, pipeline_depth=depth,
        **(common | {"kv_cache_memory_bytes": 8 << 20} | settings),
    )  # fmt: skip


class Plans:
    """Counts an engine's plans. num_guessing: plans for which the device drafts. num_behind: plans
    with a row that has drafts in an earlier plan in flight."""

    def __init__(self, llm: LLM) -> None:
        self.num_guessing = self.num_behind = self.num = 0
        self._flown: dict[int, set[int]] = {}  # rows with drafts, by step in flight
        llm.engine.client.core.subscribe(self.note)

    def note(self, event: Event) -> None:
        """Count a plan. Events come in the order of the calls of the doors."""
        if isinstance(event, Stepped):
            self._flown.pop(event.step_id)
        elif isinstance(event, Planned) and event.plan is not None:
            self.num += 1
            self.num_guessing += event.plan.is_guessing
            rows = set(event.plan.rows.tolist())
            self.num_behind += any(not rows.isdisjoint(drafted) for drafted in self._flown.values())
            self._flown[event.step_id] = {draft.row for draft in event.plan.drafts}


def answers(llm: LLM, params: list[SamplingParams] = PARAMS) -> list[Any]:
    outputs = llm.generate(TEXTS[: len(params)], params, use_tqdm=False)
    return [
        [(tuple(c.token_ids), c.finish_reason, c.cumulative_logprob) for c in output.outputs]
        for output in outputs
    ]


SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "few blocks": {"kv_cache_memory_bytes": 1 << 20, "preemption_mode": "swap", "max_num_seqs": 5},
    "two ranks": {"tensor_parallel_size": 2},
}


@cache
def plain_answers(kind: str) -> list[Any]:
    with engine(1, {"method": "none"}, **SETTINGS[kind]) as llm:
        return answers(llm)


@pytest.mark.parametrize(
    ("kind", "depth"),
    [
        ("float32", 2),
        pytest.param("int8", 2, marks=pytest.mark.slow),
        pytest.param("float32", 3, marks=pytest.mark.slow),
        ("few blocks", 3),
        pytest.param("int8", 3, marks=pytest.mark.slow),
        pytest.param("few blocks", 2, marks=pytest.mark.slow),
        pytest.param("two ranks", 2, marks=pytest.mark.slow),
        pytest.param("two ranks", 3, marks=pytest.mark.slow),
    ],
)
def test_device_drafts_do_not_change_answers(kind: str, depth: int) -> None:
    plain = plain_answers(kind)
    with engine(depth, **SETTINGS[kind]) as llm:
        assert isinstance(drafter_of(llm.engine.client.core), DeviceDrafting)
        plans = Plans(llm)
        assert answers(llm) == plain
    assert plans.num_guessing >= 10 and plans.num_behind >= 10


@pytest.mark.slow
def test_device_drafts_do_not_change_tokens_with_torch() -> None:
    """Log-probabilities may differ: its attention pads rows to lengths that the host knows."""
    torch_only = {"attention_backend": "torch"}
    with engine(1, {"method": "none"}, **torch_only) as llm:
        plain = answers(llm)
    with engine(2, **torch_only) as llm:
        plans, found = Plans(llm), answers(llm)
    assert [[c[:2] for c in each] for each in found] == [[c[:2] for c in each] for each in plain]
    assert plans.num_guessing >= 10 and plans.num_behind >= 10


def test_repeated_text_takes_fewer_steps() -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=60, allowed_token_ids=[40])]
    with engine(2) as llm:
        plans = Plans(llm)
        [[(token_ids, _, _)]] = answers(llm, params)
    assert token_ids == (40,) * 60
    assert plans.num < 30


def test_host_drafts_the_forced_tokens_of_a_grammar() -> None:
    """The host drafts them between plans, while other rows continue. Afterwards the device drafts
    again."""
    forced = SamplingParams(temperature=0.0, max_tokens=30)
    forced.structured_outputs = StructuredOutputsParams(choice=["the little fox ran home again"])
    params = [PARAMS[0], PARAMS[1], forced]
    with engine(1, {"method": "none"}) as llm:
        plain = answers(llm, params)
    with engine(2) as llm:
        plans = Plans(llm)
        kinds: list[bool] = []
        llm.engine.client.core.subscribe(
            lambda event: (
                kinds.append(event.plan.is_guessing)
                if isinstance(event, Planned) and event.plan and event.plan.drafts
                else None
            )
        )
        assert answers(llm, params) == plain
    assert plans.num_guessing > 5 and not all(kinds) and kinds[-1]


@pytest.mark.parametrize("keeps_tokens", slow_but((False, True), True))
def test_replay_needs_no_drafter(tmp_path: Path, keeps_tokens: bool) -> None:
    """The recording has the device's drafts and results. A replay with a model drafts again."""
    settings = {"record": str(tmp_path), "record_tokens": keeps_tokens, "max_num_seqs": 5}
    with engine(3, kv_cache_memory_bytes=1 << 20, **settings) as llm:
        plans = Plans(llm)
        answers(llm)
    assert plans.num_behind >= 10
    outcome = replay_all(read_recording(tmp_path))
    assert outcome.difference is None and outcome.num_steps == plans.num
    if keeps_tokens:
        outcome = replay_with_model(read_recording(tmp_path), {})
        assert outcome.difference is None
        assert "sampled tokens are identical" in outcome.notes[-1]


def test_unprofitable_device_drafts_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated times make drafts expensive, so most steps are soon plain."""
    monkeypatch.setattr(StepTimes, "observe", lambda times, num, _: OBSERVE(times, num, num))
    with engine(2) as llm:
        plans = Plans(llm)
        answers(llm)
    assert plans.num_guessing < plans.num / 2
