"""The base class of all models, and the base of models with learned positions.

Shape legend: T tokens, R rows, D model dim, V vocabulary, N heads, H head dim, E values per token
that one stage sends to the next, F values per token that `LayerInputs` copies.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from quire.base.errors import ModelError
from quire.models.parts.layers import Attention, Embedding, LayerNorm, Linear, LMHead, ParamFactory
from quire.models.vision.tower import VisionTower
from quire.ops.attention.base import AttentionBackend
from quire.ops.attention_inputs import Scores
from quire.ops.elementwise import add, add_into
from quire.ops.precision import accumulation_dtype
from quire.spec.cuts import Cut

HEADS = "num_attention_heads"  # the setting, as errors name it


class LayerInputs:
    """Copies of the inputs of selected layers, concatenated per token. Each forward pass overwrites
    them. A draft head reads them to propose draft tokens (draft_head.py).

    layers: indices of the layers, counted as in transformers' `hidden_states`. The number of layers
    selects the last layer's output before the final norm; one more selects the norm's output.
    max_tokens: capacity in tokens per step, set where recorded graphs forbid a later reallocation;
    0 without such a limit.
    """

    def __init__(self, layers: Sequence[int], max_tokens: int = 0) -> None:
        self.layers = tuple(layers)
        self._max_tokens, self._memory = max_tokens, torch.empty(0, 0)

    def keep(self, layer: int, x_TD: torch.Tensor, residual_TD: torch.Tensor | None) -> None:
        """Copy the sum of both inputs of a layer, [T, D], if the layer is selected."""
        for place, each in enumerate(self.layers):
            if each == layer:
                num_tokens, size = x_TD.shape
                into_TF = self._room(x_TD)[:num_tokens]
                add_into(into_TF[:, place * size : (place + 1) * size], x_TD, residual_TD)

    def last(self, num_tokens: int) -> torch.Tensor:
        """Return the copies of the last forward pass, [T, F]; the next pass overwrites them."""
        return self._memory[:num_tokens]

    def _room(self, x_TD: torch.Tensor) -> torch.Tensor:
        num_tokens, size = x_TD.shape
        memory = self._memory
        if len(memory) < num_tokens or memory.dtype != x_TD.dtype or memory.device != x_TD.device:
            num_tokens = max(num_tokens, self._max_tokens)
            self._memory = x_TD.new_empty(num_tokens, len(self.layers) * size)
        return self._memory


class Model(nn.Module):
    """A model from token ids to logits, or one pipeline stage with some of its layers."""

    base_prefix = ""  # prefix of tensor names that checkpoints of the bare decoder lack
    head_tensor = "lm_head.weight"  # name of the head's tensor
    ignored_tensors: tuple[str, ...] = ()  # suffixes of the names of tensors that no layer needs
    only_operations = True  # whether the forward pass consists of quire's operations alone
    runs_by = "a class of quire's"  # the implementation, as messages name it
    # Whether ranks can share the layers of a class of another package. Such a class takes its
    # numbers of heads from LayerPlace, not from the spec.
    shares_layers = False
    exposes_states = False  # whether `record_layer_inputs` can be called
    reads: LayerInputs | None = None  # copies of layer inputs, after `record_layer_inputs`
    routes: LayerInputs | None = None  # copies of routers' logits (models/parts/routes.py)
    has_stages = False  # whether pipeline stages can divide the layers
    entering = leaving = 0  # values per token from the previous stage, and to the next one
    dtype: torch.dtype  # dtype of these values
    elsewhere: tuple[str, ...] = ()  # prefixes of the names of tensors that other ranks hold
    head: LMHead | None  # None except on the last stage
    weights_key: str | None = None  # key of the weights in the weight cache, if they are cached
    position_axes = 1  # axes of the positions: 3 with M-RoPE
    vision: VisionTower | None  # vision tower of a model that reads images
    # Features that token ids below 0 read (ops/embedding.py), [slots, width of the tower's rows].
    encoder_memory: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.vision = None

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: AttentionBackend,
        inputs_embeds_TD: torch.Tensor | None = None,
        intermediate_TE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states [T, D] after the last norm, or the next stage's inputs [T, E].

        Ids are int64 or int32. Positions are int64 [T], or [position_axes, T] with several axes.
        A negative id stands for row -1 - id of the encoder memory. inputs_embeds replaces the
        embedded ids. intermediate is the output of the previous stage.
        """
        raise NotImplementedError

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] in the model's dtype. Under tensor parallelism, V counts the rank's
        part of the vocabulary (RankPlace.vocabulary)."""
        assert self.head is not None, "the last stage has the head"
        logits_RV: torch.Tensor = self.head(hidden_RD)
        return logits_RV

    def take_encoder_memory(self, num_slots: int) -> torch.Tensor:
        """Allocate and return the encoder memory: float32, or float64 for a model in float64.

        Call this before the model is traced, because traces hold the memory's address.
        """
        assert self.vision is not None, "the model has a vision tower"
        dtype, device = accumulation_dtype(self.vision.dtype), self.vision.device
        self.encoder_memory = torch.zeros(num_slots, self.vision.width, dtype=dtype, device=device)
        return self.encoder_memory

    def record_layer_inputs(self, layers: Sequence[int], max_tokens: int = 0) -> None:
        """Copy the inputs of these layers in each later forward pass; see Reads. Raises ModelError
        if the model does not support it."""
        if not self.exposes_states:
            raise ModelError(
                "a draft head reads the states between layers, which this model does not"
                f" expose: it runs by {self.runs_by}. Use another method of speculative_config"
                " (ngram, suffix, draft_model)."
            )
        self.reads = LayerInputs(layers, max_tokens)

    def recorded_inputs(self, num_tokens: int) -> torch.Tensor:
        """Return the layer inputs that the last forward pass copied, [T, F], in token order. The
        next pass overwrites them."""
        assert self.reads is not None, "record_layer_inputs comes first"
        return self.reads.last(num_tokens)

    def router_logits(self, num_tokens: int) -> torch.Tensor:
        """Return the routers' logits that the last forward pass copied, [T, M], in token order."""
        assert self.routes is not None, "record_routes comes first"
        return self.routes.last(num_tokens)

    @property
    def records(self) -> list[LayerInputs]:
        """Return all copies that the forward pass makes."""
        return [each for each in (self.reads, self.routes) if each is not None]

    def leave_head(self, tensors: Sequence[str]) -> None:
        """Drop the model's own head, for callers that use hidden states alone. Loading then ignores
        the head's tensor and all tensors whose names end with one of `tensors`."""
        self.ignored_tensors = (*self.ignored_tensors, self.head_tensor, *tensors)
        self.head_tensor = ""

    def adopt(self, names: Iterable[str]) -> None:
        """Adapt to the names of the tensors in the weight files, before any weight is loaded."""

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return the names by which sources of layers may refer to a tensor of the weight files."""
        return name, f"{self.base_prefix}{name}"

    def ignores(self, name: str) -> bool:
        """Return whether loading may ignore a tensor that no source names. Such tensors are
        constants, KV scales (kv_scales.py), copies of a tied head, and tensors of other ranks."""
        if self.is_elsewhere(name):
            return True
        is_tied = self.head is not None and not self.head.sources()
        tied_head = is_tied and self.head_tensor in self.names_of(name)
        return tied_head or name.endswith(self.ignored_tensors)

    def is_elsewhere(self, name: str) -> bool:
        """Return whether a tensor of the weight files belongs to another rank."""
        return any(each.startswith(self.elsewhere) for each in self.names_of(name))

    def set_stage(
        self,
        factory: ParamFactory,
        layers: Sequence[str],
        before: Sequence[str],
        after: Sequence[str],
        width: int,
    ) -> None:
        """Record which modules other stages hold, and set `entering` and `leaving`.

        layers: module name of each layer of the whole model. before, after: names of the modules
        that run before and after the layers. width: values per token between stages (E).
        """
        place, self.dtype = factory.place, factory.dtype
        here = place.layers(len(layers))
        others = [name for layer, name in enumerate(layers) if layer not in here]
        others += [] if place.is_first else before
        others += [] if place.is_last else after
        self.elsewhere = tuple(f"{name}." for name in others)
        self.entering = 0 if place.is_first else width
        self.leaving = 0 if place.is_last else width


class PositionedModel(Model):
    """A model that adds learned position embeddings to its token embeddings."""

    exposes_states = has_stages = True
    embedding: Embedding | None
    positions: Embedding | None
    layers: nn.ModuleList

    def __init__(self) -> None:
        super().__init__()
        self.norm: LayerNorm | None = None
        self.project_in: Linear | None = None
        self.project_out: Linear | None = None

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: AttentionBackend,
        inputs_embeds_TD: torch.Tensor | None = None,
        intermediate_TE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See Model. Hidden states and inputs_embeds have the embedding's width."""
        x_TD = intermediate_TE
        if x_TD is None:
            assert self.embedding is not None and self.positions is not None, "on the first stage"
            x_TD = self.embedding(input_ids_T) if inputs_embeds_TD is None else inputs_embeds_TD
            if self.project_in is not None:
                x_TD = self.project_in(x_TD)
            x_TD = add(x_TD, self.positions(positions_T))
        reads = self.reads
        for number, layer in enumerate(self.layers):
            if reads is not None:
                reads.keep(number, x_TD, None)
            x_TD = layer(x_TD, attention)
        if reads is not None:
            reads.keep(len(self.layers), x_TD, None)
        if self.norm is not None:
            x_TD = self.norm(x_TD)
        if self.project_out is not None:
            x_TD = self.project_out(x_TD)
        return x_TD


class PositionedAttention(nn.Module):
    """Attention without rotary positions, with its input and output projections. heads: attention
    heads of this rank."""

    def __init__(
        self, heads: Cut, head_dim: int, layer: int, qkv: Linear, output: Linear, scale: float
    ) -> None:
        super().__init__()
        self._shape = (-1, 3, heads.count, head_dim)
        self.qkv, self.output = qkv, output
        self.attention = Attention(layer, Scores(scale))

    def forward(self, x_TD: torch.Tensor, backend: AttentionBackend) -> torch.Tensor:
        q_TNH, k_TNH, v_TNH = self.qkv(x_TD).view(self._shape).unbind(1)
        out: torch.Tensor = self.output(self.attention(q_TNH, k_TNH, v_TNH, backend))
        return out
