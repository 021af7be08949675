"""A plan's changes of the rows, immediate and late, by torch's operations and by kernels."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quire.base.plan import BlockWrites, HostTokens, Plan, RowFork, RowStart
from quire.base.requests.sampling_params import SamplingParams
from quire.ops.kernels.launch import INTERPRETED
from quire.runner.device import HostDevice
from quire.runner.gpu.kernel_ops import KernelOps
from quire.runner.rows import PROMPT_COLUMN, DeviceRows
from quire.runner.setup.assemble import empty_rows
from quire.runner.step_ops import SamplingFlags, SamplingRequests, StepOps
from quire.runner.torch_ops import TorchOps
from tests.support.runner.late_device import LateDevice


def rows_of(device: Any, backend: str) -> DeviceRows:
    """Return five rows of 16 tokens, in blocks of 4."""
    state = empty_rows(device.device, 5, 16, 1, 4)
    ops: StepOps = TorchOps(device, state)
    if backend == "kernels":
        if not INTERPRETED:
            pytest.skip("the stand-in's memory is the CPU's")
        ops = KernelOps(device, state, 97)
    return DeviceRows(device, state, ops)


@pytest.mark.parametrize("backend", ["torch", "kernels"])
@pytest.mark.parametrize("make", [HostDevice, LateDevice])
def test_plan_changes_rows_in_order(backend: str, make: Callable[..., Any]) -> None:
    """A row starts and is forked twice, and a fork is forked. Then tokens and tables change."""
    device = make(torch.device("cpu"))
    rows = rows_of(device, backend)
    params = SamplingParams(temperature=0.0)
    start = RowStart(2, np.arange(7, dtype=np.int32), 3, 7, params, seed=9)
    column = np.array([1], np.int32)
    plan = Plan(
        1,
        started=(start,),
        forked=(RowFork(2, 0, 5), RowFork(0, 4, 6), RowFork(2, 1, 7)),
        truncated=((0, 2),),
        host_tokens=(HostTokens(4, 7, np.array([70, 71], np.int32), is_prompt=True),),
        block_writes=BlockWrites(0 * column, column, column, 33 * column),
    )
    flags = SamplingFlags.of_rows(5)
    requested = SamplingRequests(plan.sample_rows, flags.at(plan.sample_rows), {})
    update, _ = rows.apply(plan, flags.has_edits, requested)
    rows.run_with(update, list)
    device.run(list).wait()
    tokens = rows.state.tokens_RM[:, :9].tolist()
    assert tokens[0] == tokens[1] == tokens[2] == [*range(7), 0, 0]
    assert tokens[4] == [*range(7), 70, 71]
    assert rows.state.computed_R.tolist() == [2, 3, 3, 0, 3]
    assert rows.state.wide_CR[1:].T.tolist() == [
        [9, 5, 7], [9, 7, 7], [9, 0, 7], [0, 0, 0], [9, 6, 9]
    ]  # fmt: skip
    assert rows.state.wide_CR[PROMPT_COLUMN].tolist() == rows.prompt_lens.tolist()
    assert rows.state.tables_GRL[0, 1, 1] == 33 and rows.state.tables_GRL.sum() == 33
