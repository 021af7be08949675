"""Scales of fp8 keys and values: the tensors that are read, and models that load with them."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base.errors import ModelError
from quire.models.checkpoint.files import INDEX
from quire.models.checkpoint.kv_scales import NAME_ENDS, kv_scales
from quire.models.load.loading import load_model
from tests.support.models.checkpoints import Checkpoint, write_checkpoint
from tests.support.models.paged_forward import CPU


@pytest.fixture
def llama(tmp_path: Path) -> Checkpoint:
    return write_checkpoint(tmp_path, "llama")


def add(checkpoint: Checkpoint, *tensors: tuple[str, object], prefix: str = "model.") -> None:
    """Add tensors of layers to the weights. Names begin after `layers.`."""
    file = checkpoint.directory / "model.safetensors"
    more = {f"{prefix}layers.{name}": torch.as_tensor(value) for name, value in tensors}
    save_file(load_file(file) | more, file, metadata={"format": "pt"})


FORMS = {
    "plain": ("k_scale", "v_scale"),
    "attn": ("attn.k_scale", "attn.v_scale"),
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
    "packed": ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    "quark": ("k_proj.output_scale", "v_proj.output_scale"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_scales_are_read_under_all_known_names(
    form: str, prefix: str, llama: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    k, v = (f"self_attn.{name}" for name in FORMS[form])
    for layer in range(3):
        bfloat16 = torch.tensor([0.25 + layer], dtype=torch.bfloat16)
        add(llama, (f"{layer}.{k}", bfloat16), (f"{layer}.{v}", 3.0 + layer), prefix=prefix)
    assert kv_scales(llama.directory, llama.spec) == {
        0: (0.25, 3.0),
        1: (1.25, 4.0),
        2: (2.25, 5.0),
    }
    assert not caplog.records
    load_model(llama.directory, llama.spec, torch.float32, CPU)


def test_a_joint_scale_applies_to_keys_and_values(llama: Checkpoint) -> None:
    add(llama, *((f"{layer}.self_attn.kv_scale", 0.5) for layer in range(3)))
    assert kv_scales(llama.directory, llama.spec) == dict.fromkeys(range(3), (0.5, 0.5))


def test_missing_scales_are_1_with_one_warning(
    llama: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "quire"):
        assert kv_scales(llama.directory, llama.spec) == dict.fromkeys(range(3), (1.0, 1.0))
    (record,) = caplog.records
    assert "for 3 of 3 layers, so 1 is used" in record.getMessage()
    caplog.clear()
    add(llama, ("1.self_attn.k_scale", 0.5), ("2.self_attn.k_scale", 0.25))
    add(llama, ("2.self_attn.v_scale", 0.75))
    wanted = {0: (1.0, 1.0), 1: (0.5, 1.0), 2: (0.25, 0.75)}
    assert kv_scales(llama.directory, llama.spec) == wanted
    assert "for 2 of 3 layers" in caplog.text


def test_scales_in_all_shards_are_read(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "llama", max_shard_size="20KB")
    assert (tmp_path / INDEX).exists()
    for layer, file in enumerate(sorted(tmp_path.glob("*.safetensors"))[:3]):
        scales = {f"model.layers.{layer}.self_attn.{x}_scale": torch.tensor(0.5) for x in "kv"}
        save_file(load_file(file) | scales, file, metadata={"format": "pt"})
    wanted = dict.fromkeys(range(3), (0.5, 0.5))
    assert kv_scales(checkpoint.directory, checkpoint.spec) == wanted


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([("0.self_attn.k_scale", [0.5, 0.5])], "k_scale.* has 2 numbers; only one for each layer"),
        ([("0.self_attn.v_scale", [])], "v_scale.* has 0 numbers"),
        ([("0.self_attn.k_scale", 0.0)], "k_scale.* is 0, not a positive number"),
        ([("0.self_attn.k_scale", float("inf"))], "is inf, not a positive number"),
        (
            [("0.self_attn.k_scale", 0.5), ("0.self_attn.kv_scale", 0.25)],
            "another one of its layer",
        ),
    ],
)
def test_invalid_scales_are_refused(
    tensors: list[tuple[str, object]], words: str, llama: Checkpoint
) -> None:
    add(llama, *tensors)
    with pytest.raises(ModelError, match=words):
        kv_scales(llama.directory, llama.spec)


def test_models_load_with_scales_that_are_not_used(llama: Checkpoint) -> None:
    """Tensors that only look like KV scales, such as scales of weights, are still unknown."""
    add(llama, *((f"0{end}", 0.5) for end in NAME_ENDS))
    load_model(llama.directory, llama.spec, torch.float32, CPU)
    add(llama, ("0.self_attn.k_proj.weight_scale", 0.5), ("0.mlp.k_scale", 0.5))
    with pytest.raises(ModelError, match=r"unknown tensors .*0\.mlp\.k_scale.*weight_scale"):
        load_model(llama.directory, llama.spec, torch.float32, CPU)
