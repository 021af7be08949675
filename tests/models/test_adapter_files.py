"""Adapter files: their modules, their digest, and files that are refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base.errors import ModelError
from quire.models.checkpoint.adapter_files import (
    MAX_WEIGHT_BYTES,
    PREFIX,
    WEIGHTS,
    adapter_digest,
    read_adapter,
)
from quire.spec.adapter_config import CONFIG
from tests.support.runner.adapters import write_adapter

QUERY, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"
SHAPES = {QUERY: (32, 16), UP: (40, 16)}


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of an adapter, given by the ends of their names; None removes one."""
    found = load_file(folder / WEIGHTS)
    for end, tensor in tensors.items():
        name = f"{PREFIX}{QUERY}.{end.replace('__', '.')}"
        found.pop(name, None)
        if tensor is not None:
            found[name] = tensor
    save_file(found, folder / WEIGHTS)


def test_modules_have_their_ranks_and_scales(tmp_path: Path) -> None:
    write_adapter(tmp_path, SHAPES, 4, alpha=8.0)
    change(tmp_path, lora_A__weight=torch.ones(2, 16), lora_B__weight=torch.ones(32, 2))
    files = read_adapter(tmp_path)
    assert {each.name: (each.rank, each.scale) for each in files.modules} == {
        QUERY: (2, 4.0), UP: (4, 2.0),
    }  # fmt: skip
    assert {(each.outputs, each.inputs) for each in files.modules} == {*SHAPES.values()}
    assert files.max_rank == 4


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lora_B__weight": None}, "incomplete"),
        ({"lora_A__weight": None}, "lacks the lora_A"),
        ({"lora_B__weight": torch.ones(32, 3)}, "damaged"),
        ({"lora_A__weight": torch.ones(4)}, "must be a matrix"),
        ({"lora_A__weight": torch.ones(4, 16, dtype=torch.int8)}, "must be a matrix"),
        ({"lora_A__weight": torch.ones(0, 16), "lora_B__weight": torch.ones(32, 0)}, "matrix"),
        ({"lora_magnitude_vector": torch.ones(32)}, "DoRA"),
        ({"lora_embedding_A": torch.ones(4, 16)}, "embeddings"),
        ({"lora_B__bias": torch.ones(32)}, "Biases"),
    ],
)
def test_invalid_tensors_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor | None], message: str
) -> None:
    write_adapter(tmp_path, SHAPES, 4)
    change(tmp_path, **tensors)
    with pytest.raises(ModelError, match=message):
        read_adapter(tmp_path)


def test_ranks_are_bounded(tmp_path: Path) -> None:
    write_adapter(tmp_path, SHAPES, 9)
    assert read_adapter(tmp_path, 9).max_rank == 9
    with pytest.raises(ModelError, match="rank 9, above max_lora_rank=8"):
        read_adapter(tmp_path, 8)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    write_adapter(tmp_path, SHAPES).joinpath(WEIGHTS).rename(tmp_path / "adapter_model.bin")
    for function in (read_adapter, adapter_digest):
        with pytest.raises(ModelError, match=r"adapter_model.bin is not read"):
            function(tmp_path)


def test_damaged_empty_and_huge_files_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, SHAPES)
    content = (tmp_path / WEIGHTS).read_bytes()
    for damaged in (b"", content[:100], b"\xff" * 8 + content[8:]):
        (tmp_path / WEIGHTS).write_bytes(damaged)
        with pytest.raises(ModelError, match="not a valid safetensors file"):
            read_adapter(tmp_path)
    save_file({}, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match="changes nothing"):
        read_adapter(tmp_path)
    with (tmp_path / WEIGHTS).open("wb") as file:
        file.truncate(MAX_WEIGHT_BYTES + 1)  # a sparse file, which takes no space
    with pytest.raises(ModelError, match="the limit is"):
        read_adapter(tmp_path)


def test_the_digest_covers_config_and_weights(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", SHAPES, seed=1)
    write_adapter(tmp_path / "b", SHAPES, seed=1)
    first = adapter_digest(tmp_path / "a")
    assert adapter_digest(tmp_path / "b") == first
    config = json.loads((tmp_path / "b" / CONFIG).read_text())
    (tmp_path / "b" / CONFIG).write_text(json.dumps(config | {"lora_alpha": 2}))
    write_adapter(tmp_path / "c", SHAPES, seed=2)
    assert len({first, adapter_digest(tmp_path / "b"), adapter_digest(tmp_path / "c")}) == 3
