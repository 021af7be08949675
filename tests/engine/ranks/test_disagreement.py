"""Agreement of ranks: the number of devices, and whether a step failed.

Covers `engine/ranks/executor.py` and `engine/ranks/launch.py`.
"""

import numpy as np
import pytest

import quire.engine.ranks.executor
from quire.base.errors import ConfigError
from quire.base.plan import Plan, StepResult
from quire.base.settings.config import config_from_flat
from quire.engine.observability.heartbeat import StepLimit
from quire.engine.ranks import launch
from quire.engine.ranks.executor import RankSteps
from quire.engine.ranks.messages import Done, Step, ToRank

NOTHING = np.empty(0, np.int32)


class Link:
    """Records the messages to ranks, and the reasons for which ranks were given up."""

    def __init__(self) -> None:
        self.sent: list[ToRank] = []
        self.given_up: list[tuple[int, str]] = []

    def send(self, message: ToRank) -> None:
        self.sent.append(message)

    def give_up(self, rank: int, why: str) -> None:
        self.given_up.append((rank, why))


def steps_of(num_ranks: int, num_stages: int = 1) -> tuple[RankSteps, Link]:
    link = Link()
    steps = RankSteps(link, num_ranks, num_stages, StepLimit(0.0), idles=False)
    steps.begin(Step(0, Plan(0), is_first=True, has_masks=False))
    return steps, link


def result(error: str | None = None) -> Done:
    found = StepResult(0, NOTHING, NOTHING, duration_s=0.1, error=error)
    return Done.of(0, found, answers=True)


def test_step_that_failed_on_some_ranks_stops_the_engine() -> None:
    steps, link = steps_of(2)
    steps.hear(1, Done(0, 0.1, "no memory"))
    assert not link.given_up
    steps.hear(0, result())
    assert link.given_up == [(1, "failed on a step, and not all did: no memory")]
    assert steps.results.empty()


def test_rank_without_result_of_a_failed_step_gets_two_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be waiting for the failed ranks in an exchange."""
    steps, link = steps_of(2)
    steps.hear(1, Done(0, 0.1, "no memory"))
    steps.tick()
    assert not link.given_up
    monkeypatch.setattr(quire.engine.ranks.executor, "DISAGREE_S", -1.0)
    steps.tick()
    assert link.given_up == [(1, "failed on a step, and not all did: no memory")]


def test_step_that_failed_on_all_ranks_may_be_repeated() -> None:
    steps, link = steps_of(2)
    steps.hear(1, Done(0, 0.1, "no memory"))
    steps.hear(0, result("no memory"))
    found = steps.results.get_nowait()
    assert not link.given_up and getattr(found, "error", None) == "no memory"


def test_step_that_failed_in_the_last_stage_is_no_disagreement() -> None:
    steps, link = steps_of(2, num_stages=2)
    steps.hear(0, Done(0, 0.1))
    steps.hear(1, result("bad rows"))
    assert not link.given_up and not steps.results.empty()


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"tensor_parallel_size": 4, "pipeline_parallel_size": 2}, "=4 x .*=2 needs 8 CUDA dev"),
        (
            {"tensor_parallel_size": 8, "nnodes": 2, "master_addr": "a"},
            "=8 x .*=1 needs 4 CUDA devices on each of 2 machines",
        ),
    ],
)
def test_too_few_devices_error_names_both_numbers(
    settings: dict[str, object], pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_has_driver", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = config_from_flat(**settings)
    parallel = config.parallel
    with pytest.raises(ConfigError, match=f"{pattern}.*, and torch sees 3"):
        launch.cuda_devices(config, parallel.num_ranks // parallel.nnodes)
    assert launch.cuda_devices(config, 2) == ["0", "1"]
