"""The layers after pooling: read from files, and refused where they do not fit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.base.errors import ModelError
from quire.base.requests.pooling import PoolingSpec
from quire.models.parts.pooling_layers import PoolingLayer, load_pooling_layers
from quire.spec.model_spec import ModelSpec, parse_spec
from tests.support.models.checkpoints import QWEN3

CPU = torch.device("cpu")
WEIGHT = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
THREE = PoolingSpec("classify", "last", labels=("a", "b", "c"))


def spec_of(pooling: PoolingSpec) -> ModelSpec:
    return replace(parse_spec(QWEN3 | {"model_type": "qwen3"}), pooling=pooling)


def load(folder: Path, pooling: PoolingSpec, load_format: str = "auto") -> list[PoolingLayer]:
    return load_pooling_layers(folder, spec_of(pooling), CPU, load_format, 0)


def test_a_classifier_applies_its_weight_and_bias(tmp_path: Path) -> None:
    bias = torch.arange(3.0)
    save_file({"score.weight": WEIGHT, "score.bias": bias}, tmp_path / "model.safetensors")
    [layer] = load(tmp_path, THREE)
    x_ND = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = x_ND @ WEIGHT.double().T + bias
    torch.testing.assert_close(layer(x_ND), wanted, rtol=1e-12, atol=1e-12)
    assert layer(x_ND[2:3]).equal(layer(x_ND)[2:3]), "a row depends on its neighbours"
    assert layer(x_ND[:0]).shape == (0, 3)


def test_a_missing_or_misshapen_classifier_is_refused(tmp_path: Path) -> None:
    save_file({"other": WEIGHT}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no tensor score\.weight"):
        load(tmp_path, THREE)
    save_file({"score.weight": WEIGHT[:2]}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"\(2, 32\); it must be 3 x 32"):
        load(tmp_path, THREE)


def test_label_tokens_select_rows_of_the_language_model_head(tmp_path: Path) -> None:
    table = torch.randn(97, 32, generator=torch.Generator().manual_seed(2))
    save_file({"model.embed_tokens.weight": table}, tmp_path / "model.safetensors")
    both = PoolingSpec("classify", "last", labels=("no", "yes"), label_tokens=(7, 4))
    assert load(tmp_path, both)[0].weight.equal(table[[7, 4]].double())
    one = PoolingSpec(
        "classify", "last", labels=("LABEL_0",), label_tokens=(7, 4), is_difference=True
    )
    assert load(tmp_path, one)[0].weight.equal(table[4:5].double() - table[7:8].double())


def test_dense_layers_run_in_order(tmp_path: Path) -> None:
    for name, weight in (("2_Dense", WEIGHT), ("3_Dense", torch.ones(2, 3))):
        (tmp_path / name).mkdir()
        save_file({"linear.weight": weight}, tmp_path / name / "model.safetensors")
    dense = (("2_Dense", "tanh"), ("3_Dense", "identity"))
    x_ND = torch.ones(1, 32, dtype=torch.float64)
    for layer in load(tmp_path, PoolingSpec("embed", "mean", dense=dense)):
        x_ND = layer(x_ND)
    wanted = WEIGHT.double().sum(1).tanh().sum()
    torch.testing.assert_close(x_ND[0], wanted.repeat(2))


def test_dummy_weights_are_reproducible(tmp_path: Path) -> None:
    [first], [again] = load(tmp_path, THREE, "dummy"), load(tmp_path, THREE, "dummy")
    assert first.weight.shape == (3, 32)
    assert first.weight.equal(again.weight) and first.weight.std() > 0.01
