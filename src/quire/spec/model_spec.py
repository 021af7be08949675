"""A model's shape, read from its Hugging Face config.json or its GGUF file, without torch.

`ModelSpec` holds the numbers for memory sizing, the scheduler and the layers. `cache_groups` lists
what each layer caches. The layers' options are read from `raw` on request, so a model of another
package may have its own options. For a model with images, `text_part` returns the text part as a
separate config.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError, ModelError
from quire.base.requests.pooling import PoolingSpec
from quire.spec.cache_group import CHUNKED, FULL, LATENT, STATE, STEP, WINDOW, CacheGroup
from quire.spec.config_defaults import DEFAULTS, defaults_of
from quire.spec.config_fields import MAX_COUNT, Fields, read_object, with_floats
from quire.spec.cuts import cut_evenly, cut_or_repeat, cut_vocabulary, layers_of_stage
from quire.spec.deepseek.latent_attention import LATENT_TYPES, LatentAttention, latent_attention
from quire.spec.deepseek.multi_token import MultiTokenLayer
from quire.spec.encoders import (
    ENCODER_TYPES,
    check_encoder,
    encoder_windows,
    is_encoder,
    padding_rows,
)
from quire.spec.gguf.config import gguf_config
from quire.spec.gguf.container import SUFFIX, GGUFFile, is_gguf
from quire.spec.layer_windows import CHUNKED_TYPES, layer_windows, linear_layers
from quire.spec.linear_attention import LinearAttention, linear_attention
from quire.spec.media_families import (
    FAMILIES,
    TEXT_PART,
    EncoderSize,
    family_part,
    knows_part,
    whole_fields,
)
from quire.spec.model_options import (
    EXPERTS,
    ROTARY_TYPES,
    ExpertOptions,
    GPT2Options,
    LayerOptions,
    OPTOptions,
    check_activation,
    expert_options,
    gpt2_options,
    layer_options,
    opt_options,
    refuse_what_is_ignored,
)
from quire.spec.quantization_config import QuantizationConfig, quantization_config
from quire.spec.rope_options import RopeOptions, longest_short, rope_options

# Types of which quire runs only the text part, and the text part's type.
NESTED = {
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
TIES, TIED = "tie_word_embeddings", ("gemma3",)  # types with a tied head by default
SAME_AS = {"kimi_k2": "deepseek_v3"}  # types that are another type under their own name
PART_OF = "text_part_of"  # field of a made config: the whole model's type
# Fields of the whole model's config that also apply to the text part. The first dtype wins.
DTYPES = ("dtype", "torch_dtype")
SHARED = (*DTYPES, "bos_token_id", "eos_token_id", "quantization_config")


def text_part(raw: dict[str, Any], *, has_class: bool = False) -> dict[str, Any]:
    """Return the text part of a config, or the config itself if it has no text part. A type that
    is another one under its own name gets the other's name.

    has_class: whether to raise ModelError for a text part that quire has no class for; otherwise
    such a config is returned unchanged. Raises ModelError if the text part is of another model.
    """
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and model_type in SAME_AS:
        return raw | {"model_type": SAME_AS[model_type]}
    if not isinstance(model_type, str) or model_type not in (*NESTED, *FAMILIES):
        return raw
    inner = Fields(raw).inner(TEXT_PART) or Fields({})
    if model_type in FAMILIES:
        family = FAMILIES[model_type]
        if not (has_class or knows_part(raw, family)):
            return raw
        found = family_part(raw, family)
        ties = Fields(raw).flag(TIES, model_type in TIED or inner.flag(TIES))
        ties = ties or (family.ties_by_part and inner.flag(TIES))
    else:
        found = _part(inner, model_type)
        ties = Fields(raw).flag(TIES, inner.flag(TIES))
    shared = _present(raw, SHARED)
    if _present(shared, DTYPES):
        found = {name: value for name, value in found.items() if name not in DTYPES}
    return found | shared | {TIES: ties, PART_OF: model_type}


def _part(inner: Fields, model_type: str) -> dict[str, Any]:
    own = NESTED[model_type]
    if inner.text("model_type", own) != own:
        raise inner.error("model_type", f"the text part of a {model_type} is a {own}")
    return {name: inner.value(name) for name in inner.names()} | {"model_type": own}


def _present(raw: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: raw[name] for name in names if raw.get(name) is not None}


# Implementations: quire's class, transformers' class, or transformers' class compiled by torch.
QUIRE, TRANSFORMERS, COMPILED = "quire", "transformers", "transformers, compiled"
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

# Files that older quantizers write next to a config, and the method that each implies.
QUANTIZATION_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}

# Types whose configs set neither KV heads nor the head dim.
UNGROUPED_TYPES = ("gpt2", "opt", "gpt_neox", *ENCODER_TYPES)

# Limits of config values: far beyond every model, and small enough for arithmetic.
MAX_LAYERS, MAX_HEADS, MAX_HEAD_DIM, MAX_VOCABULARY = 1 << 12, 1 << 14, 1 << 14, 1 << 26
POSITIONS = ("max_position_embeddings", "n_positions")
MIN_POSITIONS = 4  # tracing a model takes three tokens


@dataclass(frozen=True)
class ModelSpec:
    """The numbers of one model. Sizes are counts of elements.

    If ranks share the layers (`of_ranks`), the numbers describe one rank. If a pipeline has
    stages (`of_stage`), `cache_groups` covers one stage, with the whole model's layer numbers.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    dtype: str
    tie_embeddings: bool
    layer_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    is_long: bool = False  # whether longrope uses its divisors for long lengths
    implementation: str = field(default=QUIRE, repr=False)  # QUIRE also for models of packages
    linear_layers: tuple[int, ...] = field(default=(), repr=False)  # layers with linear attention
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    drafter: "ModelSpec | None" = field(default=None, repr=False)  # its layers follow this model's
    multi_token: MultiTokenLayer | None = field(default=None, repr=False)  # if this is one
    stage: int = field(default=0, repr=False)
    num_stages: int = field(default=1, repr=False)
    num_ranks: int = field(default=1, repr=False)  # ranks that share each layer
    pooling: PoolingSpec | None = field(default=None, repr=False)  # None for a generating model
    has_whole_experts: bool = field(default=False, repr=False)  # whether ranks hold whole experts
    encoder: EncoderSize | None = field(default=None, repr=False)  # of a vision tower on this rank

    def of_stage(self, stage: int, num_stages: int) -> "ModelSpec":
        """Return the spec of one stage. Raises ConfigError for more stages than layers."""
        layers_of_stage(self.num_layers, stage, num_stages)
        return replace(self, stage=stage, num_stages=num_stages)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Return one group per distinct window or chunk, full attention first, then one of states.

        The drafter's groups come last."""
        if self.drafter is None:
            return self.own_groups
        drafted = (each.after(self.num_layers) for each in self.drafter.own_groups)
        return (*self.own_groups, *drafted)

    @property
    def own_groups(self) -> tuple[CacheGroup, ...]:
        """Return the cache groups without the drafter's.

        Every stage has the same groups with the same numbers of blocks, even if none of the stage's
        layers is in a group."""
        here = layers_of_stage(self.num_layers, self.stage, self.num_stages)
        attending = {
            layer: window
            for layer, window in enumerate(self.layer_windows)
            if layer not in self.linear_layers
        }
        windows = sorted(set(attending.values()), key=lambda w: (w is not None, w or 0))
        groups = [
            CacheGroup(
                kind=self._kind(window),
                layers=tuple(
                    layer for layer, w in attending.items() if w == window and layer in here
                ),
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                window=window,
            )
            for window in windows
        ]
        if self.linear_layers:
            size = self.linear_attention.state_size
            layers = tuple(layer for layer in self.linear_layers if layer in here)
            groups.append(CacheGroup(STATE, layers, state_size=size))
        return tuple(groups)

    def _kind(self, window: int | None) -> str:
        if self.is_encoder:
            return STEP
        if window is not None:
            return CHUNKED if self.model_type in CHUNKED_TYPES else WINDOW
        return FULL if self.latent is None else LATENT

    @property
    def is_encoder(self) -> bool:
        """Whether quire runs the model as an encoder, which caches nothing."""
        return self.implementation == QUIRE and is_encoder(self.model_type)

    @property
    def identity(self) -> str:
        """Return a digest of the whole config, including fields that only a package's model reads,
        and of the way the model is divided."""
        text = json.dumps(self.raw, sort_keys=True, default=repr)
        text += "" if self.implementation == QUIRE else f" {self.implementation}"
        text += f" {self.linear_layers}" if self.linear_layers else ""
        text += "".join(f" {each}" for each in (self.drafter, self.multi_token) if each is not None)
        place = self.stage, self.num_stages, self.num_ranks
        text += f" {place}" if place != (0, 1, 1) else ""
        text += f" {self.pooling}" if self.pooling is not None else ""
        text += " whole" if self.has_whole_experts else ""
        return hashlib.sha256(f"{self!r} {text}".encode("utf-8", "surrogatepass")).hexdigest()

    def served_up_to(self, length: int | None) -> "ModelSpec":
        """Return the spec of an engine whose sequences have at most `length` tokens.

        None and numbers below 1 stand for `max_position`. A rotary embedding of type longrope uses
        its divisors for long lengths if sequences may be that long. transformers chooses for
        each forward pass; here all cached keys need one rotation.
        """
        length = length if length is not None and length > 0 else self.max_position
        short_limit = longest_short(self.fields, self.max_position)
        drafter = None if self.drafter is None else self.drafter.served_up_to(length)
        is_long = short_limit is not None and length > short_limit
        return replace(self, is_long=is_long, drafter=drafter)

    def check_length(self, length: int | None) -> None:
        """Raise ConfigError for a max_model_len beyond what the model was made for."""
        if length is not None and length > self.max_position:
            raise ConfigError(
                f"max_model_len={length} is more than the model supports ({self.max_position});"
                " remove it to use that value, or set auto to fit the memory."
            )

    def of_ranks(self, num_ranks: int, *, has_whole_experts: bool = False) -> "ModelSpec":
        """Return the numbers of one of `num_ranks` ranks that share all layers.

        Raises ConfigError if the layers cannot be divided."""
        if num_ranks == 1:
            return self
        if self.implementation != QUIRE:
            raise ConfigError(
                f"models of type {self.model_type!r} run by a class of transformers, which cannot"
                f" share layers among devices: remove tensor_parallel_size={num_ranks}, or use"
                " data_parallel_size."
            )
        heads = cut_evenly(self.num_heads, 0, num_ranks, "num_attention_heads")
        kv_heads = cut_or_repeat(self.num_kv_heads, 0, num_ranks, "num_key_value_heads")
        sparse, inner = self.experts, -(-self.intermediate_size // num_ranks)
        if sparse is None or not all(map(sparse.is_sparse, range(self.num_layers))):
            inner = cut_evenly(self.intermediate_size, 0, num_ranks, "intermediate_size").count
        cut_vocabulary(self.vocab_size, num_ranks - 1, num_ranks)
        found = replace(
            self,
            num_ranks=num_ranks,
            has_whole_experts=has_whole_experts and self.experts is not None,
            num_heads=heads.count,
            num_kv_heads=kv_heads.count,
            intermediate_size=inner,
            drafter=None
            if self.drafter is None
            else self.drafter.of_ranks(num_ranks, has_whole_experts=has_whole_experts),
        )
        _ = found.experts, found.linear_attention if self.linear_layers else None
        return found

    @property
    def fields(self) -> Fields:
        """Return the config, with transformers' defaults for absent fields."""
        return Fields(self.raw, defaults=defaults_of(self.model_type))

    @property
    def type_name(self) -> str:  # the whole model's type, even if this spec is its text part
        return (whole_fields(self.raw) or self.fields).text("model_type", self.model_type)

    @property
    def layers(self) -> LayerOptions:
        """Read the layers' options. Raises ModelError for invalid ones; so do the others."""
        return layer_options(self.fields, self.model_type)

    @property
    def rope(self) -> RopeOptions:
        return rope_options(self.fields, self.rotary_dim, self.max_position)

    @property
    def latent(self) -> LatentAttention | None:
        """Read the sizes of latent attention; None for a model without it. Its heads share one
        latent vector per token, so `num_kv_heads` is 1 and `head_dim` the vector's size."""
        if self.implementation != QUIRE or self.model_type not in LATENT_TYPES:
            return None
        heads = self.num_heads * self.num_ranks
        return latent_attention(self.fields, self.model_type, self.hidden_size, heads)

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that the rotary embedding covers."""
        return self.head_dim if self.latent is None else self.latent.rotated_dim

    @property
    def experts(self) -> ExpertOptions | None:
        found = expert_options(self.fields, self.model_type, self.num_layers)
        if found is None:
            return None
        return found.of_ranks(self.num_ranks, whole=self.has_whole_experts)

    @property
    def linear_attention(self) -> LinearAttention:
        """Read the sizes of the layers with linear attention."""
        return linear_attention(self.fields).of_ranks(self.num_ranks)

    @property
    def quantization(self) -> QuantizationConfig | None:
        """Read how the checkpoint's weights are quantized; None if they are not."""
        return quantization_config(self.fields)

    @property
    def gpt2(self) -> GPT2Options:
        return gpt2_options(self.fields)

    @property
    def opt(self) -> OPTOptions:
        return opt_options(self.fields, self.hidden_size)

    def check(self) -> None:
        """Raise ModelError for config values that quire's models do not support.

        Values that only a model's own file reads are not checked here."""
        fields = self.fields
        refuse_what_is_ignored(fields, self.model_type)
        _ = self.quantization
        if self.is_encoder:
            check_encoder(fields, self.model_type)
        check_activation(self.layers, self.model_type)
        _ = self.experts
        if self.linear_layers:
            _ = self.linear_attention
        _ = self.latent
        if self.model_type in ROTARY_TYPES:
            _ = self.rope
        elif self.model_type in ("gpt2", "opt"):
            _ = self.gpt2 if self.model_type == "gpt2" else self.opt

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        return sum(group.block_bytes(1, dtype_bytes) for group in self.cache_groups)


def load_spec(directory: Path) -> ModelSpec:
    """Read DIRECTORY/config.json, or the metadata of a GGUF file if the path is one, and check it.

    Raises ModelError if the config is absent or not supported."""
    spec = parse_spec(text_part(read_config(directory), has_class=True))
    if spec.model_type in DEFAULTS:
        spec.check()
    return spec


def read_config(directory: Path) -> dict[str, Any]:
    """Read DIRECTORY/config.json, or a GGUF file's metadata as a config. Raises ModelError if
    neither exists."""
    if is_gguf(directory):
        return gguf_config(GGUFFile(directory))
    try:
        raw: dict[str, Any] = with_floats(read_object(directory / "config.json"))
    except FileNotFoundError as error:
        raise ModelError(_no_config(directory)) from error
    return raw | _separate_quantization(directory, raw)


def _separate_quantization(directory: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the quantization_config from an old quantizer's separate file, if there is one."""
    if raw.get("quantization_config") or raw.get("compression_config"):
        return {}
    for name, method in QUANTIZATION_FILES.items():
        with contextlib.suppress(FileNotFoundError):
            return {"quantization_config": {"quant_method": method} | read_object(directory / name)}
    return {}


def _no_config(directory: Path) -> str:
    files = sorted(path.name for path in directory.glob(f"*{SUFFIX}"))
    if files:
        return f"{directory} has no config.json; to load {files[0]}, give the path of that file."
    return f"{directory} has no config.json, so it is not a model."


def parse_spec(raw: dict[str, Any]) -> ModelSpec:
    """Read the sizes in a Hugging Face config dictionary.

    Raises ModelError with field and value for a missing or invalid one."""
    fields = Fields(raw, defaults=defaults_of(raw.get("model_type")))
    model_type = fields.text("model_type", "")
    if not model_type:
        raise ModelError("config.json has no model_type.")
    num_layers = fields.integer("num_hidden_layers", "n_layer", maximum=MAX_LAYERS)
    hidden = fields.integer("hidden_size", "n_embd")
    heads = fields.integer("num_attention_heads", "n_head", maximum=MAX_HEADS)
    kv_heads, head_dim = _kv_sizes(fields, model_type, hidden, heads)
    spec = ModelSpec(
        model_type=model_type,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=_intermediate_size(fields, model_type, hidden),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", maximum=MAX_VOCABULARY),
        max_position=_max_position(fields, model_type),
        dtype=_dtype(fields),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        layer_windows=_windows(fields, model_type, num_layers),
        linear_layers=linear_layers(fields, model_type, num_layers),
        eos_token_ids=fields.integers("eos_token_id"),
        bos_token_id=_bos(fields),
        raw=raw,
    )
    return spec.served_up_to(None)


def _windows(fields: Fields, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    if is_encoder(model_type):
        return encoder_windows(fields, model_type, num_layers)
    return layer_windows(fields, model_type, num_layers)


def _max_position(fields: Fields, model_type: str) -> int:
    """Return the maximum number of tokens in a sequence."""
    before = padding_rows(fields, model_type)
    minimum = before + MIN_POSITIONS
    return fields.integer(*POSITIONS, minimum=minimum, maximum=MAX_COUNT) - before


def _kv_sizes(fields: Fields, model_type: str, hidden: int, heads: int) -> tuple[int, int]:
    """Return the number of KV heads and the head dim."""
    if model_type in LATENT_TYPES:
        return 1, latent_attention(fields, model_type, hidden, heads).latent_dim
    return _kv_heads(fields, model_type, heads), _head_dim(fields, model_type, hidden, heads)


def _kv_heads(fields: Fields, model_type: str, heads: int) -> int:
    """Return the number of KV heads; by default the number of query heads."""
    if model_type in UNGROUPED_TYPES:
        return heads
    found = fields.integer("num_key_value_heads", default=heads, maximum=MAX_HEADS)
    if heads % found:
        name = "num_key_value_heads"
        raise fields.error(name, f"it must divide num_attention_heads, {heads}")
    return found


def _head_dim(fields: Fields, model_type: str, hidden: int, heads: int) -> int:
    if model_type not in UNGROUPED_TYPES and fields.has("head_dim"):
        return fields.integer("head_dim", maximum=MAX_HEAD_DIM)
    if hidden % heads:
        name = "hidden_size" if fields.has("hidden_size") else "n_embd"
        raise fields.error(name, f"it is not a multiple of {heads} heads")
    return hidden // heads


def _intermediate_size(fields: Fields, model_type: str, hidden: int) -> int:
    if model_type == "gpt2":
        return fields.integer("n_inner", default=4 * hidden)
    if model_type == "opt":
        return fields.integer("ffn_dim")
    if model_type == "llama4_text":  # of layers without experts
        return fields.integer("intermediate_size_mlp")
    if model_type == "qwen3_5_moe_text":  # all layers have experts
        return fields.integer("moe_intermediate_size", default=EXPERTS[model_type][2])
    if model_type in DEFAULTS:
        return fields.integer("intermediate_size")
    return fields.integer("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)


def _dtype(fields: Fields) -> str:
    """Return the weights' dtype. `torch_dtype` is the field's old name."""
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    found = fields.text(name, "float32")
    if found not in DTYPE_BYTES:
        raise fields.error(name, f"it must be one of {', '.join(DTYPE_BYTES)}")
    return found


def _bos(fields: Fields) -> int | None:
    found = fields.integers("bos_token_id")
    if len(found) > 1:
        raise fields.error("bos_token_id", "a sequence begins with one token")
    return found[0] if found else None
