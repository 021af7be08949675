"""Adapters (LoRA) as PEFT writes them, with random matrices, the same as GGUF files of llama.cpp,
and checkpoints with one merged in."""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from quire.models.checkpoint.adapter_files import PREFIX, WEIGHTS
from quire.models.checkpoint.files import safetensors_shapes, weight_files
from quire.models.checkpoint.source import resolve_model
from quire.spec.adapter_config import CONFIG
from tests.support.models.gguf_facts import ARCHITECTURES, arranged, tensor_name
from tests.support.models.gguf_writer import F32, stored, write_gguf

Shape = tuple[int, int]  # outputs, inputs


def write_adapter(
    directory: Path,
    modules: Mapping[str, Shape],
    rank: int = 8,
    *,
    seed: int = 0,
    alpha: float = 16.0,
    size: float = 0.2,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """size: standard deviation of the matrices' numbers, divided by the square root of the rank."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in modules.items():
        for part, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
            values = torch.randn(shape, generator=generator) * size / math.sqrt(rank)
            tensors[f"{PREFIX}{name}.{part}.weight"] = values.to(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / WEIGHTS)
    ends = sorted({name.rpartition(".")[2] for name in modules})
    made = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ends}
    (directory / CONFIG).write_text(json.dumps(made | config))
    return directory


def write_parameters_adapter(
    directory: Path, model: torch.nn.Module, rank: int = 3, *, is_swapped: bool = False
) -> Path:
    """An adapter of the tensors of all experts of transformers' model, by `target_parameters`.
    is_swapped: whether A has the third dimension of a parameter in the place of the second one."""
    generator, tensors = torch.Generator().manual_seed(5), {}
    for name, parameter in _expert_parameters(model):
        count, second, third = parameter.shape
        inputs, outputs = (third, second) if is_swapped else (second, third)
        for part, shape in (("A", (rank * count, inputs)), ("B", (outputs, rank * count))):
            values = torch.randn(shape, generator=generator) * 0.2 / math.sqrt(rank)
            tensors[f"{PREFIX}{name}.lora_{part}.weight"] = values
    directory.mkdir(parents=True)
    save_file(tensors, directory / WEIGHTS)
    names = ["experts.gate_up_proj", "experts.down_proj"]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 6.0, "target_parameters": names}
    (directory / CONFIG).write_text(json.dumps(config))
    return directory


def merge_parameters(
    model: torch.nn.Module, adapter: Path, *, is_swapped: bool = False
) -> torch.nn.Module:
    """Add the changes of a parameters' adapter to transformers' model, as PEFT's documentation
    defines them: rank r of expert e is row e R + r of A, and column r E + e of B."""
    config, changes = json.loads((adapter / CONFIG).read_text()), load_file(adapter / WEIGHTS)
    for name, parameter in _expert_parameters(model):
        count = parameter.shape[0]
        down, up = (changes[f"{PREFIX}{name}.lora_{part}.weight"].double() for part in "AB")
        for expert in range(count):
            rows = torch.arange(config["r"])
            change = up[:, rows * count + expert] @ down[rows + expert * config["r"]]
            change *= config["lora_alpha"] / config["r"]
            parameter.data[expert] += change if is_swapped else change.T
    return model


def _expert_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the tensors of all experts, and the names of the modules that PEFT wraps."""
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            yield f"{name}.base_layer", module.gate_up_proj
            yield name, module.down_proj


def adaptable_shapes(directory: Path) -> dict[str, Shape]:
    """Shapes of all linear layers of a checkpoint whose names end as Llama's."""
    shapes = safetensors_shapes(weight_files(directory))
    names = {name: (shape[0], shape[1]) for name, shape in shapes.items() if "_proj" in name}
    return {name.removesuffix(".weight"): shape for name, shape in names.items()}


def write_demo_adapter(directory: Path, rank: int = 4, **more: Any) -> Path:
    """An adapter of all linear layers of the demo model."""
    modules = adaptable_shapes(resolve_model("demo").directory)
    return write_adapter(directory, modules, rank, **{"size": 0.5} | more)


def merge(base: Path, adapter: Path, directory: Path, turned: frozenset[str] = frozenset()) -> Path:
    """Write the base checkpoint with the adapter's changes, in float64. turned: modules whose
    weight is stored as [inputs, outputs]."""
    shutil.copytree(base, directory)
    config = json.loads((adapter / CONFIG).read_text())
    changes = load_file(adapter / WEIGHTS)
    for file in directory.glob("*.safetensors"):
        tensors = {name: each.double() for name, each in load_file(file).items()}
        for name in tensors:
            module = name.removesuffix(".weight")
            down = changes.get(f"{PREFIX}{module}.lora_A.weight")
            if down is None:
                continue
            up = changes[f"{PREFIX}{module}.lora_B.weight"]
            rank = len(down)
            root = math.sqrt(rank) if config.get("use_rslora") else rank
            change = config["lora_alpha"] / root * (up.double() @ down.double())
            tensors[name] += change.T if module in turned else change
        save_file(tensors, file, metadata={"format": "pt"})
    return directory


def to_gguf(adapter: Path, path: Path, model: Mapping[str, Any], kind: int = F32) -> Path:
    """Write an adapter of PEFT as llama.cpp's converter does. model: the base model's config."""
    tensors = {}
    for full, values in load_file(adapter / WEIGHTS).items():
        name, _, part = full.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        weight, matrix = f"{name}.weight", values.float().numpy()
        if _is_arranged(weight, part):
            matrix = arranged(weight, matrix, model)
        theirs = f"{tensor_name(weight, model['model_type'])}.{part.lower()}"
        tensors[theirs] = stored(np.ascontiguousarray(matrix), kind)
    made = {
        "general.type": "adapter",
        "general.architecture": ARCHITECTURES.get(model["model_type"], model["model_type"]),
        "adapter.type": "lora",
        "adapter.lora.alpha": float(json.loads((adapter / CONFIG).read_text())["lora_alpha"]),
    }
    return write_gguf(path, made, tensors)


def _is_arranged(weight: str, part: str) -> bool:
    """Whether the order of a weight's rows, or of columns in the last module of linear attention,
    concerns A or B. Adapters of GPT-2 are never transposed."""
    if any(name in weight for name in ("c_attn", "c_proj", "c_fc")):
        return False
    return part == ("lora_A" if "linear_attn.out_proj" in weight else "lora_B")
