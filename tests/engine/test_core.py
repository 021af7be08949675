"""The core with a runner that fails: who ends with an error, and that all others are exact.

The runner is wrapped by one that raises, or reports an error, for the plans that a test names.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base.clock import FakeClock
from quire.base.config import config_from_flat
from quire.base.errors import RequestError
from quire.base.messages import Abort, Request, SequenceOutput
from quire.base.plan import Plan, StepResult
from quire.base.sampling_params import SamplingParams
from quire.base.validation import RequestLimits
from quire.engine.build import make_scheduler
from quire.engine.core import EngineCore
from quire.engine.executor import InProcessExecutor
from quire.models.source import resolve_model
from quire.runner.build import build_runner
from tests.serve.checkpoints import checkpoint, reference_tokens, write_checkpoint

POISON = 96
VOCAB = 97
MAX_LEN = 64
Runs = Callable[[Plan], StepResult]


class Troubled:
    """A runner that raises for some plans, before anything of them was carried out or after it.

    raises: whether a plan fails; `holds_poison` is the one most used.
    """

    def __init__(self, runner: Any, when: str = "before") -> None:
        self.runner = runner
        self.when = when
        self.raises: Callable[[Plan], bool] = self.holds_poison
        self.row_error = -1  # in plans that `raises` names: report this row instead of raising
        self.num_raised = 0
        self._tokens: dict[int, list[int]] = {}

    def run(self, plan: Plan) -> StepResult:
        for start in plan.started:
            self._tokens[start.row] = start.token_ids.tolist()
        if not self.raises(plan):
            result: StepResult = self.runner.run(plan)
            return result
        self.num_raised += 1
        if self.row_error >= 0:
            return dataclasses.replace(
                self.runner.run(plan), row_errors={self.row_error: "bad row"}
            )
        if self.when == "after":
            self.runner.run(plan)
        raise RuntimeError("made to fail")

    def holds_poison(self, plan: Plan) -> bool:
        """Whether the plan computes the poison token of a prompt."""
        for row, start, count in zip(
            plan.rows.tolist(), plan.computed_bound, plan.num_tokens, strict=True
        ):
            if POISON in self._tokens[row][start : start + count]:
                return True
        return False


class Bench:
    """A core over a tiny llama, and what its requests have got so far."""

    def __init__(self, folder: Path, when: str = "before", **settings: Any) -> None:
        defaults = {"dtype": "float64", "max_model_len": MAX_LEN, "attention_backend": "torch"}
        config = config_from_flat(**({"model": str(folder), "block_size": 4} | defaults | settings))
        built = build_runner(config, resolve_model(str(folder)))
        self.runner = Troubled(built.runner, when)
        built = dataclasses.replace(built, runner=self.runner)  # type: ignore[arg-type]
        self.core = EngineCore(
            make_scheduler(built, "tiny"),
            InProcessExecutor(built),
            FakeClock(),
            RequestLimits(VOCAB, MAX_LEN, 20),
        )
        self.folder = folder
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, SequenceOutput] = {}

    def add(self, name: str, prompt: list[int], num_tokens: int = 6, **more: Any) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, **more)
        request = Request(name, prompt, params, seed=0)
        self.core.add(request)
        self.requests[name], self.tokens[name] = request, []

    def step(self) -> list[SequenceOutput]:
        outputs = self.core.step()
        for output in outputs:
            name = output.request_id
            assert name not in self.last or self.last[name].finish_reason is None, "after the end"
            self.tokens[name] += output.token_ids
            self.last[name] = output
        self.core.scheduler.check_invariants()
        return outputs

    def finish(self) -> None:
        for _ in range(500):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, "a request starves"
        assert all(pool.num_used == 0 for pool in self.core.scheduler.kv.pools), "blocks leak"

    def failed(self) -> set[str]:
        return {name for name, last in self.last.items() if last.finish_reason == "error"}

    def assert_exact(self, *names: str) -> None:
        for name in names:
            request = self.requests[name]
            wanted = reference_tokens(
                self.folder, request.prompt_token_ids, request.params.max_tokens or 0
            )
            assert self.tokens[name] == wanted, name
            assert self.last[name].finish_reason == "length"


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, POISON, (length,), generator=generator).tolist()


def with_poison(tokens: list[int], at: int) -> list[int]:
    return [*tokens[:at], POISON, *tokens[at + 1 :]]


@pytest.fixture(scope="module")
def folder() -> Path:
    return checkpoint("llama")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_step_that_raises_fails_its_requests_only(folder: Path, depth: int, when: str) -> None:
    bench = Bench(folder, when, max_num_seqs=2, pipeline_depth=depth)
    bench.add("before", prompt(1, 9), 3)
    bench.add("poisoned", with_poison(prompt(2, 20), 11))
    for i in range(4):
        bench.add(f"later {i}", prompt(3 + i, 5 + 7 * i))
    bench.finish()
    assert bench.runner.num_raised == 1
    assert bench.failed() == {"before", "poisoned"}
    for name in bench.failed():
        last = bench.last[name]
        assert last.error == "the step failed: RuntimeError: made to fail"
        assert last.token_ids == []
    bench.assert_exact(*(f"later {i}" for i in range(4)))


@pytest.mark.parametrize("depth", [1, 2])
def test_those_that_run_beside_the_failed_step_go_on(folder: Path, depth: int) -> None:
    """The budget of a step is used up by two rows; the third, which waited, is not touched."""
    bench = Bench(folder, max_num_batched_tokens=12, pipeline_depth=depth)
    bench.add("a", prompt(1, 9), 2)
    bench.add("b", prompt(2, 30), 2)
    bench.add("poisoned", with_poison(prompt(3, 30), 29), 2)
    bench.add("c", prompt(4, 30), 2)
    bench.finish()
    assert "poisoned" in bench.failed() and "a" not in bench.failed()
    bench.assert_exact(*(bench.requests.keys() - bench.failed()))
    assert bench.runner.num_raised == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_of_a_failed_step_are_no_prefix_hits(folder: Path, depth: int) -> None:
    """Steps of 8 tokens, blocks of 4: the step of tokens 8 to 15 fails because of token 14. The
    blocks of the step before it can be used again, that of tokens 8 to 11 cannot."""
    line = prompt(5, 24)
    bench = Bench(folder, "after", max_num_batched_tokens=8, pipeline_depth=depth)
    bench.add("poisoned", with_poison(line, 14))
    bench.finish()
    assert bench.failed() == {"poisoned"}
    bench.add("clean", line)
    bench.finish()
    assert bench.last["clean"].num_cached_tokens == 8
    bench.assert_exact("clean")


def test_plans_built_on_a_failed_one_are_not_carried_out(folder: Path) -> None:
    """The failed plan would have given the row to another sequence. Until then the row's block
    table is that of its former owners, whose blocks are still hits and must not be written."""
    bench = Bench(folder, max_num_seqs=1, pipeline_depth=2)
    kept = prompt(6, 18)
    bench.add("long", kept, 2)
    bench.finish()
    bench.add("short", prompt(7, 7), 2)  # leaves the row where the next token begins block 2
    bench.finish()
    bench.add("poisoned", with_poison(prompt(8, 5), 2))
    bench.finish()
    assert bench.failed() == {"poisoned"}
    bench.add("long again", kept, 2)
    bench.finish()
    assert bench.last["long again"].num_cached_tokens == 16
    bench.assert_exact("long", "short", "long again")


def test_a_sequence_that_took_over_a_row_does_not_fail(folder: Path) -> None:
    """Its row was another one's in the step that fails; only the one beside it was in that step."""
    bench = Bench(folder, max_num_seqs=2, pipeline_depth=2)
    for i, name in enumerate(("aborted", "beside", "waits")):
        bench.add(name, prompt(10 + i, 6), 8)
    bench.runner.raises = lambda plan: plan.step_id == 3
    while (
        len(bench.core.scheduler.flights) == 0 or bench.core.scheduler.flights[-1].plan.step_id < 3
    ):
        bench.step()
    assert bench.runner.num_raised == 1
    bench.core.control(Abort("aborted"))
    bench.finish()
    assert bench.failed() == {"beside"}
    bench.assert_exact("waits")


def test_a_failed_step_of_aborted_requests_fails_nobody(folder: Path) -> None:
    bench = Bench(folder, max_num_seqs=1, pipeline_depth=2)
    bench.add("aborted", prompt(10, 6), 8)
    bench.add("waits", prompt(11, 6), 8)
    bench.runner.raises = lambda plan: plan.step_id == 3
    while (
        len(bench.core.scheduler.flights) == 0 or bench.core.scheduler.flights[-1].plan.step_id < 3
    ):
        bench.step()
    bench.core.control(Abort("aborted"))
    bench.finish()
    assert bench.failed() == set()
    bench.assert_exact("waits")


def test_steps_that_fail_again_and_again(folder: Path) -> None:
    """A request that fails on every second step takes down those beside it, never the engine."""
    bench = Bench(folder, max_num_seqs=3, pipeline_depth=2)
    for i in range(9):
        tokens = prompt(20 + i, 5 + i)
        bench.add(f"r{i}", with_poison(tokens, 3) if i % 3 == 1 else tokens)
    bench.finish()
    assert {"r1", "r4", "r7"} <= bench.failed()
    bench.assert_exact(*(bench.requests.keys() - bench.failed()))


def test_rows_of_a_failed_plan_are_released_again(folder: Path) -> None:
    """The plan that would have released them never ran; the next one must."""
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


# ---- one row fails -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The poison's embedding is NaN, and so is all that is computed from it, its keys and values
    included. Nothing makes the model write it."""
    folder = write_checkpoint(tmp_path_factory.mktemp("nan"), "llama", VOCAB)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    tensors["lm_head.weight"][POISON] = 0.0
    save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_row_of_nan_logits_fails_alone(nan_folder: Path, depth: int, backend: str) -> None:
    """Also those go on that share its step, take over its row, or write where it wrote."""
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
        assert "not finite" in (bench.last[name].error or "")
        assert bench.tokens[name] == []
    bench.assert_exact(*(set(names) - bench.failed()))


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_of_a_failed_row_are_no_prefix_hits(folder: Path, depth: int) -> None:
    line = prompt(50, 17)
    bench = Bench(folder, pipeline_depth=depth)
    bench.runner.raises, bench.runner.row_error = (lambda plan: plan.step_id == 0), 0
    bench.add("failed", line)
    bench.add("beside", prompt(51, 17))
    bench.finish()
    assert bench.failed() == {"failed"} and bench.last["failed"].error == "bad row"
    bench.add("again", line)
    bench.add("beside again", prompt(51, 17))
    bench.finish()
    assert bench.last["again"].num_cached_tokens == 0
    assert bench.last["beside again"].num_cached_tokens == 16
    bench.assert_exact("beside", "again", "beside again")


def test_a_row_that_fails_after_it_was_preempted(folder: Path) -> None:
    """Its token was on the way when it lost its row; there is none, so it ends with the error."""
    pool = 18 * 2 * 2 * 2 * 8 * 8 * 4  # blocks, K and V, layers, heads, head dim, bytes, tokens
    bench = Bench(folder, pipeline_depth=2, max_num_seqs=2, kv_cache_memory_bytes=pool)
    scheduler = bench.core.scheduler
    assert scheduler.kv.pools[0].num_blocks == 18
    bench.add("first", prompt(60, 31), 20)
    bench.add("second", prompt(61, 31), 20)

    def loses_its_row(plan: Plan) -> bool:
        """The second row's last plan: the one that follows it needs a block that is not there."""
        held = sum(len(s.blocks.tables[0].blocks) for s in scheduler.running())
        return held == 18 and int(plan.computed_bound[0]) % 4 == 3

    bench.runner.raises, bench.runner.row_error = loses_its_row, 1
    while not bench.failed():
        bench.step()
    assert bench.runner.num_raised == 1 and bench.failed() == {"second"}
    assert bench.last["second"].num_preemptions == 1
    bench.finish()
    bench.assert_exact("first")


def test_requests_are_checked_before_they_are_queued(folder: Path) -> None:
    bench = Bench(folder)
    for tokens in ([], [VOCAB], [-1], [1] * MAX_LEN):
        with pytest.raises(RequestError):
            bench.add("wrong", tokens)
    bench.add("twice", [1])
    with pytest.raises(RequestError, match="in use"):
        bench.add("twice", [1])
    bench.finish()
    assert set(bench.last) == {"twice"}
