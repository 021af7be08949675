"""The outline of a model, made from its config, is what its layers ask for."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from quire.base.errors import ModelError
from quire.base.model_spec import ModelSpec, load_spec, parse_spec
from quire.models.experts import Router
from quire.models.layers import Embedding, Layer, Linear, LMHead
from quire.models.outline import (
    HEAD,
    LINEAR,
    OUTLINES,
    PLAIN,
    ROUTER,
    base_prefix,
    ignored_tensors,
    outline,
)
from quire.models.registry import MODELS, make_model
from quire.models.source import resolve_model, shape_names
from tests.models.checkpoints import VARIANTS

META = torch.device("meta")


def variant_spec(name: str) -> ModelSpec:
    model_type, config = VARIANTS[name]
    known = transformers.AutoConfig.for_model(model_type, **config).to_dict()
    return parse_spec(json.loads(json.dumps(known)))


def check(spec: ModelSpec) -> None:
    """Parameters with their kinds, and the tensors that fill them with their shapes."""
    model = make_model(spec, torch.bfloat16, META)
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    wanted = {s.name: s.checkpoint_shape for layer in layers for s in layer.sources()}
    parts = outline(spec)
    assert {name: shape for part in parts for name, shape in part.tensors.items()} == wanted
    kinds = {LINEAR: Linear, ROUTER: Router, HEAD: LMHead}
    for kind, layer_class in kinds.items():
        shapes = sorted(tuple(m.weight.shape) for m in layers if type(m) is layer_class)
        assert sorted(part.shape for part in parts if part.kind == kind) == shapes
    packed = {id(m.weight) for m in layers if isinstance(m, Linear | LMHead)}
    plain = sorted(tuple(p.shape) for p in model.parameters() if id(p) not in packed)
    assert sorted(part.shape for part in parts if part.kind == PLAIN) == plain
    tables = [m.weight is model.head.weight for m in layers if isinstance(m, Embedding)]
    assert [part.is_tied for part in parts if part.kind == HEAD] == [any(tables)]
    assert base_prefix(spec) == model.base_prefix
    ignored = model.ignored_tensors
    assert ignored_tensors(spec) == ((ignored,) if isinstance(ignored, str) else ignored)


@pytest.mark.parametrize("variant", VARIANTS)
def test_of_every_architecture(variant: str) -> None:
    check(variant_spec(variant))


@pytest.mark.parametrize("shape", shape_names())
def test_of_every_shape(shape: str) -> None:
    check(load_spec(resolve_model(f"shape:{shape}").directory))


def test_every_model_type_has_one() -> None:
    assert set(OUTLINES) == set(MODELS)
    assert {model_type for model_type, _ in VARIANTS.values()} == set(MODELS)


def test_a_type_that_is_not_ours(tmp_path: Path) -> None:
    raw = json.loads((resolve_model("shape:qwen3-0.6b").directory / "config.json").read_text())
    with pytest.raises(ModelError, match="'bloom' are not known .* known are gpt2, llama"):
        outline(parse_spec(raw | {"model_type": "bloom"}))
