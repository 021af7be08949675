"""Writes tiny checkpoints in the formats of quantisers, number by number as each format is defined.
Also writes the same model with the dequantised weights.

Shape legend: N outputs, K inputs, G groups of inputs.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OSS = {
    "intermediate_size": 32,
    "head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "swiglu_limit": 1.5,
}
OSS_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each place of a word holds
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])

Tensors = dict[str, torch.Tensor]
# Makes of a module's name and weight [N, K] its tensors, and what they stand for in float64.
Writer = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]


@dataclass(frozen=True)
class Format:
    """How a checkpoint is written. config: quantization_config. left_out: parts of the names of
    modules that stay as they are."""

    writer: Writer
    config: dict[str, Any]
    left_out: tuple[str, ...] = ("lm_head",)
    more: dict[str, Any] = field(default_factory=dict)


def write(
    directory: Path, form: Format, model_type: str = "llama", **config: Any
) -> tuple[Path, Path]:
    """Write a random model; returns where it is quantised, and where it is plain, in float64."""
    key = (id(form), model_type, json.dumps(config))
    if key not in _WRITTEN:
        with TemporaryDirectory() as made:
            _write(Path(made), form, model_type, **config)
            files = {path.relative_to(made): path.read_bytes() for path in Path(made).glob("*/*")}
        _WRITTEN[key] = (form, files)
    for path, content in _WRITTEN[key][1].items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)
    return directory / "quantised", directory / "plain"


# What `write` has written. The format is kept, so that its id stays its own.
_WRITTEN: dict[tuple[int, str, str], tuple[Format, dict[Path, bytes]]] = {}


def _write(directory: Path, form: Format, model_type: str, **config: Any) -> None:
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(model_type, **SIZES | config)
    )
    for name, parameter in made.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.25)
    quantised, plain = directory / "quantised", directory / "plain"
    made.save_pretrained(quantised)
    file = quantised / "model.safetensors"
    tensors: Tensors = {}
    numbers: Tensors = {}
    for name, tensor in load_file(file).items():
        module = name.removesuffix(".weight")
        is_linear = tensor.dim() == 2 and "embed" not in name and name != module
        if not is_linear or any(each in name for each in form.left_out):
            tensors[name], numbers[name] = tensor, tensor.double()
            continue
        parts, numbers[name] = form.writer(module, tensor)
        tensors |= {
            (end if end.startswith(module) else f"{module}.{end}"): part.contiguous()
            for end, part in parts.items()
        }
    save_file(tensors, file)
    raw = json.loads((quantised / "config.json").read_text())
    plain.mkdir()
    numbers = {name: tensor.contiguous() for name, tensor in numbers.items()}
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    (plain / "config.json").write_text(json.dumps(raw | {"dtype": "float64"}))
    raw |= {"quantization_config": form.config}
    (quantised / "config.json").write_text(json.dumps(raw))


# ---- rounding --------------------------------------------------------------------------------


def rounded(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool, rows: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers from 0 to 2^bits - 1 [N, K], scales float16 [N, G] and zero points [N, G]; rows:
    outputs that share them."""
    outputs, inputs = weight.shape
    values = weight.double().numpy()
    groups = -(-inputs // group)
    integers = np.zeros((outputs, inputs), np.int64)
    scales, zeros = np.zeros((outputs, groups), np.float16), np.zeros((outputs, groups), np.int64)
    most, middle = 2**bits - 1, 2 ** (bits - 1)
    for n in range(0, outputs, rows):
        for g in range(groups):
            at = np.s_[n : n + rows, g * group : (g + 1) * group]
            low, high = min(0.0, values[at].min()), max(0.0, values[at].max())
            if symmetric:
                scale, zero = np.float16(max(-low, high) / (middle - 1)), middle
            else:
                scale = np.float16((high - low) / most)
                zero = int(np.clip(np.rint(-low / float(scale)), 1, most))
            integers[at] = np.clip(np.rint(values[at] / float(scale)) + zero, 0, most)
            scales[n : n + rows, g], zeros[n : n + rows, g] = scale, zero
    return integers, scales, zeros


def meaning(
    integers: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group_of: np.ndarray
) -> torch.Tensor:
    """scale * (integer - zero) in float64. group_of: of each input."""
    shifted = integers - zeros[:, group_of]
    return torch.from_numpy(scales.astype(np.float64)[:, group_of] * shifted)


def in_words(numbers: np.ndarray, bits: int) -> torch.Tensor:
    """Pack the last dimension, from the lowest bits of int32 words on; what lacks is zero."""
    of_word = 32 // bits
    *front, count = numbers.shape
    padded = np.zeros((*front, -(-count // of_word) * of_word), np.uint64)
    padded[..., :count] = numbers
    words = padded.reshape(*front, -1, of_word) << (bits * np.arange(of_word, dtype=np.uint64))
    return torch.from_numpy(words.sum(-1).astype(np.uint32).view(np.int32))


# ---- formats ---------------------------------------------------------------------------------


def gptq(
    bits: int, group: int, *, symmetric: bool = True, desc_act: bool = False, version: int = 1
) -> Format:
    """group: -1 is all inputs of an output."""

    def writer(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        inputs = weight.shape[1]
        size = inputs if group == -1 else group
        order = np.arange(inputs)
        if desc_act:  # of all modules with the same inputs the same order
            seed = (
                0 if module.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")) else 1
            )
            order = np.random.default_rng(seed).permutation(inputs)
        integers, scales, zeros = rounded(weight[:, order], bits, size, symmetric=symmetric)
        back = np.argsort(order)
        integers, group_of = integers[:, back], (np.arange(inputs) // size)[back]
        stored = zeros - 1 if version == 1 else zeros
        tensors = {
            "qweight": in_words(integers, bits).T,
            "qzeros": in_words(stored.T, bits),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
            "bias": torch.zeros(len(weight), dtype=torch.float16),
        }
        return tensors, meaning(integers, scales, zeros, group_of)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric}
    config |= {"desc_act": desc_act, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    return Format(writer, config)


def awq(group: int) -> Format:
    def writer(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        integers, scales, zeros = rounded(weight, 4, group, symmetric=False)
        group_of = np.arange(weight.shape[1]) // group

        def interleaved(numbers: np.ndarray) -> torch.Tensor:
            parts = numbers.reshape(len(numbers), -1, 8)[..., list(AWQ_ORDER)]
            return in_words(parts.reshape(len(numbers), -1), 4)

        tensors = {
            "qweight": interleaved(integers.T),
            "qzeros": interleaved(zeros.T),
            "scales": torch.from_numpy(scales.T.copy()),
        }
        return tensors, meaning(integers, scales, zeros, group_of)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    return Format(writer, config | {"version": "gemm", "modules_to_not_convert": None})


def compressed(
    form: str, weights: dict[str, Any], targets: tuple[str, ...] = ("Linear",), **more: Any
) -> dict[str, Any]:
    group = {"targets": list(targets), "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    } | more


def integers_of(
    bits: int,
    strategy: str,
    group: int | None = None,
    *,
    symmetric: bool = True,
    packed: bool = True,
    ordered: bool = False,
) -> Format:
    """compressed-tensors: int32 words or bytes. strategy: tensor, channel or group."""

    def writer(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = weight.shape
        size = group or inputs
        rows = outputs if strategy == "tensor" else 1
        order = np.random.default_rng(0).permutation(inputs) if ordered else np.arange(inputs)
        integers, scales, zeros = rounded(
            weight[:, order], bits, size, symmetric=symmetric, rows=rows
        )
        back = np.argsort(order)
        integers, group_of = integers[:, back], (np.arange(inputs) // size)[back]
        middle = 2 ** (bits - 1)
        # In packed words integers and zero points stand from 0 on, elsewhere around 0.
        around = (zeros - middle).astype(np.int8)
        tensors = {"weight_scale": torch.from_numpy(scales).bfloat16()}
        scales = tensors["weight_scale"].double().numpy()
        if packed:
            tensors["weight_packed"] = in_words(integers, bits)
            tensors["weight_shape"] = torch.tensor([outputs, inputs])
        else:
            tensors["weight"] = torch.from_numpy((integers - middle).astype(np.int8))
        if not symmetric:
            is_in_words = packed and strategy != "tensor"
            tensors["weight_zero_point"] = (
                in_words(zeros.T, bits).T if is_in_words else torch.from_numpy(around)
            )
        if ordered:
            tensors["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
        if strategy == "tensor":
            for end in {"weight_scale", "weight_zero_point"} & tensors.keys():
                tensors[end] = tensors[end][0]
        return tensors, meaning(integers, scales, zeros, group_of)

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    weights |= {"group_size": group, "dynamic": False, "actorder": "group" if ordered else None}
    form = "pack-quantized" if packed else "int-quantized"
    return Format(writer, compressed(form, weights))


def float8(scope: str, config: dict[str, Any], *, end: str, scale: str = "float32") -> Format:
    """scope: tensor, channel, `group` (of 32 inputs) or `block` (32 x 32). end: of the scales'
    name. scale: their dtype, or `power` for e8m0 as bytes."""

    def writer(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = weight.shape
        rows, size = {
            "tensor": (outputs, inputs),
            "channel": (1, inputs),
            "group": (1, 32),
            "block": (32, 32),
        }[scope]
        blocks = -(-outputs // rows), -(-inputs // size)
        values = torch.zeros(outputs, inputs, dtype=torch.float8_e4m3fn)
        scales, numbers = torch.zeros(blocks), torch.zeros(outputs, inputs, dtype=torch.float64)
        for i in range(blocks[0]):
            for j in range(blocks[1]):
                at = slice(i * rows, (i + 1) * rows), slice(j * size, (j + 1) * size)
                found = weight[at].abs().max() / 448
                if scale == "power":
                    found = torch.exp2(torch.log2(found).ceil())
                else:
                    found = found.to(getattr(torch, scale)).float()
                eights = (weight[at] / found).to(torch.float8_e4m3fn)
                values.view(torch.uint8)[at] = eights.view(torch.uint8)
                scales[i, j], numbers[at] = found, found.double() * eights.double()
        if scale == "power":
            stored = (torch.log2(scales) + 127).to(torch.uint8)
        else:
            stored = scales.to(getattr(torch, scale))
        stored = stored.reshape(()) if scope == "tensor" else stored
        return {"weight": values, end: stored, "input_scale": torch.ones(1)}, numbers

    return Format(writer, config)


def e2m1(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [..., K] and exponents + 127 [..., K / 32], uint8, and what they stand for."""
    blocks = numbers.double().numpy().reshape(*numbers.shape[:-1], -1, 32)
    powers = np.ceil(np.log2(np.abs(blocks).max(-1, keepdims=True) / 6))
    scaled = blocks / 2.0**powers
    codes = np.abs(np.abs(scaled)[..., None] - E2M1).argmin(-1)
    values = np.where(scaled < 0, -E2M1[codes], E2M1[codes]) * 2.0**powers
    signed = (codes + 8 * (scaled < 0)).astype(np.uint8)
    return (
        torch.from_numpy(signed.reshape(numbers.shape)),
        torch.from_numpy((powers[..., 0] + 127).astype(np.uint8)),
        torch.from_numpy(values.reshape(numbers.shape)),
    )


def experts_in_blocks(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """gpt-oss: weights of all experts [E, K, N] become blocks [E, N, K / 32, 16] and scales."""
    stored, plain = dict(tensors), {name: tensor.double() for name, tensor in tensors.items()}
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        codes, exponents, values = e2m1(stored.pop(name).transpose(1, 2))
        halves = (codes[..., ::2] | (codes[..., 1::2] << 4)).unflatten(-1, (-1, 16))
        stored |= {f"{name}_blocks": halves, f"{name}_scales": exponents}
        plain[name] = values.transpose(1, 2).contiguous()
    return stored, plain


def float4() -> Format:
    """compressed-tensors' MXFP4."""

    def writer(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, exponents, numbers = e2m1(weight)
        halves = codes[:, ::2] | (codes[:, 1::2] << 4)
        return {"weight_packed": halves, "weight_scale": exponents}, numbers

    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group"}
    return Format(writer, compressed("mxfp4-pack-quantized", weights | {"group_size": 32}))


def write_gpt_oss(folder: Path, **config: Any) -> tuple[Path, Path]:
    """Write a gpt-oss with experts in MXFP4, as the hub has it; and plain, as `write` does."""
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("gpt_oss", **SIZES | OSS | config)
    )
    for name, parameter in made.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.25)
    quantised, plain = folder / "quantised", folder / "plain"
    for place in (quantised, plain):
        made.save_pretrained(place)
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num_experts, inputs, outputs = tensors[name].shape
        shape = (num_experts, outputs, inputs // 32)
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        scales = torch.randint(122, 126, shape, dtype=torch.uint8)
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, plain / "model.safetensors")
    save_file(stored, quantised / "model.safetensors")
    path = quantised / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": OSS_CONFIG}))
    return quantised, plain
