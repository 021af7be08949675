"""A checkpoint in the format of compressed-tensors, for vLLM: its layers' weights in 8 or 4 bits.

8 bits: a scale for each output, activations are rounded for each token as they come. 4 bits: a
scale for each group of inputs. The head, which is the embedding, stays as it is.

Shape legend: N outputs, K inputs, G groups of inputs.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUPS = (128, 32)  # the first that divides the hidden size
IN_A_WORD = 8  # numbers of 4 bits
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

Tensors = dict[str, torch.Tensor]


def in_8_bits(weight_nk: torch.Tensor) -> Tensors:
    values_nk = weight_nk.float()
    scale_n1 = values_nk.abs().amax(1, keepdim=True) / 127
    rounded_nk = (values_nk / scale_n1).round().clamp(-127, 127)
    return {"weight": rounded_nk.to(torch.int8), "weight_scale": scale_n1.to(torch.bfloat16)}


def in_4_bits(weight_nk: torch.Tensor, group: int) -> Tensors:
    """Return a weight [N, K] as packed numbers from 0 to 15 around 8. A word's lowest bits hold its
    first number."""
    outputs, inputs = weight_nk.shape
    values_ngk = weight_nk.float().unflatten(1, (-1, group))
    scale_ng = values_ngk.abs().amax(2) / 7
    numbers_ngk = (values_ngk / scale_ng[..., None]).round().clamp(-8, 7) + 8
    words = numbers_ngk.to(torch.int64).view(outputs, -1, IN_A_WORD)
    words = (words << (4 * torch.arange(IN_A_WORD))).sum(2)
    return {
        "weight_packed": (words - ((words >> 31) << 32)).to(torch.int32),  # the top bit is a sign
        "weight_scale": scale_ng.to(torch.bfloat16),
        "weight_shape": torch.tensor([outputs, inputs]),
    }


def quantization_config(bits: int, group: int) -> dict[str, Any]:
    """Return the quantization_config of config.json."""
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "channel"} if bits == 8 else {"strategy": "group", "group_size": group}
    each_token = {
        "num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token",
    }  # fmt: skip
    layers = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": each_token if bits == 8 else None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if bits == 8 else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": layers},
        "ignore": ["lm_head"],
    }


def write_compressed(checkpoint: Path, bits: int, directory: Path) -> Path:
    """Write a compressed checkpoint, unless the directory is complete."""
    done = directory / "complete"
    if done.exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    group = next(size for size in GROUPS if config["hidden_size"] % size == 0)
    tensors: Tensors = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if tensor.dim() == 2 and "embed_tokens" not in name:
            parts = in_8_bits(tensor) if bits == 8 else in_4_bits(tensor, group)
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{end}": part for end, part in parts.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = quantization_config(bits, group)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in COPIED:
        (directory / name).write_bytes((checkpoint / name).read_bytes())
    done.touch()
    return directory
