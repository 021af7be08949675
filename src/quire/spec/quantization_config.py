"""Read how a checkpoint's weights are quantized, from its config. No torch.

The input is `quantization_config`; in older checkpoints `compression_config`, or a
quantize_config.json next to the config. The output is a `QuantizationConfig`, which maps a module's
name to the storage format of its weight. It covers weights only. Settings of keys and values are
read elsewhere (models/checkpoint/kv_scales.py). Activations keep the model's dtype, even if the
config would quantize them. An unknown field that may change a weight is rejected.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.spec.config_fields import Fields

WHAT_TO_DO = "take the checkpoint that was not quantised, and --quantization, or a GGUF file"

# Storage formats of weights, by the names that `models/quantised` uses.
GPTQ, AWQ, PACKED, INTEGERS, FLOAT8, FLOAT4, FLOAT4_BLOCKS = (
    "gptq", "awq", "pack-quantized", "int-quantized", "float-quantized", "mxfp4-pack-quantized",
    "mxfp4",
)  # fmt: skip

# Fields that describe how the quantizer ran, or that the readers below handle.
_GPTQ_NOTES = {
    "quant_method", "desc_act", "sym", "lm_head", "damp_percent", "damp_auto_increment",
    "static_groups", "true_sequential", "model_name_or_path", "model_file_base_name", "meta",
    "dataset", "tokenizer", "batch_size", "pad_token_id", "block_name_to_quantize",
    "module_name_preceding_first_block", "modules_in_block_to_quantize", "model_seqlen",
    "use_cuda_fp16", "max_input_length", "cache_block_outputs", "exllama_config", "use_exllama",
    "disable_exllama", "act_group_aware", "mse", "gptaq", "foem", "cache_examples_on_gpu",
    "quantizer", "checkpoint_format", "format", "bits", "wbits", "group_size", "dynamic",
    "pack_dtype", "backend", "method", "use_triton", "inject_fused_attention",
    "inject_fused_mlp", "version", "fail_safe", "fallback",
}  # fmt: skip
_AWQ_NOTES = _GPTQ_NOTES | {
    "w_bit", "q_group_size", "zero_point", "modules_to_not_convert", "do_fuse", "modules_to_fuse",
    "fuse_max_seq_len", "duo_scaling", "export_compatible", "apply_clip",
}  # fmt: skip
_FP8_NOTES = {
    "quant_method", "activation_scheme", "weight_block_size", "dequantize", "fmt", "scale_fmt",
    "expert_dtype", "modules_to_not_convert", "ignored_layers", "ignore", "modules_to_convert",
    "activation_scale_ub", "kv_cache_scheme", "kv_cache_quant_method", "producer", "version",
    "weight_per_tensor", "act_per_tensor",
}  # fmt: skip
_MODELOPT_NOTES = {
    "quant_method", "quant_algo", "ignore", "exclude_modules", "config_groups", "producer",
    "kv_cache_quant_algo", "kv_cache_scheme", "quantization", "version",
}  # fmt: skip
_COMPRESSED_NOTES = {
    "quant_method", "config_groups", "ignore", "format", "quantization_status", "kv_cache_scheme",
    "global_compression_ratio", "version", "run_compressed", "dequantize",
    "use_optimized_inference",
}  # fmt: skip
_MXFP4_NOTES = {"quant_method", "modules_to_not_convert", "dequantize"}
_WEIGHTS_NOTES = {
    "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic",
    "actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype",
}  # fmt: skip
_GROUP_NOTES = {"targets", "weights", "input_activations", "output_activations", "format"}

FP8_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
HEAD = "lm_head"
CLASSES = ("Linear", "LinearBase")  # names for all quantized layers in targets


@dataclass(frozen=True)
class StoredWeight:
    """The storage format of a weight [N, K]."""

    form: str  # one of the formats above
    bits: int  # bits of a value
    group_size: int = 0  # inputs that share a scale; 0 for all
    rows: int = 1  # outputs that share a scale; 0 for all
    has_zeros: bool = False  # whether zero points may differ from the middle of the range
    zero_offset: int = 0  # number to add to stored zero points
    sorts_inputs: bool = False  # whether inputs were sorted before grouping


@dataclass(frozen=True)
class QuantizationConfig:
    """The modules that are quantized, and their storage formats.

    A target is a module's name, `re:` with a pattern for the start of the name, or a class of
    layers. `excluded` is what the config claims; the weight files are decisive."""

    method: str  # the config's name of the method
    stored: tuple[tuple[str, StoredWeight | None], ...]  # by target; None for plain weights
    excluded: tuple[str, ...] = ()  # targets that are not quantized

    def stored_as(self, module: str) -> StoredWeight | None:
        """Return the storage format of a linear layer's weight; None if it is plain."""
        found = (
            stored_weight for target, stored_weight in self.stored if _is_target(target, module)
        )
        return next(found, None)

    def excludes(self, module: str) -> bool:
        """Return whether the config excludes the module from quantization."""
        return any(_is_target(target, module) for target in self.excluded)


def quantization_config(config: Fields) -> QuantizationConfig | None:
    """Read how weights are quantized; None if they are not. Raises ModelError for an unsupported
    method."""
    quantised = config.inner("quantization_config") or config.inner("compression_config")
    if quantised is None:
        return None
    method = quantised.text("quant_method", "")
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise quantised.error(
            "quant_method",
            f"this quantisation of weights is not supported (supported are {known}); {WHAT_TO_DO}",
        )
    return METHODS[method](quantised)


def _is_target(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module or target in CLASSES


# ---- GPTQ and AWQ ----------------------------------------------------------------------------


def _gptq(fields: Fields) -> QuantizationConfig:
    _refuse_unknown(fields, _GPTQ_NOTES)
    layout = _layout(fields, "gptq")
    if layout not in ("gptq", "gptq_v2"):
        name = "checkpoint_format" if fields.has("checkpoint_format") else "format"
        raise fields.error(name, f"only gptq and gptq_v2 are supported; {WHAT_TO_DO}")
    if fields.text("pack_dtype", "int32") != "int32":
        raise fields.error("pack_dtype", "only int32 is supported")
    bits = _bits(fields, "wbits" if fields.has("wbits") else "bits", (4, 8))
    offset = 1 if layout == "gptq" else 0
    sorts, has_zeros = fields.flag("desc_act"), not fields.flag("sym", True)
    base = StoredWeight(
        GPTQ, bits, _group_size(fields, "group_size"), 1, has_zeros, offset, sorts_inputs=sorts
    )
    excluded = () if fields.flag("lm_head") else (HEAD,)
    return QuantizationConfig("gptq", (*_overrides(fields, base), ("Linear", base)), excluded)


def _overrides(fields: Fields, base: StoredWeight) -> list[tuple[str, StoredWeight | None]]:
    """Read GPTQModel's `dynamic`: patterns with `-:` exclude modules, others set their sizes."""
    found: list[tuple[str, StoredWeight | None]] = []
    inner = fields.inner("dynamic")
    for pattern in [] if inner is None else inner.names():
        assert inner is not None
        target = "re:" + _pattern(inner, pattern, re.sub(r"^[-+]:", "", pattern))
        own = inner.inner(pattern)
        if pattern.startswith("-:") or own is None:
            found.append((target, None if pattern.startswith("-:") else base))
            continue
        _refuse_unknown(own, _GPTQ_NOTES)
        bits = _bits(own, "bits", (4, 8)) if own.has("bits") else base.bits
        group = _group_size(own, "group_size") if own.has("group_size") else base.group_size
        found.append((target, replace(base, bits=bits, group_size=group)))
    return found


def _awq(fields: Fields) -> QuantizationConfig:
    _refuse_unknown(fields, _AWQ_NOTES)
    name = next((n for n in ("version", "checkpoint_format", "format") if fields.has(n)), "version")
    if fields.text(name, "gemm").lower() != "gemm":
        raise fields.error(name, f"of awq only gemm is supported; {WHAT_TO_DO}")
    if fields.text("backend", "auto") == "llm-awq":
        raise fields.error("backend", f"of awq only gemm is supported; {WHAT_TO_DO}")
    if not fields.flag("zero_point", True):
        raise fields.error("zero_point", f"awq without zero points is not supported; {WHAT_TO_DO}")
    bits = _bits(fields, "w_bit" if fields.has("w_bit") else "bits", (4,))
    group = "group_size" if fields.has("group_size") else "q_group_size"
    stored = StoredWeight(AWQ, bits, _group_size(fields, group), 1, True)
    return QuantizationConfig("awq", (("Linear", stored),), _skipped(fields))


def _layout(fields: Fields, default: str) -> str:
    if fields.flag("is_marlin_format"):
        raise fields.error("is_marlin_format", f"that order has no reader; {WHAT_TO_DO}")
    name = "checkpoint_format" if fields.has("checkpoint_format") else "format"
    return fields.text(name, default).lower()


def _group_size(fields: Fields, name: str) -> int:
    """Return the inputs of a group; 0 for all, which these formats write as -1."""
    if not fields.has(name):
        return 128
    value = fields.value(name)
    if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or value > 0):
        raise fields.error(name, "it must be -1 or a whole number above 0")
    return 0 if value == -1 else value


def _bits(fields: Fields, name: str, known: tuple[int, ...]) -> int:
    bits = fields.integer(name, maximum=64)
    if bits not in known:
        raise fields.error(name, f"only {' and '.join(map(str, known))} are read; {WHAT_TO_DO}")
    return bits


# ---- 8 bits of floating point ----------------------------------------------------------------


def _fp8(fields: Fields) -> QuantizationConfig:
    """Read transformers' and vLLM's fp8: scales per block (128 x 128 by default) or tensor."""
    _refuse_unknown(fields, _FP8_NOTES)
    if fields.text("fmt", "e4m3") != "e4m3":
        raise fields.error("fmt", f"only e4m3 is supported; {WHAT_TO_DO}")
    if fields.text("expert_dtype", "fp8") != "fp8":
        raise fields.error("expert_dtype", f"only fp8 is supported; {WHAT_TO_DO}")
    if fields.value("modules_to_convert"):
        raise fields.error("modules_to_convert", "only linear layers are read in fp8")
    block = fields.value("weight_block_size")
    if block is None and not fields.is_null("weight_block_size"):
        block = [128, 128]
    rows, inputs = (0, 0) if block is None else _block(fields, "weight_block_size", block)
    stored = StoredWeight(FLOAT8, 8, inputs, rows)
    method = fields.text("quant_method", "")
    return QuantizationConfig(method, (("Linear", stored),), _skipped(fields))


def _block(fields: Fields, name: str, value: Any) -> tuple[int, int]:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    if not is_pair or not all(type(each) is int and each > 0 for each in value):
        raise fields.error(name, "it must be two whole numbers above 0")
    return value[0], value[1]


def _modelopt(fields: Fields) -> QuantizationConfig | None:
    _refuse_unknown(fields, _MODELOPT_NOTES)
    inner = fields.inner("quantization") or fields
    if inner is not fields:
        _refuse_unknown(
            inner, _MODELOPT_NOTES | {"group_size", "has_zero_point", "pre_quant_scale"}
        )
    algorithm = inner.text("quant_algo", "")
    if not algorithm:
        return None
    if algorithm not in FP8_ALGORITHMS:
        known = ", ".join(FP8_ALGORITHMS)
        raise inner.error("quant_algo", f"of modelopt {known} are supported; {WHAT_TO_DO}")
    side = 128 if algorithm == "FP8_PB_WO" else 0
    stored = StoredWeight(FLOAT8, 8, side, side)
    excluded = [*(inner.texts("ignore") or ()), *(inner.texts("exclude_modules") or ())]
    patterns = tuple("re:" + fnmatch.translate(each) for each in excluded)
    return QuantizationConfig("modelopt", (("Linear", stored),), patterns)


def _mxfp4(fields: Fields) -> QuantizationConfig:
    _refuse_unknown(fields, _MXFP4_NOTES)
    stored = StoredWeight(FLOAT4_BLOCKS, 4, 32)
    return QuantizationConfig("mxfp4", (("Linear", stored),), _skipped(fields))


def _skipped(fields: Fields) -> tuple[str, ...]:
    """Return transformers' excluded modules as targets: a pattern matches a name's start or end."""
    names = ("modules_to_not_convert", "ignored_layers", "ignore")
    keys = [key for name in names for key in fields.texts(name) or ()]
    if not any(map(fields.has, names)):
        keys = [HEAD]
    checked = [_pattern(fields, names[0], key) for key in keys]
    return tuple(rf"re:(?:(?:{key})(?:(?<=\.)|(?=\.|$))|.*{re.escape(key)}$)" for key in checked)


# ---- compressed-tensors ----------------------------------------------------------------------


def _compressed(fields: Fields) -> QuantizationConfig | None:
    groups = fields.inner("config_groups")
    if groups is None:
        return None
    _refuse_unknown(fields, _COMPRESSED_NOTES | {"sparsity_config", "compression_ratio"})
    sparsity = fields.inner("sparsity_config")
    if sparsity is not None and sparsity.text("format", "dense") != "dense":
        raise sparsity.error("format", f"sparse weights are not supported; {WHAT_TO_DO}")
    if fields.text("quantization_status", "compressed") != "compressed":
        raise fields.error("quantization_status", "only compressed checkpoints are read")
    found: list[tuple[str, StoredWeight | None]] = []
    for name in groups.names():
        group = groups.inner(name)
        if group is None:
            raise groups.error(name, "it must be an object with the fields targets and weights")
        stored = _group(group, fields)
        found += [(_target(group, each), stored) for each in group.texts("targets") or ()]
    found.sort(key=lambda each: (each[0] in CLASSES, each[0].startswith("re:"), each[0]))
    ignored = tuple(_target(fields, each) for each in fields.texts("ignore") or ())
    return QuantizationConfig("compressed-tensors", tuple(found), ignored)


def _group(group: Fields, config: Fields) -> StoredWeight | None:
    """Read one scheme; None if it concerns activations only."""
    _refuse_unknown(group, _GROUP_NOTES)
    weights = group.inner("weights")
    if weights is None:
        return None
    _refuse_unknown(weights, _WEIGHTS_NOTES)
    if weights.value("dynamic"):
        raise weights.error("dynamic", "weights have their own scales")
    owner = group if group.has("format") else config
    form, kind = owner.text("format", ""), weights.text("type", "int")
    if form == "naive-quantized":
        form = FLOAT8 if kind == "float" else INTEGERS
    if form not in (PACKED, INTEGERS, FLOAT8, FLOAT4):
        known = f"{PACKED}, {INTEGERS}, {FLOAT8}, {FLOAT4}"
        raise owner.error("format", f"of compressed-tensors {known} are supported; {WHAT_TO_DO}")
    if kind != ("float" if form in (FLOAT8, FLOAT4) else "int"):
        raise weights.error("type", f"{form} does not hold that")
    bits = weights.integer("num_bits", default=8, maximum=64)
    known_bits = {FLOAT8: (8,), FLOAT4: (4,)}.get(form, (4, 8))
    if bits not in known_bits:
        raise weights.error("num_bits", f"of {form} {known_bits} are read; {WHAT_TO_DO}")
    rows, inputs = _scope(weights, form)
    has_zeros = not weights.flag("symmetric", True)
    if has_zeros and form in (FLOAT8, FLOAT4):
        raise weights.error("symmetric", f"{form} has no zero points")
    sorts = weights.value("actorder") in (True, "group")
    return StoredWeight(form, bits, inputs, rows, has_zeros, sorts_inputs=sorts)


def _scope(weights: Fields, form: str) -> tuple[int, int]:
    """Return the numbers of outputs and inputs that share a scale; 0 for all."""
    size = weights.value("group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.text("strategy", default).lower()
    if form == FLOAT4 and (strategy != "group" or size != 32):
        raise weights.error("group_size", "mxfp4 has groups of 32")
    if strategy == "block":
        return _block(weights, "block_structure", _block_of_text(weights.value("block_structure")))
    if strategy == "group":
        return 1, weights.integer("group_size")
    if strategy not in ("tensor", "channel"):
        raise weights.error("strategy", f"weights in {form} have none of that kind; {WHAT_TO_DO}")
    return (0, 0) if strategy == "tensor" else (1, 0)


def _block_of_text(value: Any) -> Any:
    """Return a block's sides; a text such as `128x128` is the old notation."""
    is_text = isinstance(value, str) and re.fullmatch(r"\d{1,6}x\d{1,6}", value)
    return [int(each) for each in value.split("x")] if is_text else value


# ---- shared helpers --------------------------------------------------------------------------


def _target(fields: Fields, target: str) -> str:
    if target.startswith("re:"):
        _pattern(fields, "targets", target.removeprefix("re:"))
    return target


def _pattern(fields: Fields, name: str, pattern: str) -> str:
    """Return a regular expression after a check that it compiles. Raises ModelError."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise fields.error(name, f"{pattern!r} is not a regular expression: {error}") from error
    return pattern


def _refuse_unknown(fields: Fields, known: set[str]) -> None:
    """Raise ModelError for a field that is not in `known`, unless its value is false or empty."""
    for name in fields.names():
        if name not in known and fields.value(name):
            raise fields.error(name, f"its effect on weights is not known; {WHAT_TO_DO}")


METHODS: Mapping[str, Callable[[Fields], QuantizationConfig | None]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
    "mxfp4": _mxfp4,
}
