"""Layers that fuse norms, gates and additions with matrix products give the bits of separate
operations on a CPU."""

from pathlib import Path

import pytest
import torch

from quire.models.load.loading import load_model
from quire.models.parts import layers
from quire.ops.registry import record_ops
from tests.models.test_stages import FLOAT, logits_by, stage_of
from tests.support.models.checkpoints import write_checkpoint
from tests.support.models.paged_forward import CPU

FUSED = {"normed_linear", "linear_add"}


@pytest.mark.parametrize(
    ("variant", "fused"),
    [
        ("llama_tied", {*FUSED, "normed_gate"}),
        ("qwen3", {*FUSED, "normed_gate"}),
        ("mixtral", FUSED),  # experts have the norm before them, and the addition after them
        ("gemma2", set()),  # a norm before each addition
        ("olmo2", set()),
        ("granite", set()),  # a factor before each addition
        ("gpt_neox", set()),  # another kind of norm
    ],
)
def test_fused_layers_give_the_bits_of_separate_operations(
    variant: str, fused: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one model, and in two stages. The first stage passes the complete residual stream on."""
    spec = write_checkpoint(tmp_path, variant).spec
    whole = load_model(tmp_path, spec, FLOAT, CPU)
    stages = [stage_of(tmp_path, spec, stage, 2) for stage in range(2)]
    wanted = logits_by([whole], spec, "torch")
    monkeypatch.setattr(layers, "fuses", lambda x_TD, weight_EI, has_norm=False: True)
    for models in ([whole], stages):
        with record_ops() as record:
            assert torch.equal(logits_by(models, spec, "torch"), wanted)
        assert {*FUSED, "normed_gate"} & set(record.names) == fused
