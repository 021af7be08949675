"""Engines of the benchmark of draft tokens, and one timed run of requests.

Before each timed run, each prompt is computed once. So the time is that of the answers, and of a
prompt's last block.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.models.drafts.workloads import DraftRequest
from quire.base.events import Event, Stepped
from quire.base.settings.config import config_from_flat
from quire.engine.start.build import Engine, build_engine

PLAIN = {"method": "none"}  # not even forced tokens


@dataclass(frozen=True)
class TimedRun:
    """Answers to some requests. num_steps: steps of the run; num_drafted, num_accepted: of its
    draft tokens."""

    seconds: float
    answers: list[list[int]]
    num_steps: int
    num_drafted: int
    num_accepted: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers))


@dataclass
class MeasuredEngine:
    """An engine and the steps of its last run."""

    engine: Engine
    steps: list[Stepped] = field(default_factory=list)

    @classmethod
    def build(cls, speculation: dict[str, Any], **settings: Any) -> "MeasuredEngine":
        """Load a model with these settings. speculation: its `speculative_config`."""
        config = config_from_flat(
            disable_log_stats=True, speculative_config=speculation, **settings
        )
        found = cls(build_engine(config))
        found.engine.client.core.subscribe(found._note)
        return found

    def _note(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self.steps.append(event)

    def compute_prompts(self, requests: Sequence[DraftRequest]) -> None:
        """Compute the prompts, whose blocks are then cached."""
        first = [replace(each, params=each.params.clone()) for each in requests]
        for each in first:
            each.params.max_tokens = 1
        self._answers(first)

    def run(self, requests: Sequence[DraftRequest]) -> TimedRun:
        """Answer all requests at once."""
        self.steps.clear()
        began = time.perf_counter()
        answers = self._answers(requests)
        seconds = time.perf_counter() - began
        drafted = sum(step.num_draft_tokens for step in self.steps)
        accepted = sum(step.num_accepted for step in self.steps)
        return TimedRun(seconds, answers, len(self.steps), drafted, accepted)

    def _answers(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        client, found = self.engine.client, dict[str, list[int]]()
        made = [
            self.engine.requests.make(each.prompt, each.params, grammar=each.grammar)
            for each in requests
        ]
        for request in made:
            client.add(request)
        while client.num_unfinished:
            for output in client.step():
                if output.finished:
                    found[output.request_id] = list(output.outputs[0].token_ids)
        return [found[request.request_id] for request in made]

    def close(self) -> None:
        self.engine.client.close()
