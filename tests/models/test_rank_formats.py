"""Quantised weights that are split over ranks keep their numbers.

Covers `models/quantised/cutting.py`, `models/quantised/tensors.py` and `models/gguf/weights.py`.
"""

from pathlib import Path

import pytest
import torch

from quire.base.errors import ConfigError
from quire.models.checkpoint.formats import IN_THE_DTYPE, WeightFormats
from quire.models.checkpoint.rank_place import RankPlace
from quire.models.load.loading import LoadOptions, load_model
from quire.models.parts.layers import Linear
from quire.ops.collective import RankGroup
from quire.ops.collectives.thread_group import run_ranks, thread_groups
from quire.ops.host.native import core
from quire.ops.linear import linear
from quire.ops.weights.formats import Quantization
from quire.ops.weights.packed import PackedParts, PackedWeight
from quire.spec.model_spec import load_spec
from tests.models.test_quantised_checkpoints import FORMATS
from tests.support.cases import slow_but
from tests.support.models import quantised_writers as writers
from tests.support.models.checkpoints import HYBRID, write_own
from tests.support.models.gguf_writer import Q4_0, Q8_0, convert
from tests.support.models.paged_forward import CPU
from tests.support.models.ranks import logits_of

needs_core = pytest.mark.skipif(core() is None, reason="the C++ core is not built")
INNER = 128  # so that two ranks have whole groups of 32


def numbers_of(layer: Linear) -> torch.Tensor:
    """Return a layer's weights: its products with unit vectors times 127, which round nothing."""
    inputs = layer.weight.shape[1]
    return linear(torch.eye(inputs) * 127, layer.weight).T / 127


def check_quantised(path: Path, group: RankGroup) -> int:
    """Compare a rank's quantised weights with dequantised ones; return how many are quantised."""
    spec, place = load_spec(path), RankPlace(group)
    quantised = load_model(path, spec, torch.float32, CPU, LoadOptions(place=place))
    in_dtype = LoadOptions(formats=IN_THE_DTYPE, place=place)
    dequantised = dict(load_model(path, spec, torch.float64, CPU, in_dtype).named_modules())
    count = 0
    for name, layer in quantised.named_modules():
        if isinstance(layer, Linear) and isinstance(layer.weight, PackedWeight | PackedParts):
            wanted = dequantised[name].weight
            torch.testing.assert_close(numbers_of(layer).double(), wanted, rtol=1e-5, atol=1e-6)
            count += layer.weight.format != "float32"
    return count


def compare(path: Path, size: int = 2) -> None:
    """Compare the logits of ranks with those of one rank, in float64."""
    spec = load_spec(path)
    (wanted,) = run_ranks(1, lambda group: logits_of(path, spec, group))
    for found in run_ranks(size, lambda group: logits_of(path, spec, group)):
        for one_TV, other_TV in zip(wanted, found, strict=True):
            torch.testing.assert_close(other_TV, one_TV, rtol=1e-12, atol=1e-12)


# Slow: formats that are split like a quick one.
QUICK = ("gptq ordered", "awq", "float blocks", "mxfp4")


@needs_core
@pytest.mark.parametrize("name", slow_but(FORMATS, *QUICK))
def test_ranks_split_quantised_checkpoints(name: str, tmp_path: Path) -> None:
    path, _ = writers.write(tmp_path, FORMATS[name], intermediate_size=INNER)
    compare(path)
    num_layers = 2 if name.endswith("ordered") else 4  # with ordered inputs, half is dequantised
    for group in thread_groups(2):
        assert check_quantised(path, group) == 2 * num_layers


@needs_core
def test_ranks_split_mxfp4_experts(tmp_path: Path) -> None:
    path, _ = writers.write_gpt_oss(tmp_path, intermediate_size=64)
    compare(path)
    for group in thread_groups(2):
        assert check_quantised(path, group) == 2 * 5 * 2


EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
OF_TYPE = {
    "llama": {},
    "gpt_neox": {"num_key_value_heads": 4},
    "glm4": {"head_dim": 16, "pad_token_id": 0},
    "qwen3_moe": EXPERTS | {"head_dim": 16},
    "gpt_oss": EXPERTS | {"num_local_experts": 3, "head_dim": 16},
    # GGUF files have another order of value heads, also in the columns of a matrix.
    "qwen3_5_text": HYBRID | {"linear_value_head_dim": 32, "linear_key_head_dim": 32},
}


@needs_core
@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        pytest.param(name, kind, marks=[] if number % 2 == k else pytest.mark.slow)
        for number, name in enumerate(OF_TYPE)
        for k, kind in enumerate((Q8_0, Q4_0))
    ],
)
def test_ranks_split_gguf_files(model_type: str, kind: int, tmp_path: Path) -> None:
    config = writers.SIZES | {"intermediate_size": INNER} | OF_TYPE[model_type]
    config |= {"hidden_size": 64, "intermediate_size": INNER}
    folder = write_own(tmp_path / "checkpoint", model_type, config).directory
    path = convert(folder, tmp_path / "model.gguf", kind)
    compare(path)
    for group in thread_groups(2):
        assert check_quantised(path, group) >= 4


@needs_core
def test_splitting_a_group_of_inputs_is_refused(tmp_path: Path) -> None:
    """96 inputs in groups of 32 are three groups."""
    path, _ = writers.write(tmp_path, FORMATS["gptq"], intermediate_size=96)
    place = RankPlace(thread_groups(2)[1])
    with pytest.raises(ConfigError, match="groups of 32 inputs. Each of 2 .* has 48 of its 96"):
        load_model(path, load_spec(path), torch.float32, CPU, LoadOptions(place=place))
    compare(path)  # dequantised weights can be split anywhere


@needs_core
@pytest.mark.parametrize("format", [Quantization("int8", 32), Quantization("int4", 32)])
def test_ranks_quantise_like_one_rank(format: Quantization, tmp_path: Path) -> None:
    """Where a rank has whole groups of 32 inputs. int4 needs four of them."""
    path = writers.write(tmp_path, FORMATS["gptq"], intermediate_size=2 * INNER)[1]
    spec, formats = load_spec(path), WeightFormats(format, None)
    whole = load_model(path, spec, torch.float32, CPU, LoadOptions(formats=formats))
    parts = [
        load_model(
            path, spec, torch.float32, CPU, LoadOptions(formats=formats, place=RankPlace(group))
        )
        for group in thread_groups(2)
    ]
    for i in range(spec.num_layers):
        down = [numbers_of(model.layers[i].mlp.down) for model in (whole, *parts)]
        assert torch.equal(down[0], torch.cat(down[1:], dim=1))
        gate_up = [numbers_of(model.layers[i].mlp.gate_up) for model in (whole, *parts)]
        gates, ups = zip(*(each.chunk(2) for each in gate_up[1:]), strict=True)
        assert torch.equal(gate_up[0], torch.cat((*gates, *ups)))
