"""Adapters (LoRA) as PEFT writes them, with random matrices, and checkpoints with one merged in."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from quire.models.checkpoint.adapter_files import PREFIX, WEIGHTS
from quire.spec.adapter_config import CONFIG

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
