"""The engine's side of drafting: which sequences get draft tokens, what they gain, and when their
state is dropped."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.base.events import Event, Planned, Stepped
from quire.base.messages import Draft
from quire.base.plan import Plan, StepResult
from quire.base.settings.speculation import Speculation
from quire.engine.drafting import drafting
from quire.engine.drafting.draft_pace import StepTimes
from quire.engine.drafting.drafting import Drafting
from quire.engine.drafting.rests import MAX_REST_STEPS
from quire.runner.model_runner import ModelRunner
from quire.runner.warm.warm_runner import WarmRunner
from quire.scheduler.core.sequence import RowTable, Sequence
from tests.support.engine.attachments import drafter_of


@pytest.fixture(autouse=True)
def no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure no steps, so that drafts do not depend on the speed of the machine."""
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)


SETTINGS = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 2,
}
TEXT = "one two three. one two three. one two three. one two"


def steps_of(llm: LLM) -> list[Stepped]:
    steps: list[Stepped] = []
    core = llm.engine.client.core
    core.subscribe(lambda event: steps.append(event) if isinstance(event, Stepped) else None)
    return steps


def engine(**settings: object) -> LLM:
    return LLM(
        "demo", max_model_len=96, dtype="float32", disable_log_stats=True,
        kv_cache_memory_bytes=8 << 20, **({"speculative_config": SETTINGS} | settings),
    )  # fmt: skip


@pytest.mark.parametrize("method", [SETTINGS, {"method": "suffix", "num_speculative_tokens": 4}])
def test_repeated_text_takes_fewer_steps(method: dict[str, object]) -> None:
    """Only one token is allowed, so the answer repeats it."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, allowed_token_ids=[40])
    with engine(speculative_config=method) as llm:
        steps = steps_of(llm)
        [output] = llm.generate([TEXT], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == [40] * 40
    assert sum(step.num_accepted for step in steps) + len(steps) >= 40
    assert len(steps) < 30


def test_repeated_answer_takes_fewer_steps() -> None:
    """Only if the salt is the same."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    suffix = {"method": "suffix", "num_speculative_tokens": 8}
    with engine(speculative_config=suffix) as llm:
        steps, nums, answers = steps_of(llm), [], []
        for salt in ("a", "b", "a"):
            prompt = {"prompt": "Once upon a time", "cache_salt": salt}
            [output] = llm.generate([prompt], params, use_tqdm=False)
            answers.append(output.outputs[0].token_ids)
            nums.append(len(steps))
            steps.clear()
    assert answers[0] == answers[1] == answers[2]
    assert nums[2] < 10 < 30 < nums[1], nums


def test_rejected_drafts_cost_no_tokens() -> None:
    params = SamplingParams(temperature=2.0, seed=1, max_tokens=60, ignore_eos=True)
    with engine() as llm:
        steps = steps_of(llm)
        [output] = llm.generate([TEXT], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 60
    assert sum(step.num_draft_tokens for step in steps) > sum(step.num_accepted for step in steps)


def test_drafts_stay_within_max_tokens() -> None:
    """No draft goes beyond the last token."""
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, allowed_token_ids=[40])
    with engine() as llm:
        plans: list[Planned] = []
        core = llm.engine.client.core
        core.subscribe(lambda event: plans.append(event) if isinstance(event, Planned) else None)
        [output] = llm.generate([TEXT + " !!!!"], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == [40] * 3
    drafts = [draft for each in plans if each.plan for draft in each.plan.drafts]
    assert all(len(draft.token_ids) <= 1 for draft in drafts)


def test_state_of_ended_sequences_is_dropped() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2)
    with engine(max_num_seqs=4) as llm:
        llm.generate([f"{i} {TEXT}" for i in range(60)], params, use_tqdm=False)
        drafting = drafter_of(llm.engine.client.core)
        assert drafting is not None
        assert len(drafting._of) <= 4 + 4


def test_sequence_without_repetitions_is_rarely_looked_up() -> None:
    """No token occurs twice, so the sequence is looked up less and less often."""
    num_looked_up = []
    with engine() as llm:
        core = llm.engine.client.core
        drafting = drafter_of(core)
        assert drafting is not None
        propose = drafting.propose

        def noted(sequences: list[Sequence], num_running: int) -> list[Draft]:
            num_looked_up.append(len(sequences))
            return propose(sequences, num_running)

        drafting.propose = noted  # type: ignore[method-assign]
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        params.allowed_token_ids = list(range(40, 80))
        params.logit_bias = dict.fromkeys(params.allowed_token_ids, 90.0)
        params.repetition_penalty = 50.0  # so each token comes once
        llm.generate([{"prompt_token_ids": [7]}], params, use_tqdm=False)
    assert sum(num_looked_up) <= 16


SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("depth", "method"), [(1, SETTINGS), (1, SUFFIX), (2, SUFFIX), (3, SUFFIX)]
)
def test_plans_overlap_unless_the_host_has_drafts(depth: int, method: dict[str, object]) -> None:
    """Drafts of the host are verified at any depth, in plans that overlap with no other."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    again = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, allowed_token_ids=[40])
    with engine(pipeline_depth=depth, speculative_config=method) as llm:
        core, in_flight = llm.engine.client.core, list[tuple[int, bool]]()

        def note(event: Event) -> None:
            if isinstance(event, Planned) and event.plan is not None:
                earlier = [step.plan for step in core.in_flight]
                is_behind = any(plan.drafts for plan in earlier)
                in_flight.append((len(earlier), is_behind or bool(event.plan.drafts and earlier)))

        core.subscribe(note)
        steps = steps_of(llm)
        [output] = llm.generate([TEXT], again, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == [40] * 40
        assert sum(step.num_accepted for step in steps) >= 15
        llm.generate(["Once upon"], params, use_tqdm=False)
    assert not any(is_wrong for _, is_wrong in in_flight)
    assert max(num for num, _ in in_flight) == depth - 1


def test_step_time_excludes_a_rest_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes a second by this clock. Steps of a rest are not measured."""
    now_s, seen = [0.0], list[float]()
    carried_out = Drafting.observe

    def observe(instance: Drafting, plan: Plan, result: StepResult) -> None:
        now_s[0] += 1.0
        carried_out(instance, plan, result)

    monkeypatch.setattr(Drafting, "observe", observe)
    monkeypatch.setattr(StepTimes, "observe", lambda _times, _num, seconds: seen.append(seconds))
    monkeypatch.setattr(drafting, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    with engine() as llm:
        llm.generate([TEXT.replace(" ", str(i)) for i in range(3)], params, use_tqdm=False)
    assert 5 < len(seen) < now_s[0]
    assert set(seen) == {1.0}


def test_unprofitable_drafts_become_rarer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gaps grow while drafts do not pay off. Once they pay off, drafts are frequent again."""
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, allowed_token_ids=[40])
    choose = drafting.lengths
    with engine() as llm:
        drafter, proposed = drafter_of(llm.engine.client.core), list[int]()
        proposals = drafter.proposals

        def noted(sequences: list[Sequence], num_pending: int = 0) -> list[drafting.Proposal]:
            proposed.append(drafter._num_steps)
            found: list[drafting.Proposal] = proposals(sequences, num_pending)
            return found

        drafter.proposals = noted
        monkeypatch.setattr(drafting, "lengths", lambda limits, *_, **__: [0] * len(limits))
        llm.generate([TEXT], params, use_tqdm=False)
        gaps = [b - a for a, b in itertools.pairwise(proposed[-4:])]
        assert len(proposed) < 20 and gaps == sorted(gaps) and gaps[-1] >= 8
        monkeypatch.setattr(drafting, "lengths", choose)
        steps = steps_of(llm)
        llm.generate([TEXT], params, use_tqdm=False)
        assert len(steps) < 50


def test_slow_failed_look_ups_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up takes 1 ms by this clock."""
    now_s = [0.0]

    def passed() -> float:
        now_s[0] += 0.0005
        return now_s[0]

    monkeypatch.setattr(drafting, "time", SimpleNamespace(perf_counter=passed))
    table, rows = RowTable(4, 8), np.arange(4)
    for step_s, steps in ((1.0, 1), (0.1, 2), (0.02, 11), (0.001, MAX_REST_STEPS)):
        made = Drafting(Speculation("suffix", 4), Mock(num_followed=0), 4)
        monkeypatch.setattr(made._times, "seconds", lambda _, step_s=step_s: step_s)
        for _ in range(40):
            made.draftable(table, rows)
            made.propose([], 1)
            made._num_steps += 100  # the rest is over
        assert abs(made._plain_rests.max_steps - steps) <= 1, step_s


def test_a_plain_step_is_measured_before_drafts_are_weighed() -> None:
    """The time of steps with drafts is known, and that of plain steps is not."""
    made = Drafting(Speculation("suffix", 4), Mock(num_followed=0), 4)
    made._verified.seconds = lambda _: 1.0  # type: ignore[method-assign]
    sequence = Mock(limit=40, num_known_tokens=8, num_prompt_tokens=8)
    sequence.known_tokens = np.arange(8, dtype=np.int32)
    assert made.propose([sequence], 1) == []
    assert not made._of, "no sequence was looked up"


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_steps_without_drafts_run_without_torch(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with drafts run with torch, over the same rows."""
    launched, plain, any_step = list[str](), WarmRunner.launch, ModelRunner.launch
    monkeypatch.setattr(
        WarmRunner, "launch", lambda *given: launched.append("plain") or plain(*given)
    )
    monkeypatch.setattr(
        ModelRunner, "launch", lambda *given: launched.append("any") or any_step(*given)
    )
    own: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    params = [
        SamplingParams(**own), SamplingParams(**own, allowed_token_ids=[40]), SamplingParams(**own)
    ]  # fmt: skip
    found = []
    for name in (method, "none"):
        config = {"method": name}
        with engine(speculative_config=config, weight_cache=str(tmp_path)) as llm:
            steps = steps_of(llm)
            for each in params:
                found.append(llm.generate([TEXT], each, use_tqdm=False)[0].outputs[0].token_ids)
            if name == method:
                num_drafted = sum(step.num_draft_tokens > 0 for step in steps)
                assert launched.count("plain") > 20 and 0 < num_drafted <= launched.count("any")
    assert found[:3] == found[3:]
