"""Which parameters a model has and which tensors fill them, from its config alone. No torch.

Shape legend: D model dim, F feed-forward dim, V vocabulary, W embedding dim, H head dim.

The layers themselves (decoder.py, gpt2.py, opt.py) say the same by what they make; tests hold both
together for every architecture. Used where there is no time for torch, or no torch: `quire fit`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from quire.base.errors import ModelError
from quire.base.model_options import ExpertOptions, OPTOptions
from quire.base.model_spec import ModelSpec
from quire.models import kv_scales
from quire.models.formats import StoredFormat, WeightFormats
from quire.models.options import DecoderOptions
from quire.ops.formats import Packing, Quantization

PLAIN, LINEAR, ROUTER, HEAD = "plain", "linear", "router", "head"
Shape = tuple[int, ...]
POSITION_OFFSET = 2  # of OPT: the first rows of its table of positions stand for padding


@dataclass(frozen=True)
class Part:
    """A parameter.

    kind: LINEAR, ROUTER and HEAD are packed, with shape [outputs, inputs], routers never quantised;
    PLAIN stays as it is. tensors: those of a checkpoint that fill it, with their shapes there.
    is_tied: the embedding's table is the same parameter, and its tensor fills it.
    """

    kind: str
    shape: Shape
    tensors: Mapping[str, Shape] = field(hash=False)
    is_tied: bool = False


@dataclass(frozen=True)
class FormatBytes:
    """What parts that are stored alike take together. name: such as `int4 in groups of 32`."""

    name: str
    num_bytes: int


Stored = Mapping[int, StoredFormat]


def outline(spec: ModelSpec) -> list[Part]:
    """All parameters, shared ones once. Raises ModelError for a model_type that is not ours."""
    if spec.model_type not in OUTLINES:
        known = ", ".join(sorted(OUTLINES))
        raise ModelError(
            f"the layers of models of type {spec.model_type!r} are not known without loading their"
            f" code; known are {known}. `quire doctor` looks at others."
        )
    return list(OUTLINES[spec.model_type](spec))


def base_prefix(spec: ModelSpec) -> str:
    """Return what checkpoints of the bare decoder leave out of their tensors' names."""
    return "transformer." if spec.model_type == "gpt2" else "model."


def ignored_tensors(spec: ModelSpec) -> tuple[str, ...]:
    """Ends of the names of tensors that checkpoints may hold and no layer asks for: constants, and
    scales that the cache takes (kv_scales.py)."""
    if spec.model_type == "gpt2":
        return (".attn.bias", ".attn.masked_bias")
    constants = () if spec.model_type == "opt" else ("rotary_emb.inv_freq",)
    return (*constants, *kv_scales.NAME_ENDS)


def planned_weights(
    parts: Sequence[Part], packing: Packing, formats: WeightFormats, stored: Stored
) -> list[FormatBytes]:
    """Count the bytes of the packed parts, by format, the largest first. stored: of parts,
    by index, whose weights are quantised in a GGUF file."""
    sizes: dict[str, int] = {}
    for index, part in enumerate(parts):
        name, num_bytes = packing.dtype, 0
        if part.kind == PLAIN:
            num_bytes = _count(part.shape) * packing.dtype_bytes
        else:
            format = {LINEAR: formats.layers, HEAD: formats.head}.get(part.kind)
            format = stored[index].quantization if index in stored else format
            name = format_name(format, packing.dtype)
            num_bytes = part_bytes(part, packing, format)
        sizes[name] = sizes.get(name, 0) + num_bytes
    found = [FormatBytes(name, num_bytes) for name, num_bytes in sizes.items()]
    return sorted(found, key=lambda each: -each.num_bytes)


def part_bytes(part: Part, packing: Packing, format: Quantization | None) -> int:
    """Count the bytes of a part that is packed."""
    if part.kind == HEAD:
        return packing.head_bytes(part.shape, format, part.is_tied)
    return packing.weight_bytes(part.shape, format)


def format_name(format: Quantization | None, dtype: str) -> str:
    """Name a format for people."""
    if format is None:
        return dtype
    if not format.group_size:
        return f"{format.format} with a scale per output"
    return f"{format.format} in groups of {format.group_size}"


def _count(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _linear(
    names: Sequence[str], inputs: int, outputs: Sequence[int], bias: bool, turned: bool = False
) -> Iterator[Part]:
    """Outline a layers.Linear; turned: the checkpoint holds [inputs, outputs]."""
    rows = sum(outputs)
    pairs = list(zip(names, outputs, strict=True))
    weights = {f"{n}.weight": (inputs, o) if turned else (o, inputs) for n, o in pairs}
    yield Part(LINEAR, (rows, inputs), weights)
    if bias:
        yield Part(PLAIN, (rows,), {f"{n}.bias": (o,) for n, o in pairs})


def _plain(name: str, *shape: int) -> Part:
    return Part(PLAIN, shape, {name: shape})


def _ends(spec: ModelSpec, table: str, width: int) -> Iterator[Part]:
    """The embedding's table and the head: one parameter where they are tied."""
    shape = (spec.vocab_size, width)
    if spec.tie_embeddings:
        yield Part(HEAD, shape, {f"{table}.weight": shape}, is_tied=True)
        return
    yield _plain(f"{table}.weight", *shape)
    yield Part(HEAD, shape, {"lm_head.weight": shape})


def _options(spec: ModelSpec) -> DecoderOptions:
    layers = spec.layers
    bias = layers.attention_bias
    if spec.model_type == "qwen2":
        return DecoderOptions(qkv_bias=True)
    if spec.model_type in ("qwen3", "qwen3_moe"):
        return DecoderOptions(bias, bias, qk_norm=True, experts=spec.experts)
    if spec.model_type == "llama":
        return DecoderOptions(bias, bias, layers.mlp_bias)
    return DecoderOptions()


def _decoder(spec: ModelSpec) -> Iterator[Part]:
    options, size = _options(spec), spec.hidden_size
    yield from _ends(spec, "model.embed_tokens", size)
    for layer in range(spec.num_layers):
        yield from _decoder_layer(spec, layer, options)
    yield _plain("model.norm.weight", size)


def _decoder_layer(spec: ModelSpec, layer: int, options: DecoderOptions) -> Iterator[Part]:
    name, size, experts = f"model.layers.{layer}", spec.hidden_size, options.experts
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    own = f"{name}.self_attn"
    yield _plain(f"{name}.input_layernorm.weight", size)
    names = [f"{own}.{each}_proj" for each in "qkv"]
    yield from _linear(names, size, [queries, keys, keys], options.qkv_bias)
    if options.qk_norm:
        norms = {f"{own}.{each}_norm.weight": (spec.head_dim,) for each in "qk"}
        yield Part(PLAIN, (spec.num_heads + spec.num_kv_heads, spec.head_dim), norms)
    yield from _linear([f"{own}.o_proj"], queries, [size], options.output_bias)
    yield _plain(f"{name}.post_attention_layernorm.weight", size)
    if experts is not None and experts.is_sparse(layer):
        yield from _experts(f"{name}.mlp", size, experts)
    else:
        yield from _gated_mlp(f"{name}.mlp", size, spec.intermediate_size, options.mlp_bias)


def _gated_mlp(name: str, size: int, inner: int, bias: bool = False) -> Iterator[Part]:
    names = [f"{name}.{each}_proj" for each in ("gate", "up")]
    yield from _linear(names, size, [inner, inner], bias)
    yield from _linear([f"{name}.down_proj"], inner, [size], bias)


def _experts(name: str, size: int, options: ExpertOptions) -> Iterator[Part]:
    """An expert's weights are parts of their own, also where a GPU has them in one tensor."""
    shape = (options.num_experts, size)
    yield Part(ROUTER, shape, {f"{name}.gate.weight": shape})
    for expert in range(options.num_experts):
        yield from _gated_mlp(f"{name}.experts.{expert}", size, options.inner_size)


def _layer_norm(name: str, size: int, affine: bool = True) -> Iterator[Part]:
    if affine:
        yield _plain(f"{name}.weight", size)
        yield _plain(f"{name}.bias", size)


def _gpt2(spec: ModelSpec) -> Iterator[Part]:
    size, inner = spec.hidden_size, spec.intermediate_size
    yield from _ends(spec, "transformer.wte", size)
    yield _plain("transformer.wpe.weight", spec.max_position, size)
    for layer in range(spec.num_layers):
        name = f"transformer.h.{layer}"
        yield from _layer_norm(f"{name}.ln_1", size)
        yield from _linear([f"{name}.attn.c_attn"], size, [3 * size], True, turned=True)
        yield from _linear([f"{name}.attn.c_proj"], size, [size], True, turned=True)
        yield from _layer_norm(f"{name}.ln_2", size)
        yield from _linear([f"{name}.mlp.c_fc"], size, [inner], True, turned=True)
        yield from _linear([f"{name}.mlp.c_proj"], inner, [size], True, turned=True)
    yield from _layer_norm("transformer.ln_f", size)


def _opt(spec: ModelSpec) -> Iterator[Part]:
    options, size, name = spec.opt, spec.hidden_size, "model.decoder"
    width = options.width
    yield from _ends(spec, f"{name}.embed_tokens", width)
    rows = spec.max_position + POSITION_OFFSET
    yield _plain(f"{name}.embed_positions.weight", rows, size)
    if width != size:
        yield from _linear([f"{name}.project_in"], width, [size], False)
        yield from _linear([f"{name}.project_out"], size, [width], False)
    for layer in range(spec.num_layers):
        yield from _opt_layer(spec, f"{name}.layers.{layer}", options)
    if options.has_final_norm:
        yield from _layer_norm(f"{name}.final_layer_norm", size, options.has_affine_norms)


def _opt_layer(spec: ModelSpec, name: str, options: OPTOptions) -> Iterator[Part]:
    size, inner = spec.hidden_size, spec.intermediate_size
    bias, affine = options.has_biases, options.has_affine_norms
    names = [f"{name}.self_attn.{each}_proj" for each in "qkv"]
    yield from _linear(names, size, [size] * 3, bias)
    yield from _linear([f"{name}.self_attn.out_proj"], size, [size], bias)
    yield from _layer_norm(f"{name}.self_attn_layer_norm", size, affine)
    yield from _linear([f"{name}.fc1"], size, [inner], bias)
    yield from _linear([f"{name}.fc2"], inner, [size], bias)
    yield from _layer_norm(f"{name}.final_layer_norm", size, affine)


OUTLINES: Mapping[str, Callable[[ModelSpec], Iterator[Part]]] = {
    "gpt2": _gpt2,
    "llama": _decoder,
    "mistral": _decoder,
    "opt": _opt,
    "qwen2": _decoder,
    "qwen3": _decoder,
    "qwen3_moe": _decoder,
}
