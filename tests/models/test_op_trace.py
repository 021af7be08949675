"""Models compute only through operations: their record is all that happens in a forward pass."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.models.load.loading import load_model
from quire.ops.attention.select import make_backend
from quire.ops.elementwise import add
from quire.ops.registry import OpCall, OpRecord, op, record_ops
from tests.support.models.checkpoints import random_tokens, write_checkpoint
from tests.support.models.paged_forward import CPU, RowPart, make_layout, make_step
from tests.support.models.quick import one_of_each_kind


class OutsideOps(TorchDispatchMode):
    """Records each torch operator that computes something outside of quire's operations."""

    def __init__(self, record: OpRecord) -> None:
        super().__init__()
        self._record = record
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._record.depth == 0 and not func.is_view:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("variant", one_of_each_kind("glm4_moe_lite", "qwen3_5", "opt"))
def test_nothing_is_computed_outside_operations(variant: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, variant)
    spec = checkpoint.spec
    model = load_model(tmp_path, spec, torch.float32, CPU)
    attention = make_backend("torch", make_layout(spec, 8, 4))
    tables = tuple([0, 1, 2, 3] for _ in spec.cache_groups)
    step = make_step([RowPart(0, 13, tables)], 4)
    ids_T = torch.tensor(random_tokens(13)[0])
    with torch.inference_mode(), record_ops() as record:
        attention.prepare(step)
        outside = OutsideOps(record)
        with outside:
            model.logits(model(ids_T, step.positions_T, attention))
    assert outside.found == []
    num_linear = len(spec.linear_layers)
    attends = "attention" if spec.latent is None else "latent_attention"
    assert record.names.count(attends) == spec.num_layers - num_linear
    assert record.names.count("delta_rule") == record.names.count("convolve") == num_linear
    after_head = ("scale", "soft_cap")  # of logits
    assert [name for name in record.names if name not in after_head][-1] == "linear"


def test_a_stray_operator_is_found() -> None:
    with record_ops() as record, OutsideOps(record) as outside:
        x = add(torch.ones(2, 3), torch.ones(2, 3))
        x.view(3, 2)
        x * 2
    assert outside.found == ["aten.ones.default", "aten.ones.default", "aten.mul.Tensor"]


def test_the_record_holds_names_and_shapes() -> None:
    @op("twice")
    def twice(x: torch.Tensor, times: int = 2) -> torch.Tensor:
        return add(x, x) * (times / 2)

    with record_ops() as record:
        twice(torch.ones(4), times=2)
        add(torch.ones(2, 1), y_TD=torch.ones(2, 1))
    twice(torch.ones(4))
    assert record.calls == [OpCall("twice", ((4,),)), OpCall("add", ((2, 1), (2, 1)))]


def test_an_error_ends_the_operation() -> None:
    with record_ops() as record:
        with pytest.raises(RuntimeError):
            add(torch.ones(2), torch.ones(3))
        assert record.depth == 0
