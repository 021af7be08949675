"""A core over a tiny model, for tests of steps that raise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quire.base.clock import FakeClock
from quire.base.masks import MaskPromise
from quire.base.messages import Request
from quire.base.plan import Plan, StepResult
from quire.base.requests.sampling_params import SamplingParams
from quire.base.requests.validation import RequestLimits
from quire.base.settings.config import config_from_flat
from quire.base.step_outputs import SequenceUpdate
from quire.engine.client.output import StepReader
from quire.engine.executors.executor import InProcessExecutor
from quire.engine.loop.core import EngineCore
from quire.engine.start.build import make_scheduler
from quire.models.checkpoint.source import resolve_model
from tests.support.engine.stages import StagesExecutor, build_stages, with_runner
from tests.support.engine.updates import read, reason_of, run_to_end
from tests.support.models.reference_checkpoints import reference_tokens

POISON = 96
VOCAB = 97
MAX_LEN = 64


class Troubled:
    """A runner that raises for some plans: before anything of them was carried out, or when all is
    done but the counters.

    raises: whether a plan fails; `holds_poison` is the one most used.
    """

    def __init__(self, runner: Any, when: str = "before") -> None:
        self.runner = runner
        self.when = when
        self.raises: Callable[[Plan], bool] = self.holds_poison
        self.row_error = -1  # in plans that `raises` names: report this row instead of raising
        self.num_raised = self.num_calls = 0
        self._tokens: dict[int, list[int]] = {}

    def run(self, plan: Plan, masks: MaskPromise | None = None) -> StepResult:
        for start in plan.started:
            self._tokens[start.row] = start.token_ids[: start.num_prompt_tokens].tolist()
        for fork in plan.forked:
            self._tokens[fork.child] = self._tokens[fork.parent]
        if not self.raises(plan):
            result: StepResult = self.runner.run(plan)
            return result
        self.num_raised += 1
        if self.row_error >= 0:
            return self.runner.run(plan).replace(row_errors={self.row_error: "bad row"})
        if self.when == "after":
            self._run_without_counters(plan)
        raise RuntimeError("made to fail")

    def _run_without_counters(self, plan: Plan) -> None:
        ops = self.runner.rows.ops
        ops.advance = lambda *_: None
        try:
            self.runner.run(plan)
        finally:
            del ops.advance

    def holds_poison(self, plan: Plan) -> bool:
        """Whether the plan computes the poison token of a prompt."""
        for row, start, count in zip(
            plan.rows.tolist(), plan.computed_bound, plan.num_tokens, strict=True
        ):
            if POISON in self._tokens[row][start : start + count]:
                return True
        return False


class Bench:
    """A core over a tiny llama, and what its requests have got so far. num_stages: that it is cut
    into; which one is troubled."""

    num_stages, troubled_stage = 1, 0

    def __init__(
        self,
        folder: Path,
        when: str = "before",
        check_device: Callable[[], None] | None = None,
        **settings: Any,
    ) -> None:
        defaults = {"dtype": "float64", "max_model_len": MAX_LEN, "attention_backend": "torch"}
        defaults["scheduling_policy"] = "fifo"  # a test knows who comes first
        config = config_from_flat(**({"model": str(folder), "block_size": 4} | defaults | settings))
        source = resolve_model(str(folder))
        stages = build_stages(config, source, self.num_stages)
        troubled = self.troubled_stage
        self.runner = Troubled(stages[troubled].runner, when)
        stages = with_runner(stages, troubled, self.runner)
        built = stages[-1]
        self.config = built.config
        scheduler = make_scheduler(built, source)
        scheduler.rows.num_stages = self.num_stages
        is_whole = self.num_stages == 1
        self.core = EngineCore(
            scheduler,
            InProcessExecutor(built, check_device) if is_whole else StagesExecutor(stages),
            FakeClock(),
            RequestLimits(VOCAB, MAX_LEN, 20, 1 << 20),
        )
        self.folder = folder
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.reader = StepReader()
        self.last: dict[str, SequenceUpdate] = {}
        self.history: dict[str, list[SequenceUpdate]] = {}

    def add(self, name: str, prompt: list[int], num_tokens: int = 6, **more: Any) -> None:
        params = SamplingParams(**({"temperature": 0, "max_tokens": num_tokens} | more))
        request = Request(name, prompt, params, seed=0)
        self.core.add(request)
        self.requests[name], self.tokens[name], self.history[name] = request, [], []

    def step(self) -> list[SequenceUpdate]:
        outputs = read(self.reader, self.core.step())
        for output in outputs:
            name = output.request_id
            assert name not in self.last or self.last[name].finish is None, "after the end"
            self.tokens[name] += output.token_ids
            self.last[name] = output
            self.history[name].append(output)
        self.core.scheduler.check_invariants()
        return outputs

    def finish(self) -> None:
        run_to_end(self.core, self.step)
        assert all(pool.num_used == 0 for pool in self.core.scheduler.memory.kv.pools), (
            "blocks leak"
        )

    def failed(self) -> set[str]:
        return {name for name, last in self.last.items() if reason_of(last) == "error"}

    def assert_exact(self, *names: str) -> None:
        for name in names:
            request = self.requests[name]
            wanted = reference_tokens(
                self.folder, request.prompt_token_ids, request.params.max_tokens or 0
            )
            assert self.tokens[name] == wanted, name
            assert reason_of(self.last[name]) == "length"


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, POISON, (length,), generator=generator).tolist()


def with_poison(tokens: list[int], at: int) -> list[int]:
    return [*tokens[:at], POISON, *tokens[at + 1 :]]
