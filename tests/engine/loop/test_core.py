"""The core with a runner that fails: the guilty requests get an error, all others exact tokens.

A wrapper around the runner raises, or reports an error, for the plans that a test selects.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base.errors import EngineError, RequestError
from quire.base.messages import Abort
from quire.base.plan import Plan
from tests.support.cases import in_turn
from tests.support.engine.failing_core import MAX_LEN, POISON, VOCAB, Bench, prompt, with_poison
from tests.support.engine.updates import error_of
from tests.support.models.reference_checkpoints import checkpoint, write_checkpoint


@pytest.fixture(scope="module")
def folder() -> Path:
    return checkpoint("llama")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_raising_step_fails_only_the_guilty_request(folder: Path, depth: int, when: str) -> None:
    bench = Bench(folder, when, max_num_seqs=2, pipeline_depth=depth)
    bench.add("before", prompt(1, 9), 3)
    bench.add("poisoned", with_poison(prompt(2, 20), 11))
    for i in range(4):
        bench.add(f"later {i}", prompt(3 + i, 5 + 7 * i))
    bench.finish()
    assert bench.failed() == {"poisoned"}
    last = bench.last["poisoned"]
    assert error_of(last) == "the step failed: RuntimeError: made to fail"
    assert last.token_ids == []
    bench.assert_exact("before", *(f"later {i}" for i in range(4)))


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_of_a_failed_request_are_not_prefix_hits(folder: Path, depth: int) -> None:
    """Steps have 8 tokens, blocks 4: the step of tokens 8 to 15 fails because of token 14. The
    whole request is suspect, so even blocks of the previous step are dropped."""
    line = prompt(5, 24)
    bench = Bench(folder, "after", max_num_batched_tokens=8, pipeline_depth=depth)
    bench.add("poisoned", with_poison(line, 14))
    bench.finish()
    assert bench.failed() == {"poisoned"}
    bench.add("clean", line)
    bench.finish()
    assert bench.last["clean"].num_cached_tokens == 0
    bench.assert_exact("clean")


def test_plans_after_a_failed_plan_are_not_executed(folder: Path) -> None:
    """The failed plan would have given the row to another sequence. The row's block table still
    lists its former owner's blocks, which are cached and must not be overwritten."""
    bench = Bench(folder, max_num_seqs=1, pipeline_depth=2)
    long_prompt = prompt(6, 18)
    bench.add("long", long_prompt, 2)
    bench.finish()
    bench.add("short", prompt(7, 7), 2)  # leaves the row where the next token begins block 2
    bench.finish()
    bench.add("poisoned", with_poison(prompt(8, 5), 2))
    bench.finish()
    assert bench.failed() == {"poisoned"}
    bench.add("long again", long_prompt, 2)
    bench.finish()
    assert bench.last["long again"].num_cached_tokens == 16
    bench.assert_exact("long", "short", "long again")


def test_step_that_fails_once_fails_no_request(folder: Path) -> None:
    """The repeated step succeeds, as after a short lack of memory."""
    bench = Bench(folder, max_num_seqs=3, pipeline_depth=2)
    names = [f"r{i}" for i in range(5)]
    for i, name in enumerate(names):
        bench.add(name, prompt(10 + i, 4 + 5 * i))
    bench.runner.raises = lambda plan: (
        plan.step_id % 3 == 0 and bench.runner.num_raised * 3 < (plan.step_id + 1)
    )
    bench.finish()
    assert bench.runner.num_raised > 2
    assert bench.failed() == set()
    bench.assert_exact(*names)


def run_until_in_flight(bench: Bench, step_id: int) -> None:
    flights = bench.core.scheduler.planner.in_flight
    while len(flights) == 0 or flights[-1].plan.step_id < step_id:
        bench.step()


def test_new_owner_of_a_failed_row_does_not_fail(folder: Path) -> None:
    """An aborted sequence had the row in the failing step. Only the other sequence of that step
    fails."""
    bench = Bench(folder, max_num_seqs=2, pipeline_depth=2)
    for i, name in enumerate(("aborted", "beside", "waits")):
        bench.add(name, prompt(10 + i, 6), 8)
    bench.runner.raises = lambda plan: plan.step_id == 3
    run_until_in_flight(bench, 3)
    assert bench.runner.num_raised == 1
    bench.core.control(Abort("aborted"))
    bench.finish()
    assert bench.failed() == {"beside"}
    bench.assert_exact("waits")


def test_failed_step_of_aborted_requests_fails_no_request(folder: Path) -> None:
    bench = Bench(folder, max_num_seqs=1, pipeline_depth=2)
    bench.add("aborted", prompt(10, 6), 8)
    bench.add("waits", prompt(11, 6), 8)
    bench.runner.raises = lambda plan: plan.step_id == 3
    run_until_in_flight(bench, 3)
    bench.core.control(Abort("aborted"))
    bench.finish()
    assert bench.failed() == set()
    bench.assert_exact("waits")


def test_repeated_step_failures_fail_only_guilty_requests(folder: Path) -> None:
    bench = Bench(folder, max_num_seqs=3, pipeline_depth=2)
    for i in range(9):
        tokens = prompt(20 + i, 5 + i)
        bench.add(f"r{i}", with_poison(tokens, 3) if i % 3 == 1 else tokens)
    bench.finish()
    assert bench.failed() == {"r1", "r4", "r7"}
    bench.assert_exact(*(bench.requests.keys() - bench.failed()))


def test_rows_that_a_failed_plan_should_release_are_released_later(folder: Path) -> None:
    """The plan with the releases never ran, not even in parts, so the next one must release the
    rows."""
    bench = Bench(folder, max_num_seqs=2)
    for i in range(2):
        bench.add(f"scored {i}", prompt(30 + i, 6), prompt_logprobs=0)
    bench.step()
    for i in range(2):
        bench.core.control(Abort(f"scored {i}"))
    bench.runner.raises = lambda plan: len(plan.released) > 0
    bench.add("fails", prompt(32, 6))
    bench.step()
    assert bench.failed() == {"fails"}
    bench.runner.raises = lambda plan: False
    for i in range(2):
        bench.add(f"plain {i}", prompt(33 + i, 6))
    assert all(output.prompt_candidates is None for output in bench.step())
    bench.finish()
    bench.assert_exact("plain 0", "plain 1")


# ---- the core cannot continue --------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_lost_device_stops_the_core(folder: Path, depth: int) -> None:
    """A step raises and the device no longer responds, so the step is not repeated."""

    def check_device() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    bench = Bench(folder, pipeline_depth=depth, check_device=check_device)
    bench.add("poisoned", with_poison(prompt(2, 20), 11))
    with pytest.raises(EngineError, match="made to fail.*illegal memory access"):
        bench.core.step()
    assert bench.runner.num_raised == 1
    with pytest.raises(EngineError, match="the engine has stopped"):
        bench.core.step()


def test_failing_executor_stops_the_core(folder: Path) -> None:
    bench = Bench(folder)
    bench.add("a", prompt(1, 9))
    bench.core.executor.close()
    for _ in range(2):
        with pytest.raises(EngineError, match="the executor is closed"):
            bench.core.step()


def test_step_error_is_logged_once_per_failed_request(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The traceback is logged once, at debug level."""
    bench = Bench(folder)
    for i in range(4):
        bench.add(f"r{i}", with_poison(prompt(i, 5), 2) if i % 2 else prompt(i, 5))
    with caplog.at_level("DEBUG", "quire"):
        bench.finish()
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors == [
        f"request r{i} failed: the step failed: RuntimeError: made to fail" for i in (1, 3)
    ]
    assert len([record for record in caplog.records if record.exc_info]) == 1


# ---- one row fails -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in which the poison token's embedding is NaN, and so are all keys, values and
    logits computed from it. The model never samples the poison token."""
    folder = write_checkpoint(tmp_path_factory.mktemp("nan"), "llama", VOCAB)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    tensors["lm_head.weight"][POISON] = 0.0
    save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize(("backend", "depth"), in_turn(["torch", "reference"], [1, 2, 3]))
def test_row_with_nan_logits_fails_alone(nan_folder: Path, depth: int, backend: str) -> None:
    """Requests that share its step, take over its row, or reuse its blocks continue."""
    bench = Bench(
        nan_folder,
        max_num_seqs=3,
        pipeline_depth=depth,
        attention_backend=backend,
        enable_prefix_caching=False,
    )
    bench.runner.raises = lambda plan: False
    names = [f"r{i}" for i in range(9)]
    for i, name in enumerate(names):
        tokens = prompt(40 + i, 4 + 3 * i)
        bench.add(name, with_poison(tokens, 2) if i in (1, 5) else tokens)
    bench.finish()
    assert bench.failed() == {"r1", "r5"}
    for name in bench.failed():
        assert "not finite" in error_of(bench.last[name])
        assert bench.tokens[name] == []
    bench.assert_exact(*(set(names) - bench.failed()))


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_of_a_failed_row_are_not_prefix_hits(folder: Path, depth: int) -> None:
    line = prompt(50, 17)
    bench = Bench(folder, pipeline_depth=depth)
    bench.runner.raises, bench.runner.row_error = (lambda plan: plan.step_id == 0), 0
    bench.add("failed", line)
    bench.add("beside", prompt(51, 17))
    bench.finish()
    assert bench.failed() == {"failed"} and error_of(bench.last["failed"]) == "bad row"
    bench.add("again", line)
    bench.add("beside again", prompt(51, 17))
    bench.finish()
    assert bench.last["again"].num_cached_tokens == 0
    assert bench.last["beside again"].num_cached_tokens == 16
    bench.assert_exact("beside", "again", "beside again")


def test_preempted_row_whose_step_fails_ends_with_the_error(folder: Path) -> None:
    """Its token was in flight when it was preempted."""
    pool = 18 * 2 * 2 * 2 * 8 * 8 * 4  # blocks, K and V, layers, heads, head dim, bytes, tokens
    bench = Bench(folder, pipeline_depth=2, max_num_seqs=2, kv_cache_memory_bytes=pool)
    scheduler = bench.core.scheduler
    assert scheduler.memory.kv.pools[0].num_blocks == 18
    bench.add("first", prompt(60, 31), 20)
    bench.add("second", prompt(61, 31), 20)

    def is_last_before_preemption(plan: Plan) -> bool:
        """Select the second row's last plan: the plan after it needs a block when none is free."""
        num_held_blocks = sum(len(s.blocks.tables[0].blocks) for s in scheduler.rows.sequences())
        return num_held_blocks == 18 and int(plan.computed_bound[0]) % 4 == 3

    bench.runner.raises, bench.runner.row_error = is_last_before_preemption, 1
    while not bench.failed():
        bench.step()
    assert bench.runner.num_raised == 1 and bench.failed() == {"second"}
    assert bench.last["second"].num_preemptions == 1
    bench.finish()
    bench.assert_exact("first")


def test_invalid_requests_are_rejected_before_queueing(folder: Path) -> None:
    bench = Bench(folder)
    for tokens in ([], [VOCAB], [-1], [1] * MAX_LEN):
        with pytest.raises(RequestError):
            bench.add("wrong", tokens)
    bench.add("twice", [1])
    with pytest.raises(RequestError, match="in use"):
        bench.add("twice", [1])
    bench.finish()
    assert set(bench.last) == {"twice"}
