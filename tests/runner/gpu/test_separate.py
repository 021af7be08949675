"""Recorded decoding steps that rotate heads within attention: only where rows are separate."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.base.messages import Request
from quire.base.plan import Plan
from quire.base.requests.sampling_params import SamplingParams
from quire.engine.start.build import make_scheduler
from quire.models.checkpoint.source import resolve_model
from quire.ops.kernels.attention import rotary_attention, rotary_write
from quire.ops.kernels.launch import INTERPRETED, ROTATE_WITHIN
from quire.runner.gpu import graphs
from quire.runner.gpu.graphs import Graphs
from quire.runner.gpu.sizes import Size
from quire.runner.step_ops import Needs
from tests.runner.gpu.test_kernel_ops import devices  # noqa: F401 (a fixture)
from tests.runner.gpu.test_model_runner import build, drive, model_of
from tests.support.runner.late_device import LateDevice, on_the_host

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the stand-in's memory is the CPU's")

LIMITS = {"max_model_len": 40, "max_num_batched_tokens": 20, "enable_prefix_caching": True}
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


def requests() -> list[Request]:
    """The last two prompts begin with the first one's blocks, so each computes one prompt token."""
    prompts = [[7 * j % 97 for j in range(n)] for n in (12, 5, 13, 13)]
    return [Request(f"r{i}", prompt, GREEDY, seed=i) for i, prompt in enumerate(prompts)]


class Launched:
    """Note kernels by the size of their recorded step; None means launched directly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: set[tuple[Size | None, str]] = set()
        self._size: Size | None = None
        launch = graphs.launch_step

        def note_size(runner: Any, size: Size, *more: Any) -> Any:
            self._size = size
            try:
                return launch(runner, size, *more)
            finally:
                self._size = None

        monkeypatch.setattr(graphs, "launch_step", note_size)
        for module, name in (
            (rotary_attention, "rotary_attention"),
            (rotary_write, "rotary_write"),
        ):
            monkeypatch.setattr(module, name, self._noting(getattr(module, name), name))

    def _noting(self, function: Any, name: str) -> Any:
        def noted(*given: Any, **named: Any) -> Any:
            self.found.add((self._size, name))
            return function(*given, **named)

        return noted


@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("compilation", ["full", pytest.param("piecewise", marks=pytest.mark.slow)])
def test_plain_decoding_graphs_rotate_within_attention(
    compilation: str,
    architecture: str,
    devices: list[LateDevice],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only whole graphs of plain decoding steps do so. The tokens equal torch's."""
    monkeypatch.setenv(ROTATE_WITHIN, "1")
    launched = Launched(monkeypatch)
    built = build("triton", architecture, compilation=compilation, **LIMITS)
    found = drive(built, devices[-1], make=requests, architecture=architecture)
    sizes = {size for size, name in launched.found if name == "rotary_attention"}
    assert None not in sizes and all(not (size.is_mixed or size.drafts) for size in sizes if size)
    # A graph in pieces rotates the heads, but its kernels first run without pieces.
    assert Size(3) in sizes
    separate = {size for size, name in launched.found if name == "rotary_write"}
    assert None in separate
    assert (Size(3) in separate) == (compilation == "piecewise")
    with on_the_host():
        assert found == drive(
            build("torch", architecture, **LIMITS), make=requests, architecture=architecture
        )


def one_token_plans(num: int) -> list[Plan]:
    """Return the plans of the first steps in which each row has one token."""
    built = build("triton", enforce_eager=True, **LIMITS)
    scheduler = make_scheduler(built, resolve_model(model_of(), None))
    for request in requests():
        scheduler.add(request, 0.0)
    plans: list[Plan] = []
    while len(plans) < num:
        plan = scheduler.schedule(0.0).plan
        assert plan is not None
        scheduler.update(built.runner.launch(plan).end(), 0.0)
        if plan.num_scheduled_tokens == len(plan.rows):
            plans.append(plan)
    return plans


def test_steps_with_started_or_forked_rows_take_another_graph(
    devices: list[LateDevice],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A starting row may read a block that another row of the step writes; so may a fork."""
    plans = one_token_plans(6)
    starting = [plan for plan in plans if plan.started]
    decoding = [plan for plan in plans if not plan.started]
    assert starting and decoding, "a prompt with a prefix hit computes one token"
    requested_tokens: list[int] = []
    monkeypatch.setattr(
        Graphs, "find", lambda own, rows, tokens, *more: requested_tokens.append(tokens)
    )
    for is_on in (True, False):
        monkeypatch.setenv(ROTATE_WITHIN, str(int(is_on)))
        runner = build("triton", compilation="full", **LIMITS).runner
        fork = replace_forks(decoding[0])
        for plan in (starting[0], decoding[0], fork):
            runner.find_recorded(plan, Needs())
    num = len(starting[0].rows)
    assert requested_tokens == [num, 0, len(fork.rows), 0, 0, 0]


def replace_forks(plan: Plan) -> Plan:
    """Return the plan with its first row forked before the step."""
    from quire.base.plan import RowFork

    return plan.replace(forked=(RowFork(int(plan.rows[0]), 2, 1),))


def test_only_plain_decoding_shapes_are_separate() -> None:
    from quire.runner.gpu.sizes import largest_shape

    found = {
        size: largest_shape(size, 40).is_separate for size in (Size(3), Size(3, 16), Size(3, 0, 6))
    }
    assert list(found.values()) == [True, False, False]
    assert replace(largest_shape(Size(3), 40), is_separate=False).query_lens.tolist() == [1, 1, 1]
    assert np.array_equal(largest_shape(Size(3, 16), 40).query_lens, [16, 0, 0])
