"""Recorded steps with draft tokens.

The plan's changes bring the draft tokens of the host, or the device drafts first, and the number of
draft tokens of each row. So the same launches serve every step of a size: gather, forward pass,
sampling at all positions, acceptance (`ops/kernels/sampling/verify.py`).
"""

from collections.abc import Callable
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from quire.base.plan import Plan
from quire.ops.attention.base import AttentionBackend
from quire.ops.attention.states import RecordedOnDevice
from quire.ops.rows.step_inputs import SampleInputs
from quire.ops.sampling.device_drafts import Runs
from quire.runner.attachment import recorded_parts
from quire.runner.gpu.sizes import Drafted, Size
from quire.runner.step_ops import Gathered, Needs, StepShape
from quire.runner.steps import StepRunner


class VerifyOps(Protocol):
    """Operations on draft tokens that a graph can hold, for `StepOps.can_be_recorded`."""

    def draft(self, size: Size) -> None:
        """Write the device's draft tokens after the rows of the step in the inbox."""
        ...

    def has_drafts(self, gathered: Gathered) -> torch.Tensor:
        """Return which scheduled row slots have draft tokens, bool [S]."""
        ...

    def positions(self, gathered: Gathered, size: Size) -> SampleInputs:
        """Return the inputs of sampling at all positions: of the row slots, then of all drafts."""
        ...

    def accept(
        self, gathered: Gathered, ids_P: torch.Tensor, is_valid_P: torch.Tensor, size: Size
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of the row slots [N, 1 + K] and how many of them count [N]; move the
        counters."""
        ...


def verify_ops(runner: StepRunner) -> VerifyOps:
    """Return the operations on draft tokens of a runner that records steps."""
    return cast(VerifyOps, runner.rows.ops)


def verify(
    runner: StepRunner,
    gathered: Gathered,
    size: Size,
    shape: StepShape,
    needs: Needs,
    backend: AttentionBackend,
    between: Callable[[], None],
) -> list[torch.Tensor]:
    """Run a step with draft tokens from gathered inputs to counters. Return the row slots' tokens,
    how many of them count, and the sampling parts' tensors. between: called where the masks are
    applied."""
    ops, recording = verify_ops(runner), None
    forward = recorded_parts(runner.attachments, needs)
    if backend.has_states:
        backend = recording = RecordedOnDevice(
            backend, ops.has_drafts(gathered), size.num_positions
        )
    hidden_TD = runner.hidden(gathered.inputs, shape, backend, forward)
    samples = ops.positions(gathered, size)
    logits_PV = runner.logits(hidden_TD, samples.last, needs)
    if needs.has_masks:
        between()
    parts = runner.sampler.parts(needs)
    ids_P, is_valid_P = runner.sampler.sample(logits_PV, samples, needs, parts)
    accepted = ops.accept(gathered, ids_P, is_valid_P, size)
    if recording is not None:  # the counters have moved past the accepted tokens
        recording.settle_up_to(runner.rows.state.computed_R[gathered.valid_rows(0)])
    return [*accepted, *(tensor for part in parts for tensor in part.found())]


def drafted_of(plan: Plan, runs: Runs | None) -> Drafted | None:
    """Return what a plan's size depends on; None without draft tokens. runs: search of the device's
    drafter, for plans that leave the drafts to it."""
    if not plan.drafts:
        return None
    counts = plan.num_drafts
    has_prompts = bool((plan.num_tokens - counts > 1).any())
    runs = runs if plan.is_guessing else None
    return Drafted(int(counts.sum()), int(counts.max()), has_prompts, runs)


def draft_slots(
    plan: Plan,
    sampling: npt.NDArray[np.int64],
    depths: npt.NDArray[np.int64],
    num_row_slots: int,
) -> npt.NDArray[np.int64]:
    """Return the recorded step's position of each position of a plan, int64 [P]. sampling, depths:
    see SamplingPositions."""
    counts = np.bincount(sampling[depths > 0], minlength=len(plan.sample_rows))
    first = num_row_slots + np.cumsum(counts) - counts
    found: npt.NDArray[np.int64] = np.where(depths == 0, sampling, first[sampling] + depths - 1)
    return found
