"""A model that raises for one token id fails only the requests with that token.

The whole engine runs over a tiny model whose forward pass raises. Other requests must get exactly
the tokens of transformers. The engine must continue to serve, and no block may be lost. The last
tests run the bisection alone, on an executor that logs its plans.
"""

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base.masks import MaskPromise
from quire.base.plan import BlockWrites, Plan, RowDraft, RowStart, StepResult
from quire.base.requests.sampling_params import SamplingParams
from quire.engine.executors.executor import failed_step
from quire.engine.loop.recovery import bisect_step, combine, omit_rows, restrict
from tests.support.cases import pairwise, slow_but
from tests.support.engine.failing_core import POISON, VOCAB, Bench, prompt, with_poison
from tests.support.engine.updates import error_of
from tests.support.models.reference_checkpoints import (
    pool_bytes,
    reference_tokens,
    write_checkpoint,
)

GREEDY_TOKENS = 6


class PoisonedModel:
    """Raises if a token is among the input ids, before the first layer runs or after the last."""

    def __init__(self, model: Any, token_id: int, when: str = "before") -> None:
        self.model, self.token_id, self.when = model, token_id, when
        self.num_raised = 0
        self.logits = model.logits

    def __call__(self, input_ids_T: torch.Tensor, *rest: Any) -> torch.Tensor:
        raises = self.token_id in input_ids_T.tolist()
        hidden_TD: torch.Tensor | None = None
        if not raises or self.when == "after":
            hidden_TD = self.model(input_ids_T, *rest)
        if raises or hidden_TD is None:
            self.num_raised += 1
            raise RuntimeError(f"token {self.token_id} is too much")
        return hidden_TD


def poisoned_bench(
    folder: Path, token_id: int = POISON, when: str = "before", **settings: Any
) -> tuple[Bench, PoisonedModel]:
    bench = Bench(folder, **settings)
    bench.runner.raises = lambda plan: False
    model = PoisonedModel(bench.runner.runner.model, token_id, when)
    bench.runner.runner.model = model
    return bench, model


def finish_and_serve_again(bench: Bench, guilty: set[str]) -> None:
    """Run to the end and check that only the guilty requests failed. Then serve the others
    again."""
    bench.finish()
    assert bench.failed() == guilty
    for name in guilty:
        assert "is too much" in error_of(bench.last[name])
    innocent = bench.requests.keys() - guilty
    bench.assert_exact(*innocent)
    for name in innocent:
        bench.add(f"{name} again", bench.requests[name].prompt_token_ids, GREEDY_TOKENS)
    bench.finish()
    assert bench.failed() == guilty
    bench.assert_exact(*(f"{name} again" for name in innocent))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models by architecture that never sample the poison token."""
    found = {}
    for architecture in ("llama", "mistral"):
        folder = tmp_path_factory.mktemp(architecture)
        found[architecture] = write_checkpoint(folder, architecture, VOCAB)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        tensors["lm_head.weight"][POISON] = 0.0
        save_file(tensors, file, {"format": "pt"})
    return found


@pytest.fixture(scope="module")
def folder(folders: dict[str, Path]) -> Path:
    return folders["llama"]


@pytest.mark.parametrize("depth", [1, 2])
def test_single_guilty_request_fails(folder: Path, depth: int) -> None:
    bench, model = poisoned_bench(folder, pipeline_depth=depth)
    bench.add("guilty", with_poison(prompt(1, 9), 4))
    finish_and_serve_again(bench, {"guilty"})
    assert bench.tokens["guilty"] == []
    bench.add("innocent", prompt(2, 9))
    finish_and_serve_again(bench, {"guilty"})


@pytest.mark.parametrize(
    ("when", "caching", "depth", "guilty"),
    pairwise(
        ["before", "after"],
        [True, False],
        [1, pytest.param(2, marks=pytest.mark.slow), 3],
        [{0}, {2}, {4}, {1, 3}, {0, 1, 2, 3, 4}],
    ),
)
def test_guilty_requests_of_a_batch_fail_alone(
    folder: Path, guilty: set[int], depth: int, caching: bool, when: str
) -> None:
    bench, model = poisoned_bench(
        folder, when=when, pipeline_depth=depth, enable_prefix_caching=caching
    )
    for i in range(5):
        tokens = prompt(10 + i, 5 + 4 * i)
        bench.add(f"r{i}", with_poison(tokens, 3 + i) if i in guilty else tokens)
    finish_and_serve_again(bench, {f"r{i}" for i in guilty})
    assert model.num_raised <= 1 + len(guilty) * 4


@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_guilty_request_fails_alone_among_decoding_ones(folder: Path, depth: int) -> None:
    """The step after the failing one is in flight, and the other requests are already decoding."""
    bench, _ = poisoned_bench(folder, pipeline_depth=depth)
    for i in range(3):
        bench.add(f"r{i}", prompt(20 + i, 5 + i), 12)
    for _ in range(4):
        bench.step()
    bench.add("guilty", with_poison(prompt(25, 9), 8))
    bench.add("late", prompt(26, 9))
    bench.step()
    assert len(bench.core.scheduler.planner.in_flight) == depth - 1
    finish_and_serve_again(bench, {"guilty"})


@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("caching", [True, False])
def test_sampled_poison_token_fails_its_request(folder: Path, depth: int, caching: bool) -> None:
    """The model raises when the token becomes its input. The request keeps the tokens sampled
    before."""
    wanted = reference_tokens(folder, prompt(30, 7), 12)
    others = [prompt(31 + i, 6 + i) for i in range(3)]
    seen = {token for line in others for token in [*line, *reference_tokens(folder, line, 6)]}
    at, token_id = next(
        (i, t) for i, t in enumerate(wanted[:-1]) if i > 2 and t not in {*seen, *prompt(30, 7)}
    )
    at = wanted.index(token_id)
    bench, _ = poisoned_bench(folder, token_id, pipeline_depth=depth, enable_prefix_caching=caching)
    bench.add("guilty", prompt(30, 7), 12)
    for i, line in enumerate(others):
        bench.add(f"r{i}", line)
    finish_and_serve_again(bench, {"guilty"})
    assert bench.tokens["guilty"] == wanted[: at + 1]


@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_poison_in_a_later_prompt_chunk_fails_its_request(folder: Path, depth: int) -> None:
    """The failing row does not sample in that step."""
    bench, _ = poisoned_bench(folder, max_num_batched_tokens=10, pipeline_depth=depth)
    bench.add("before", prompt(40, 4))
    bench.add("guilty", with_poison(prompt(41, 40), 14))
    bench.add("after", prompt(42, 25))
    finish_and_serve_again(bench, {"guilty"})
    assert error_of(bench.last["guilty"]) and bench.tokens["guilty"] == []


@pytest.mark.parametrize(
    ("architecture", "when", "depth"),
    pairwise(
        ["llama", "mistral"],
        ["before", "after"],
        [1, pytest.param(2, marks=pytest.mark.slow), 3],
    ),
)
def test_requests_sharing_a_failed_prefix_are_recomputed(
    folders: dict[str, Path], depth: int, when: str, architecture: str
) -> None:
    """Other requests share blocks that the guilty one was to compute, or blocks computed on top of
    these."""
    bench, _ = poisoned_bench(folders[architecture], when=when, pipeline_depth=depth)
    shared, more = prompt(50, 8), prompt(51, 9)
    bench.add("guilty", [*shared, *with_poison(prompt(52, 6), 3)])
    bench.add("on top", [*shared, *more])
    bench.add("on top of that", [*shared, *more[:8], *prompt(53, 5)])
    bench.add("scored", [*shared, *prompt(54, 5)], prompt_logprobs=0, logprobs=0)
    bench.add("other", prompt(55, 9))
    if depth > 1:
        bench.step()
        bench.add("next step", [*shared, *more[:4], *prompt(56, 3)])
    finish_and_serve_again(bench, {"guilty"})
    preempted = {name for name, last in bench.last.items() if last.num_preemptions}
    assert {"on top", "on top of that"} <= preempted and "other" not in preempted
    assert sum(len(o.prompt_candidates or []) for o in bench.history["scored"]) == 12


def test_sharing_blocks_of_earlier_steps_does_not_preempt(folder: Path) -> None:
    bench, _ = poisoned_bench(folder)
    shared = prompt(60, 12)
    bench.add("first", [*shared, 1], 2)
    bench.finish()
    bench.add("guilty", [*shared, *with_poison(prompt(61, 6), 3)])
    bench.add("sharing", [*shared, *prompt(62, 6)])
    bench.finish()
    assert bench.failed() == {"guilty"}
    assert bench.last["sharing"].num_preemptions == 0
    assert bench.last["sharing"].num_cached_tokens == 12
    bench.assert_exact("first", "sharing")


@pytest.mark.parametrize("depth", slow_but((1, 2, 3), 3))
def test_guilty_requests_fail_alone_in_a_tight_pool(folder: Path, depth: int) -> None:
    """Rows are preempted and reused while steps fail."""
    memory = pool_bytes(folder, 18, 4)
    bench, _ = poisoned_bench(
        folder,
        pipeline_depth=depth,
        kv_cache_memory_bytes=memory,
        max_num_seqs=4,
        max_num_batched_tokens=16,
    )
    shared = prompt(70, 12)
    for i in range(12):
        tokens = [*shared[: 4 * (i % 4)], *prompt(71 + i, 5 + i)]
        bench.add(f"r{i}", with_poison(tokens, len(tokens) - 2) if i % 3 == 1 else tokens, 12)
    finish_and_serve_again(bench, {"r1", "r4", "r7", "r10"})


@pytest.mark.parametrize("depth", [1, 2])
def test_other_requests_get_all_requested_outputs(folder: Path, depth: int) -> None:
    """Sampled tokens, log-probabilities and penalties are the same as without the guilty
    request."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_p": 0.9},
        {"logprobs": 3, "temperature": 0.7},
        {"prompt_logprobs": 2},
        {"frequency_penalty": 1.0, "logit_bias": {5: 2.0}},
    ]
    histories = []
    for has_guilty in (False, True):
        bench, _ = poisoned_bench(folder, pipeline_depth=depth, max_num_batched_tokens=24)
        for i, kind in enumerate(kinds):
            if has_guilty and i == 2:
                bench.add("guilty", with_poison(prompt(80, 7), 3), logprobs=1, prompt_logprobs=1)
            bench.add(f"r{i}", prompt(81 + i, 6 + i), **kind)
        bench.finish()
        assert bench.failed() == ({"guilty"} if has_guilty else set())
        bench.history.pop("guilty", None)
        histories.append({name: gathered(outputs) for name, outputs in bench.history.items()})
    without, with_guilty = histories
    for name in without:
        for ours, theirs in zip(with_guilty[name], without[name], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9)


def gathered(outputs: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the tokens, and the log-probabilities of the output and of the prompt."""
    tokens = [t for o in outputs for t in o.token_ids]
    scored = [c.logprobs.tolist() for o in outputs for c in o.candidates or []]
    prompts = [c.logprobs.tolist() for o in outputs for c in o.prompt_candidates or []]
    return tokens, scored, prompts


@pytest.mark.parametrize("depth", [1, 2])
def test_row_that_fails_to_start_fails_alone(folder: Path, depth: int) -> None:
    """The step raises before the forward pass, so none of it was executed and its rows are still to
    be released."""
    bench, _ = poisoned_bench(folder, pipeline_depth=depth, max_num_seqs=3)
    sampler = bench.runner.runner.sampler
    start_row = sampler.start_row

    def fails_to_start(start: RowStart) -> None:
        start_row(start)
        if start.params.logprobs == 13:
            raise ValueError("is too much")

    sampler.start_row = fails_to_start
    for i in range(9):
        bench.add(f"r{i}", prompt(90 + i, 4 + i), **({"logprobs": 13} if i % 4 == 1 else {}))
    finish_and_serve_again(bench, {"r1", "r5"})


# ---- the bisection alone ---------------------------------------------------------------------


class LoggingExecutor:
    """Fails plans with a guilty row; logs the plans it gets."""

    def __init__(self, guilty: set[int]) -> None:
        self.guilty = guilty
        self.plans: list[Plan] = []

    def submit(self, plan: Plan, masks: MaskPromise | None = None) -> None:
        self.plans.append(plan)

    def next_result(self) -> StepResult:
        plan = self.plans[-1]
        if self.guilty & set(plan.rows.tolist()):
            return failed_step(plan, "guilty")
        token_ids = plan.sample_rows.reshape(-1, 1) * 10
        return StepResult(
            plan.step_id, token_ids, np.ones(len(token_ids), np.int32), duration_s=1.0
        )


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def make_plan(num_rows: int) -> Plan:
    """Return a plan with rows in descending order; even rows sample, row 2 starts."""
    rows = np.arange(num_rows, dtype=np.int32)[::-1]
    samples = rows[rows % 2 == 0]
    return Plan(
        step_id=7,
        rows=rows,
        num_tokens=rows + 1,
        computed_bound=rows + 100,
        sample_rows=samples,
        num_candidates=samples - 1,
        started=(RowStart(2, ints(1, 2, 3), 0, 3, SamplingParams(), 0),),
        released=ints(2, 50),
        block_writes=BlockWrites(ints(0, 1, 0), ints(2, 2, 4), ints(5, 6, 7), ints(8, 9, 10)),
    )


def test_restricted_plan_keeps_the_data_of_its_rows() -> None:
    plan = make_plan(6)
    part = restrict(plan, ints(4, 1, 0))
    assert part.rows.tolist() == [4, 1, 0]
    assert part.num_tokens.tolist() == [5, 2, 1]
    assert part.computed_bound.tolist() == [104, 101, 100]
    assert part.sample_rows.tolist() == [4, 0] and part.num_candidates.tolist() == [3, -1]
    assert part.started == () and part.released.tolist() == [2, 50]
    writes = part.block_writes
    columns = (writes.group, writes.row, writes.index, writes.block_id)
    assert [column.tolist() for column in columns] == [[0], [4], [7], [10]]
    assert omit_rows(plan, {5, 3, 2}).rows.tolist() == [4, 1, 0]
    assert omit_rows(plan, set()) is plan
    assert omit_rows(plan, {2, 4}).block_writes.row.tolist() == []


@pytest.mark.parametrize("guilty", [set(), {0}, {5}, {2, 3}, set(range(6))])
def test_bisected_results_keep_the_order_of_rows(guilty: set[int]) -> None:
    plan, executor = make_plan(6), LoggingExecutor(guilty)
    result = bisect_step(executor, plan)  # type: ignore[arg-type]
    assert result.row_errors == dict.fromkeys(guilty, "the step failed: guilty")
    wanted = [0 if row in guilty else row * 10 for row in plan.sample_rows.tolist()]
    assert result.token_ids[:, 0].tolist() == wanted
    assert result.num_accepted.tolist() == [1] * len(wanted)
    assert result.step_id == 7 and result.error is None
    done = [p for p in executor.plans if not executor.guilty & set(p.rows.tolist())]
    assert np.concatenate([ints(), *(p.rows for p in done)]).tolist() == [
        row for row in plan.rows.tolist() if row not in guilty
    ]
    assert result.duration_s == len(done)


def test_releases_go_with_each_part_until_one_succeeds() -> None:
    plan, executor = make_plan(8), LoggingExecutor({7, 6, 1})
    bisect_step(executor, plan)  # type: ignore[arg-type]
    released = [(p.rows.tolist(), len(p.released)) for p in executor.plans]
    assert released == [
        ([7, 6, 5, 4], 2),
        ([7, 6], 2),
        ([7], 2),
        ([6], 2),
        ([5, 4], 2),
        ([3, 2, 1, 0], 0),
        ([3, 2], 0),
        ([1, 0], 0),
        ([1], 0),
        ([0], 0),
    ]


def test_bisection_takes_logarithmically_many_runs() -> None:
    for guilty in (0, 100, 511):
        executor = LoggingExecutor({guilty})
        bisect_step(executor, make_plan(512))  # type: ignore[arg-type]
        assert len(executor.plans) == 2 * math.log2(512)


def test_repeated_steps_omit_draft_tokens() -> None:
    """A request fails only for its known tokens, never for a draft token."""
    plan, executor = make_plan(6), LoggingExecutor({3})
    drafts = RowDraft(4, ints(1, 2, 3)), RowDraft(0, ints(1))
    more = ints(0, 3, 0, 0, 0, 1)
    drafted = plan.replace(num_tokens=plan.num_tokens + more, drafts=drafts)
    result = bisect_step(executor, drafted)  # type: ignore[arg-type]
    assert set(result.row_errors) == {3} and result.num_accepted.tolist() == [1, 1, 1]
    num_tokens = dict(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True))
    for part in executor.plans:
        assert part.drafts == ()
        assert part.num_tokens.tolist() == [num_tokens[row] for row in part.rows.tolist()]


def test_combined_result_keeps_all_values_of_rows() -> None:
    """Each dictionary of a result is keyed by row."""
    plan = make_plan(4)
    names = [name for name, value in msgspec.structs.asdict(failed_step(plan, "")).items()
             if isinstance(value, dict)]  # fmt: skip
    assert {"candidates", "pooled", "token_values"} <= {*names}
    parts = []
    for row in (0, 2):
        part = restrict(plan, ints(row))
        values = {name: {row: f"{name} of {row}"} for name in names}
        result = StepResult(plan.step_id, ints(row).reshape(1, 1), ints(1))
        parts.append((part, msgspec.structs.replace(result, **values)))
    whole = combine(plan, parts)
    for name in names:
        assert getattr(whole, name) == {row: f"{name} of {row}" for row in (0, 2)}, name


def test_plan_with_no_executed_part_gives_an_empty_result() -> None:
    plan = make_plan(4)
    nothing = combine(plan, [])
    assert nothing.token_ids.tolist() == [[0], [0]] and nothing.row_errors == {}
    empty = restrict(plan, ints())
    assert bisect_step(LoggingExecutor(set()), empty).token_ids.shape == (0, 1)  # type: ignore[arg-type]
    assert empty.replace(released=ints()).num_scheduled_tokens == 0
