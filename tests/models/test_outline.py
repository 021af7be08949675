"""The outline of a model, made from its config, matches the loaded model."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from quire.base.errors import ModelError
from quire.models.checkpoint.source import resolve_model, shape_names
from quire.models.outline import HEAD, LINEAR, PLAIN, ROUTER, outline
from quire.models.registry import MODELS, make_model
from quire.spec.model_spec import ModelSpec, load_spec, parse_spec
from tests.support.models.checkpoints import VARIANTS, write_checkpoint
from tests.support.models.quick import slow_if_large

META = torch.device("meta")


def variant_spec(name: str) -> ModelSpec:
    model_type, config = VARIANTS[name]
    known = transformers.AutoConfig.for_model(model_type, **config).to_dict()
    return parse_spec(json.loads(json.dumps(known)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_outlines_have_the_tensors_that_transformers_writes(variant: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, variant)
    with safe_open(checkpoint.directory / "model.safetensors", "pt") as file:
        names = file.keys()
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    made = outline(checkpoint.spec)
    wanted = {name: shape for part in made.parts for name, shape in part.tensors.items()}
    assert {n: s for n, s in stored.items() if not made.ignores(n)} == wanted


@pytest.mark.parametrize("variant", ["llama", "llama_tied", "qwen3_moe_some", "gpt2", "opt_350m"])
def test_the_outline_counts_each_parameter_once(variant: str) -> None:
    spec = variant_spec(variant)
    model, parts = make_model(spec, torch.bfloat16, META), outline(spec).parts
    assert sum(part.num_bytes for part in parts) == sum(p.nbytes for p in model.parameters())
    kinds = [part.kind for part in parts]
    assert kinds.count(HEAD) == 1
    assert {LINEAR, PLAIN} < set(kinds)
    assert (ROUTER in kinds) == (spec.experts is not None)
    assert [part.is_tied for part in parts if part.kind == HEAD] == [spec.tie_embeddings]


@pytest.mark.parametrize("shape", slow_if_large(shape_names()))
def test_every_built_in_shape_has_an_outline(shape: str) -> None:
    spec = load_spec(resolve_model(f"shape:{shape}").directory)
    assert sum(part.num_bytes for part in outline(spec).parts) > 10 * spec.hidden_size**2


def test_every_model_type_has_a_variant() -> None:
    assert {model_type for model_type, _ in VARIANTS.values()} == set(MODELS)


def test_an_unknown_type_is_refused() -> None:
    raw = json.loads((resolve_model("shape:qwen3-0.6b").directory / "config.json").read_text())
    with pytest.raises(ModelError, match="'bloom' is not supported; supported are .*gpt2, .*llama"):
        outline(parse_spec(raw | {"model_type": "bloom"}))
