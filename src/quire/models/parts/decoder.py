"""The decoder of Llama and most later models: rotary attention and a gated feed-forward layer.

Shape legend: T tokens, R rows, D model dim, V vocabulary, N query heads, K KV heads, H head dim.

`DecoderOptions` holds the numbers and switches in which architectures differ. An architecture with
another structure (other norms, parallel branches) defines a layer class in its own file, from the
parts here. Layers pass the residual stream separately from the hidden states, so that the next norm
adds both in one operation.
"""

from collections.abc import Iterable
from typing import ClassVar, NamedTuple, Protocol, cast

import torch
from torch import nn

from quire.models.checkpoint.kv_scales import NAME_ENDS
from quire.models.model import HEADS, Model
from quire.models.parts.experts import ExpertList, SparseMLP, StackedExperts
from quire.models.parts.layers import (
    GATES,
    Attention,
    Embedding,
    HeadNorm,
    HeadWeights,
    Linear,
    LMHead,
    ParamFactory,
    RMSNorm,
    Sinks,
    activation,
)
from quire.models.parts.options import DecoderOptions
from quire.models.parts.rope import Rotary, fused_rows, head_order, rows_of_heads
from quire.ops.attention.base import AttentionBackend
from quire.ops.attention_inputs import Scores
from quire.ops.elementwise import add, concatenate, scale, soft_cap
from quire.ops.embedding import add_features, place
from quire.ops.fused_linear import ACTIVATIONS
from quire.spec.cuts import Cut
from quire.spec.model_spec import ModelSpec
from quire.spec.rope_options import RopeOptions

KV_HEADS = "num_key_value_heads"  # the setting, as errors name it


class LayerPlace(NamedTuple):
    """The arguments of every part of a layer. layer: index of the layer. name: prefix of its tensor
    names."""

    spec: ModelSpec
    options: DecoderOptions
    layer: int
    name: str
    factory: ParamFactory

    @property
    def heads(self) -> Cut:
        """Return the query heads of this rank."""
        return self.factory.place.cut(self.spec.num_heads, HEADS)

    @property
    def kv_heads(self) -> Cut:
        """Return the KV heads of this rank; several ranks share a head if ranks outnumber heads."""
        return self.factory.place.cut_or_repeat(self.spec.num_kv_heads, KV_HEADS)

    def inner(self, size: int, setting: str = "intermediate_size") -> Cut:
        """Return this rank's part of a feed-forward dimension. setting: setting that gives
        `size`."""
        return self.factory.place.cut(size, setting)


class LayerStep(NamedTuple):
    """The inputs of a step that all layers share. rotary_rows: None for layers without RoPE.
    positions_T: as Model's forward has them."""

    rotary_rows: torch.Tensor | None
    backend: AttentionBackend
    positions_T: torch.Tensor


class DecoderAttention(nn.Module):
    """The QKV projection, rotary embedding, attention and output projection.

    names: checkpoint modules below `inside` for queries, keys, values and output; two names if the
    checkpoint fuses queries, keys and values. by_head: whether the fused module interleaves the
    three per head. width: size of the input, if not the model's.
    """

    def __init__(
        self,
        at: LayerPlace,
        names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj"),
        inside: str = "self_attn",
        *,
        by_head: bool = False,
        width: int | None = None,
    ) -> None:
        super().__init__()
        spec, options, layer, name, factory = at
        *names_qkv, name_output = (f"{name}.{inside}.{each}" for each in names)
        name = f"{name}.{inside}"
        heads, kv_heads, size = at.heads, at.kv_heads, spec.head_dim
        self._heads, self._kv_heads, self._head_dim = heads.count, kv_heads.count, size
        rope = layer_rope(spec, options, layer)
        order = None
        if rope is not None:
            order = head_order(size, rope.rotated, interleaved=options.interleaved)
        parts = [heads.times(size), kv_heads.times(size), kv_heads.times(size)]
        outputs: list[Cut | list[Cut]] = [*parts]
        orders = [rows_of_heads(order, heads.whole), rows_of_heads(order, kv_heads.whole), None]
        if len(names_qkv) == 1:
            sizes = [part.whole for part in parts]
            outputs, orders = [parts], [fused_rows(orders, sizes, size, by_head=by_head)]
        inputs = spec.hidden_size if width is None else width
        self.qkv = Linear(names_qkv, inputs, outputs, factory, bias=options.qkv_bias, orders=orders)
        self.qk_norm: HeadWeights | None = None
        if options.qk_norm:
            self.qk_norm = head_norm(at, name, order)
        self.output = attention_output(at, name_output)
        factor = size**-0.5 if options.attention_scale is None else options.attention_scale
        self.attention = Attention(layer, Scores(factor, options.soft_cap))
        self.sinks = Sinks(f"{name}.sinks", heads, factory) if options.has_sinks else None

    def forward(self, x_TD: torch.Tensor, step: LayerStep) -> torch.Tensor:
        out_TD: torch.Tensor = self.output(self._attend(self.qkv(x_TD), step))
        return out_TD

    def fuses(self, x_TD: torch.Tensor) -> bool:
        """See FusedPart."""
        return self.qkv.fuses(x_TD, has_norm=True) and self.output.fuses(x_TD)

    def add_to(self, x_TD: torch.Tensor, norm: RMSNorm, step: LayerStep) -> torch.Tensor:
        """See FusedPart."""
        read_TM = self._attend(self.qkv.forward_normed(x_TD, norm), step)
        return self.output.forward_added(read_TM, x_TD)

    def _attend(self, qkv_TO: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """Return what the heads read, [T, N * H], for projected queries, keys and values."""
        rotary_rows, backend, _ = step
        heads, kv_heads = self._heads, self._kv_heads
        qkv_TMH = qkv_TO.view(-1, heads + 2 * kv_heads, self._head_dim)
        norm = self.qk_norm
        sinks_N = None if self.sinks is None else self.sinks.weight
        if rotary_rows is None:
            assert norm is None, "norms of heads come with rotation"
            q_TNH, k_TKH, v_TKH = qkv_TMH.split([heads, kv_heads, kv_heads], dim=1)
            return self.attention(q_TNH, k_TKH, v_TKH, backend, sinks_N)
        return self.attention.rotated(qkv_TMH, kv_heads, rotary_rows, norm, backend, sinks_N)


class GatedMLP(nn.Module):
    """The feed-forward layer down(activation(gate(x)) * up(x)).

    names: checkpoint modules below `inside`; two names if the checkpoint fuses gate and up. inner:
    inner size, if not the config's. setting: setting that gives it, named by errors.
    """

    def __init__(
        self,
        at: LayerPlace,
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
        inside: str = "mlp",
        inner: int | None = None,
        setting: str = "intermediate_size",
    ) -> None:
        super().__init__()
        inner = at.spec.intermediate_size if inner is None else inner
        size, bias, part = at.spec.hidden_size, at.options.mlp_bias, at.inner(inner, setting)
        *first, last = (f"{at.name}.{inside}.{each}" for each in names)
        outputs = [part, part] if len(first) == 2 else [[part, part]]
        self.gate_up = Linear(first, size, outputs, at.factory, bias=bias)
        self.down = Linear([last], part, [size], at.factory, bias=bias)
        self._gate = activation(at.spec.layers.activation, GATES)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.gate_up.forward_gated(x_TD, self._gate))
        return out

    def fuses(self, x_TD: torch.Tensor) -> bool:
        """See FusedPart."""
        is_known = self._gate in ACTIVATIONS
        return is_known and self.gate_up.fuses(x_TD, has_norm=True) and self.down.fuses(x_TD)

    def add_to(self, x_TD: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """See FusedPart."""
        inner_TF = self.gate_up.forward_normed(x_TD, norm, self._gate)
        return self.down.forward_added(inner_TF, x_TD)


FusedPart = DecoderAttention | GatedMLP
"""Parts of a layer that can be fused with their norm and their residual addition. `fuses` returns
whether the tokens of x [T, D] are; `add_to` then returns x + part(norm(x)), [T, D]."""


def after_norm(
    norm: nn.Module,
    part: nn.Module,
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor | None,
    *step: LayerStep,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a part of a layer on norm(x + residual). Return its output and x + residual, both [T, D].
    If the part is fused, return their sum and None."""
    # A subclass may compute something else than the fused operations do.
    is_plain = type(part) in (DecoderAttention, GatedMLP) and type(norm) is RMSNorm
    if is_plain and cast(FusedPart, part).fuses(x_TD):
        total_TD = x_TD if residual_TD is None else add(x_TD, residual_TD)
        return cast(FusedPart, part).add_to(total_TD, cast(RMSNorm, norm), *step), None
    x_TD, residual_TD = norm(x_TD, residual_TD)
    return part(x_TD, *step), residual_TD


class DecoderLayerKind(Protocol):
    """A class of layers that `Decoder` can build."""

    def __call__(self, at: LayerPlace) -> nn.Module: ...


class DecoderLayer(nn.Module):
    """Attention and feed-forward with a norm before each. The class variables hold the norms' names
    in checkpoints."""

    before_attention: ClassVar[str] = "input_layernorm"
    before_mlp: ClassVar[str] = "post_attention_layernorm"

    def __init__(self, at: LayerPlace) -> None:
        super().__init__()
        self.attention_norm = norm_of(at, self.before_attention)
        self.attention = self.make_attention(at)
        self.mlp_norm = norm_of(at, self.before_mlp)
        self.mlp = self.make_mlp(at)

    def make_attention(self, at: LayerPlace) -> nn.Module:
        return DecoderAttention(at)

    def make_mlp(self, at: LayerPlace) -> nn.Module:
        return feed_forward(at)

    def forward(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output of the feed-forward layer and the residual stream before it, both
        [T, D]; their sum is the stream after this layer. Fused layers return the sum and None."""
        x_TD, residual_TD = after_norm(self.attention_norm, self.attention, x_TD, residual_TD, step)
        return after_norm(self.mlp_norm, self.mlp, x_TD, residual_TD)


class SandwichLayer(DecoderLayer):
    """Attention and feed-forward, each between two norms."""

    after_attention: ClassVar[str]
    after_mlp: ClassVar[str]

    def __init__(self, at: LayerPlace) -> None:
        super().__init__(at)
        self.attention_end_norm = norm_of(at, self.after_attention)
        self.mlp_end_norm = norm_of(at, self.after_mlp)

    def forward(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See DecoderLayer."""
        x_TD, residual_TD = self.attention_norm(x_TD, residual_TD)
        x_TD = self.attention_end_norm(self.attention(x_TD, step))[0]
        x_TD, residual_TD = self.mlp_norm(x_TD, residual_TD)
        return self.mlp_end_norm(self.mlp(x_TD))[0], residual_TD


def attention_output(at: LayerPlace, name: str) -> Linear:
    """Build the output projection of attention."""
    spec, heads = at.spec, at.heads.times(at.spec.head_dim)
    return Linear([name], heads, [spec.hidden_size], at.factory, bias=at.options.output_bias)


def head_norm(at: LayerPlace, name: str, order: torch.Tensor | None) -> HeadNorm:
    """Build the norms of query and key heads. name: prefix of the attention's tensor names. order:
    permutation of a head's dimensions, int64 [H] (rope.py)."""
    spec = at.spec
    return HeadNorm(
        (f"{name}.q_norm", f"{name}.k_norm"),
        (at.heads.count, at.kv_heads.count),
        spec.head_dim,
        spec.layers.norm_eps,
        at.factory,
        offset=at.options.norm_offset,
        order=order,
    )


def norm_of(at: LayerPlace, name: str) -> RMSNorm:
    """Build an RMS norm of a layer over the model's width."""
    size, eps = at.spec.hidden_size, at.spec.layers.norm_eps
    return RMSNorm(f"{at.name}.{name}", size, eps, at.factory, at.options.norm_offset)


def feed_forward(at: LayerPlace) -> nn.Module:
    """Build a mixture of experts for a sparse layer, else a gated feed-forward layer."""
    experts = at.options.experts
    if experts is not None and experts.is_sparse(at.layer):
        return SparseMLP(f"{at.name}.mlp", at.spec, experts, at.factory)
    return GatedMLP(at)


def layer_rope(spec: ModelSpec, options: DecoderOptions, layer: int) -> RopeOptions | None:
    """Return the options of a layer's rotary embedding; None for a layer without RoPE."""
    return options.ropes[layer] if options.ropes else spec.rope


class Decoder(Model):
    """A whole decoder model, or one pipeline stage. Stages pass [x | residual], so E = 2 D.

    embedding_name, norm_name: checkpoint modules below base_prefix.
    """

    base_prefix = "model."
    ignored_tensors = ("rotary_emb.inv_freq", *NAME_ENDS)
    exposes_states = has_stages = True
    layer_kind: ClassVar[DecoderLayerKind] = DecoderLayer
    embedding_name: ClassVar[str] = "embed_tokens"
    norm_name: ClassVar[str] = "norm"
    num_features = 0  # number of first layers that add encoder features (DeepStack)

    def __init__(self, spec: ModelSpec, options: DecoderOptions, factory: ParamFactory) -> None:
        super().__init__()
        size, prefix, self._options = spec.hidden_size, self.base_prefix, options
        place, table = factory.place, f"{prefix}{self.embedding_name}"
        names = [f"{prefix}layers.{layer}" for layer in range(spec.num_layers)]
        head = self.head_tensor.removesuffix(".weight")
        self.set_stage(factory, names, [table], [f"{prefix}{self.norm_name}", head], 2 * size)
        self._here = here = place.layers(spec.num_layers)
        vocabulary = place.vocabulary(spec.vocab_size)
        self.embedding = self.norm = self.head = None
        if place.has_table(is_tied=spec.tie_embeddings):
            self.embedding = Embedding(table, vocabulary, size, factory)
        ropes = [layer_rope(spec, options, layer) for layer in here]
        kinds = list(dict.fromkeys(rope for rope in ropes if rope is not None))
        self._rotaries = [Rotary(kind, spec.rotary_dim, factory) for kind in kinds]
        self._kind_of_layer = [-1 if rope is None else kinds.index(rope) for rope in ropes]
        self.layers = nn.ModuleList(
            self.layer_kind(LayerPlace(spec, options, layer, names[layer], factory))
            for layer in here
        )
        for module in self.layers.modules():
            if isinstance(module, ExpertList | StackedExperts):
                self.elsewhere += module.elsewhere
        if place.is_last:
            self.norm = self.make_norm(spec, factory)
            tied = self.embedding if spec.tie_embeddings else None
            self.head = LMHead(head, vocabulary, size, factory, tied)

    def adopt(self, names: Iterable[str]) -> None:
        """See Model. Detect whether files store experts one by one or in one tensor."""
        stored = {own for name in names for own in self.names_of(name)}
        for module in self.modules():
            if isinstance(module, ExpertList | StackedExperts):
                module.adopt(stored)

    def make_norm(self, spec: ModelSpec, factory: ParamFactory) -> nn.Module:
        """Build the norm after the last layer; the caller passes (x, residual)."""
        eps, offset = spec.layers.norm_eps, self._options.norm_offset
        return RMSNorm(
            f"{self.base_prefix}{self.norm_name}", spec.hidden_size, eps, factory, offset
        )

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: AttentionBackend,
        inputs_embeds_TD: torch.Tensor | None = None,
        intermediate_TE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See Model."""
        x_TD, residual_TD = self._begin(input_ids_T, inputs_embeds_TD, intermediate_TE)
        steps = [
            LayerStep(rotary(positions_T), attention, positions_T) for rotary in self._rotaries
        ]
        steps.append(LayerStep(None, attention, positions_T))  # the last, of kind -1
        reads = self.reads
        for number, layer, kind in zip(self._here, self.layers, self._kind_of_layer, strict=True):
            if reads is not None:
                reads.keep(number, x_TD, residual_TD)
            x_TD, residual_TD = layer(x_TD, residual_TD, steps[kind])
            if number < self.num_features and self.encoder_memory is not None:
                offset = (number + 1) * x_TD.shape[1]
                x_TD = add_features(x_TD, input_ids_T, self.encoder_memory, offset)
        if reads is not None:
            reads.keep(self._here.stop, x_TD, residual_TD)
        if self.norm is None:
            # After fused layers x is the whole stream.
            return concatenate(x_TD, torch.zeros_like(x_TD) if residual_TD is None else residual_TD)
        hidden_TD: torch.Tensor = self.norm(x_TD, residual_TD)[0]
        if reads is not None:
            reads.keep(self._here.stop + 1, hidden_TD, None)
        return hidden_TD

    def _begin(
        self,
        input_ids_T: torch.Tensor,
        inputs_embeds_TD: torch.Tensor | None,
        intermediate_TE: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the inputs x and residual of this stage's first layer, each [T, D]."""
        if intermediate_TE is not None:
            x_TD, residual_TD = intermediate_TE.chunk(2, dim=1)
            return x_TD, residual_TD
        assert self.embedding is not None, "the first stage has the table"
        x_TD = self.embedding(input_ids_T) if inputs_embeds_TD is None else inputs_embeds_TD
        if self._options.embedding_scale != 1.0:
            x_TD = scale(x_TD, self._options.embedding_scale)
        if self.encoder_memory is not None:
            x_TD = place(x_TD, input_ids_T, self.encoder_memory)
        return x_TD, None

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """See Model. Apply the model's scale and soft cap."""
        options, logits_RV = self._options, super().logits(hidden_RD)
        if options.logits_scale != 1.0:
            logits_RV = scale(logits_RV, options.logits_scale)
        if options.logits_soft_cap is not None:
            logits_RV = soft_cap(logits_RV, options.logits_soft_cap)
        return logits_RV
