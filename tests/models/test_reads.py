"""The states that a model passes to a head equal transformers' `hidden_states`."""

from pathlib import Path

import pytest
import torch
import transformers

from quire.base.errors import ModelError
from quire.models.load.loading import load_model
from quire.models.transformers_model import TransformersModel
from quire.ops.attention.select import make_backend
from quire.runner.native_model import NativeModel
from quire.tools.verify.precision import WholePrecision
from tests.support.models.checkpoints import EAGER, random_tokens, write_checkpoint
from tests.support.models.paged_forward import CPU, RowPart, make_layout, make_step
from tests.support.models.quick import one_of_each_kind

TOKENS = random_tokens(13)[0]
TOLERANCE = {"reference": 1e-10, "torch": 1e-4, "cpu": 1e-4}


@pytest.mark.parametrize("variant", one_of_each_kind())
def test_recorded_layer_inputs_match_transformers(variant: str, tmp_path: Path) -> None:
    """In float64, in float32, and in the core's program. The last state follows all layers."""
    spec = write_checkpoint(tmp_path, variant).spec
    layers = list(range(spec.num_layers + 1))
    with WholePrecision(), torch.inference_mode():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.float64, **EAGER
        )
        wanted = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    for name in TOLERANCE:
        dtype = torch.float64 if name == "reference" else torch.float32
        ours = load_model(tmp_path, spec, dtype, CPU)
        ours.record_layer_inputs(layers)
        backend = make_backend(name, make_layout(spec, 8, 4, dtype))
        run = NativeModel(ours, backend) if name == "cpu" else ours
        step = make_step([RowPart(0, 13, tuple([0, 1, 2, 3] for _ in spec.cache_groups))], 4)
        backend.prepare(step)
        with torch.inference_mode():
            out_TD = run(torch.tensor(TOKENS), step.positions_T, backend)
            found = run.recorded_inputs(13).chunk(len(layers), dim=1)
        for each, state in zip(found[:-1], wanted[:-1], strict=True):
            limit = TOLERANCE[name] * state.abs().max().item()
            torch.testing.assert_close(each.double(), state[0], rtol=0, atol=limit)
        if spec.model_type != "opt":  # a projection may follow its last norm
            last = ours.norm(found[-1].to(dtype))
            last = last[0] if isinstance(last, tuple) else last
            torch.testing.assert_close(last, out_TD, rtol=1e-4, atol=1e-4)


def test_recorded_inputs_stay_at_one_address(tmp_path: Path) -> None:
    spec = write_checkpoint(tmp_path, "llama").spec
    model = load_model(tmp_path, spec, torch.float32, CPU)
    model.record_layer_inputs([1], max_tokens=20)
    backend, addresses = make_backend("torch", make_layout(spec, 8, 4)), set()
    for count in (3, 13, 1):
        step = make_step([RowPart(0, count, ([0, 1, 2, 3],))], 4)
        backend.prepare(step)
        model(torch.tensor(TOKENS[:count]), step.positions_T, backend)
        assert model.recorded_inputs(count).shape == (count, spec.hidden_size)
        addresses.add(model.recorded_inputs(count).data_ptr())
    assert len(addresses) == 1


def test_transformers_classes_refuse_to_record_inputs() -> None:
    model = TransformersModel.__new__(TransformersModel)
    with pytest.raises(ModelError, match="does not expose: .* another method"):
        model.record_layer_inputs([1])
