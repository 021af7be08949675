"""The stages of a tiny model in one process, and a bench whose core drives them.

The first stages run a plan as soon as it arrives, so they are ahead by up to the depth. The last
stage runs it when its result is requested.
"""

import dataclasses
from collections import deque
from typing import Any

import torch

from quire.base.masks import MaskPromise
from quire.base.plan import Plan, StepResult
from quire.base.settings.config import EngineConfig
from quire.engine.executors.executor import failed_step
from quire.models.checkpoint.rank_place import RankPlace
from quire.models.checkpoint.source import ModelSource
from quire.runner.build import build_runner
from quire.runner.setup.built import BuiltRunner
from quire.runner.stage import StageLinks
from tests.support.scheduler.fake_device import QueueExecutor


class QueueLink:
    """Rows that wait for the next stage."""

    def __init__(self) -> None:
        self.waiting: deque[torch.Tensor | None] = deque()

    def send(self, rows_TE: torch.Tensor | None) -> None:
        self.waiting.append(None if rows_TE is None else rows_TE.clone())

    def receive(self) -> torch.Tensor | None:
        return self.waiting.popleft()


def build_stages(config: EngineConfig, source: ModelSource, num: int) -> list[BuiltRunner]:
    links = [QueueLink() for _ in range(num - 1)]
    return [
        build_runner(
            config,
            source,
            shard=RankPlace(stage=stage, num_stages=num),
            links=StageLinks(
                links[stage - 1] if stage > 0 else None, links[stage] if stage < num - 1 else None
            ),
        )
        for stage in range(num)
    ]


class StagesExecutor(QueueExecutor):
    """Carries out plans by all stages."""

    def __init__(self, stages: list[BuiltRunner]) -> None:
        super().__init__()
        self.stages = stages
        self._has_failed = [False] * len(stages)

    def submit(self, plan: Plan, masks: MaskPromise | None = None) -> None:
        if not self._queue:
            self._has_failed = [False] * len(self.stages)
        errors: list[str] = []
        self._queue.append((plan, masks, errors))
        for number in range(len(self.stages) - 1):
            self._run(number, plan, None, errors)

    def next_result(self) -> StepResult:
        plan, masks, errors = self._queue.popleft()
        result = self._run(len(self.stages) - 1, plan, masks, errors)
        return failed_step(plan, errors[0]) if errors or result is None else result

    def _run(
        self, number: int, plan: Plan, masks: MaskPromise | None, errors: list[str]
    ) -> StepResult | None:
        stage = self.stages[number]
        if self._has_failed[number]:
            stage.skip(plan)
            errors.append("a step before it failed")
            return None
        try:
            return stage.run(plan, masks)
        except Exception as error:
            self._has_failed[number] = True
            errors.append(f"{type(error).__name__}: {error}")
            return None


def with_runner(stages: list[BuiltRunner], number: int, runner: Any) -> list[BuiltRunner]:
    """Put another runner in the place of a stage's."""
    changed = dataclasses.replace(stages[number], runner=runner)
    return [changed if i == number else stage for i, stage in enumerate(stages)]
