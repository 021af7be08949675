"""The end of requests, and the outputs that come with their tokens."""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.virtual.dry_run import dry_run
from quire.base.events import Finished
from quire.base.plan import Candidates, RowDraft, StepResult
from quire.base.settings.config import SchedulerConfig
from quire.base.step_outputs import StepOutputs
from quire.scheduler.core.plans import PlanBuilder
from quire.scheduler.core.sequence import NUM_STOP_IDS, Sequence, State
from quire.scheduler.decisions import OutputsBuilder
from quire.scheduler.extra_outputs import take_extras
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.tainted import Tainted
from tests.support.scheduler.events import listen
from tests.support.scheduler.fake_device import make_request

MANY = tuple(range(20, 20 + NUM_STOP_IDS + 4))


def scheduler_of(caching: bool = True) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, pipeline_depth=1)
    return dry_run(40, 4, config, 100, enable_prefix_caching=caching)[0]


def step(scheduler: Scheduler, token: int, **more: object) -> StepOutputs:
    """Run a step in which each row samples this token."""
    plan = scheduler.schedule(0.0).plan
    assert plan is not None
    num = len(plan.sample_rows)
    tokens = np.full((num, 1), token, np.int32)
    result = StepResult(plan.step_id, tokens, np.ones(num, np.int32), **more)  # type: ignore[arg-type]
    return scheduler.update(result, 0.0).outputs


def ending_of(
    stops: tuple[int, ...], tokens: list[int], **params: object
) -> tuple[str, int | None]:
    """Return how a request with these tokens ends. Assert that it ends with the last one."""
    scheduler = scheduler_of()
    events = listen(scheduler)
    request = make_request("r", [1, 2, 3], stops=stops, **({"max_tokens": 9} | params))
    request = msgspec.structs.replace(request, eos_token_ids=stops[:1])
    scheduler.add(request, 0.0)
    for token in tokens[:-1]:
        assert not step(scheduler, token).finished, token
    [(_, ending)] = step(scheduler, tokens[-1]).finished
    scheduler.check_invariants()
    [finished] = [event for event in events if isinstance(event, Finished)]
    assert (finished.reason, finished.num_output_tokens) == (ending.reason, len(tokens))
    assert ending.stop_reason is None or isinstance(ending.stop_reason, int)
    return ending.reason, ending.stop_reason


@pytest.mark.parametrize("stops", [(7, 8, 9), (*MANY, 7, 8, 9)])
def test_a_request_ends_at_a_stop_token_or_at_its_length_limit(stops: tuple[int, ...]) -> None:
    """Few stop tokens are compared in arrays, many one by one."""
    eos, named = stops[0], stops[-1]
    assert ending_of(stops, [1, 2, eos]) == ("stop", None)
    assert ending_of(stops, [1, 2, 3, named]) == ("stop", named)
    assert ending_of(stops, [1, 2, 3, 4], max_tokens=4) == ("length", None)
    assert ending_of(stops, [named, eos, named], min_tokens=3) == ("stop", named)
    assert ending_of(stops, [1, named], max_tokens=2) == ("stop", named)


def test_a_long_stop_list_applies_only_to_its_own_request() -> None:
    scheduler = scheduler_of()
    for name, stops in (("many", MANY), ("few", (7,)), ("more", tuple(n + 40 for n in MANY))):
        scheduler.add(make_request(name, [1, 2, 3], stops=stops, max_tokens=9), 0.0)
    assert not step(scheduler, 5).finished
    assert len(step(scheduler, MANY[-1]).finished) == 1
    assert set(scheduler.lifecycle.sequences) == {"few", "more"}
    assert len(step(scheduler, MANY[-1] + 40).finished) == 1
    assert (set(scheduler.lifecycle.sequences), len(scheduler.lifecycle.long_stop_lists)) == (
        {"few"},
        0,
    )


def test_logprobs_of_a_prompt_are_returned_once() -> None:
    """This includes positions that are computed a second time."""
    scheduler = scheduler_of(caching=False)
    scheduler.add(make_request("r", list(range(40)), max_tokens=2, prompt_logprobs=0), 0.0)
    every = [Candidates(np.array([i]), np.array([0.0]), 1) for i in range(40)]
    sequence, returned, num = scheduler.lifecycle.sequences["r"], list[Candidates](), 0
    while len(returned) < 40:
        plan = scheduler.schedule(0.0).plan
        assert plan is not None
        start, end = int(plan.computed_bound[0]), int(plan.computed_bound[0] + plan.num_tokens[0])
        num += end - start
        size = len(plan.sample_rows)
        result = StepResult(
            plan.step_id,
            np.full((size, 1), 5, np.int32),
            np.ones(size, np.int32),
            prompt_candidates={int(plan.rows[0]): every[start:end]},
        )
        [update] = scheduler.update(result, 0.0).outputs.details
        assert update.prompt_candidates is not None
        returned += update.prompt_candidates
        if end == 32 and num == 32:
            scheduler.lifecycle.preempt(sequence, "other", 0.0)
    assert returned == every
    assert num == 40 + 32, "nothing was computed a second time"


def test_cached_tokens_are_counted_only_at_the_first_admission() -> None:
    """A preempted sequence resumes on its own blocks, and this is not a prefix hit."""
    scheduler = scheduler_of()
    scheduler.add(make_request("r", list(range(20)), max_tokens=9), 0.0)
    step(scheduler, 5)
    sequence = scheduler.lifecycle.sequences["r"]
    assert sequence.num_cached_tokens == 0
    scheduler.preemption.preempt(sequence, "other", PlanBuilder(99), 0.0)
    plan = scheduler.schedule(0.0).plan
    assert plan is not None and plan.started[0].num_computed_tokens == 20, "it found its own blocks"
    assert sequence.num_cached_tokens == 0


def test_a_prefix_hit_is_reported_with_the_first_result() -> None:
    scheduler = scheduler_of()
    for name in ("first", "second"):
        scheduler.add(make_request(name, list(range(20)), max_tokens=1), 0.0)
        found = [update.prefix for update, _ in step(scheduler, 5).finished]
    [report] = found
    assert report is not None and report.num_tokens == 16


def test_logprobs_are_returned_for_samples_and_not_for_beams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A beam search only chooses from them, and returns its own at its end."""
    scheduler = scheduler_of()
    scheduler.add(make_request("plain", [1, 2, 3], max_tokens=5, logprobs=1), 0.0)
    scheduler.add(make_request("search", [4, 5, 6], max_tokens=5, use_beam_search=True, n=2), 0.0)
    plan = scheduler.schedule(0.0).plan
    assert plan is not None
    rows = [scheduler.lifecycle.sequences[name].row for name in ("plain", "search")]
    found = Candidates(np.array([7, 8, 9, 10, 11]), np.array([-0.5, -1.5, -2.0, -3.0, -4.0]), 1)
    returned = dict[str, list[Candidates]]()

    def record(_: OutputsBuilder, sequence: Sequence, candidates: list[Candidates]) -> None:
        returned[sequence.request.request_id] = candidates

    monkeypatch.setattr(OutputsBuilder, "set_candidates", record)
    num = len(plan.sample_rows)
    scheduler.update(
        StepResult(
            plan.step_id, np.full((num, 1), 7, np.int32), np.ones(num, np.int32),
            candidates=dict.fromkeys(rows, found),
        ),
        0.0,
    )  # fmt: skip
    assert returned == {"plain": [found]}


def test_a_swapped_dependant_of_a_failed_row_is_recomputed() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("r", [1, 2, 3]), 0.0)
    sequence = scheduler.lifecycle.sequences["r"]
    sequence.state = State.SWAPPED
    tainted = Tainted(blocks=[], host=[], failed={}, dependants={(0, 0): sequence})
    scheduler._results._failures._send_back(tainted, [], 0.0)
    assert sequence.state is State.WAITING


def test_drafts_and_pooled_values_are_not_returned_for_omitted_rows() -> None:
    """Sequences that have ended get none either."""
    states = {3: State.RUNNING, 4: State.RUNNING, 5: State.ENDED}
    sequences = [
        SimpleNamespace(state=state, update=SimpleNamespace()) for state in states.values()
    ]
    plan = SimpleNamespace(
        sample_rows=np.array([*states]),
        drafts=[RowDraft(row, np.array([1, 2], np.int32)) for row in states],
    )
    step: Any = SimpleNamespace(
        plan=plan, sampling=dict(zip(states, sequences, strict=True)), omitted={4}
    )
    outputs: Any = SimpleNamespace(update_of=lambda sequence: sequence.update)
    result: Any = SimpleNamespace(
        pooled=dict.fromkeys(states, "numbers"),
        prompt_candidates={},
        token_values={},
        num_accepted=np.ones(3, np.int32),
        token_ids=np.zeros((3, 1), np.int32),
    )
    assert scheduler_of().drafts.accepted(step, result, outputs) == {}
    take_extras(step, result, outputs)
    returned = [vars(sequence.update) for sequence in sequences]
    assert returned == [{"num_draft_tokens": 2, "pooled": "numbers"}, {}, {}]


def test_a_sampled_token_precedes_the_accepted_drafts_of_its_sequence() -> None:
    builder = OutputsBuilder()
    sequence: Any = SimpleNamespace(
        request=SimpleNamespace(request_id="r"), index=0, arrival=7, row=3,
        num_cached_tokens=0, num_preemptions=0,
    )  # fmt: skip
    builder.update_of(sequence).token_ids += [6, 8]
    builder.set_tokens(np.array([1, 3]), np.array([5, 7]), np.array([4, 9], np.int32))
    outputs = builder.build()
    assert (outputs.rows.tolist(), outputs.token_ids.tolist()) == ([1], [4])
    assert [update.token_ids for update in outputs.details] == [[9, 6, 8]]
