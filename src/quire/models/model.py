"""What every model is, and what those with learned positions share.

Shape legend: T tokens, R rows, D model dim, V vocabulary, N heads, H head dim, E numbers of a token
that cross from one stage to the next, F all that a model shows of a token (`Reads`).
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


class Reads:
    """What enters some layers, side by side in memory that every forward pass writes again. A head
    drafts by it (eagle3.py).

    layers: numbers of layers, each of which stands for what enters it, as transformers'
    `hidden_states` do; the number behind the last layer's stands for what that returns, before the
    last norm. most_tokens: of a step, where the memory may not move later (graphs were recorded).
    """

    def __init__(self, layers: Sequence[int], most_tokens: int = 0) -> None:
        self.layers = tuple(layers)
        self._most_tokens, self._memory = most_tokens, torch.empty(0, 0)

    def keep(self, layer: int, x_TD: torch.Tensor, residual_TD: torch.Tensor | None) -> None:
        """Write the sum of both, if the layer that they enter is one of these."""
        for place, each in enumerate(self.layers):
            if each == layer:
                num_tokens, size = x_TD.shape
                into_TF = self._room(x_TD)[:num_tokens]
                add_into(into_TF[:, place * size : (place + 1) * size], x_TD, residual_TD)

    def last(self, num_tokens: int) -> torch.Tensor:
        """Return what the last forward pass has left, [T, F], valid until the next."""
        return self._memory[:num_tokens]

    def _room(self, x_TD: torch.Tensor) -> torch.Tensor:
        num_tokens, size = x_TD.shape
        memory = self._memory
        if len(memory) < num_tokens or memory.dtype != x_TD.dtype or memory.device != x_TD.device:
            num_tokens = max(num_tokens, self._most_tokens)
            self._memory = x_TD.new_empty(num_tokens, len(self.layers) * size)
        return self._memory


class Model(nn.Module):
    """A model, up to the logits of its head; or a stage of one, which has some of its layers.

    base_prefix: what checkpoints of the bare decoder leave out of their tensors' names.
    ignored_tensors: ends of the names of tensors that no layer needs. head_tensor: the head's.
    only_operations: whether it computes nothing but by quire's operations. runs_by: whose class it
    is, for people. shares_layers: what a class of another package says of itself if ranks can share
    its layers: it takes its numbers of heads from LayerPlace, not from the spec. shows_states:
    whether it can show what enters its layers. reads: what it shows, if that was asked for.
    has_stages: whether it can be cut into stages. entering: numbers of each
    token that the stage before hands over, 0 on the first; leaving: that go to the next stage, 0 on
    the last; dtype: theirs. elsewhere: beginnings of the names of tensors that other ranks have.
    head: None but on the last stage. kept_as: the key of the weight cache's file that holds its
    weights, if they are kept. position_axes: of the positions, 3 with M-RoPE. vision: the tower of
    a model that reads images. encoder_memory: what tokens with ids below 0 read (ops/embedding.py),
    [slots, numbers of the tower's rows].
    """

    base_prefix = ""
    head_tensor = "lm_head.weight"
    ignored_tensors: tuple[str, ...] = ()
    only_operations = True
    runs_by = "a class of quire's"
    shares_layers = False
    shows_states = False
    reads: Reads | None = None
    has_stages = False
    entering = leaving = 0
    dtype: torch.dtype
    elsewhere: tuple[str, ...] = ()
    head: LMHead | None
    kept_as: str | None = None
    position_axes = 1
    vision: VisionTower | None
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
        """Return hidden states [T, D] after the last norm, or what goes to the next stage [T, E];
        ids int64 or int32, positions int64 [T], or [position_axes, T] if there are several axes.

        An id below 0 stands for row -1 - id of the encoder memory.
        inputs_embeds replaces the embedded ids, intermediate is what the stage before returned.
        """
        raise NotImplementedError

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] in the model's dtype; of a rank those of its tokens
        (RankPlace.vocabulary)."""
        assert self.head is not None, "the last stage has the head"
        logits_RV: torch.Tensor = self.head(hidden_RD)
        return logits_RV

    def take_encoder_memory(self, num_slots: int) -> torch.Tensor:
        """Allocate the encoder memory and return it, float32, or float64 for a model in float64.

        It is called before the model is traced, and the memory stays where it is.
        """
        assert self.vision is not None, "the model has a vision tower"
        dtype, device = accumulation_dtype(self.vision.dtype), self.vision.device
        self.encoder_memory = torch.zeros(num_slots, self.vision.width, dtype=dtype, device=device)
        return self.encoder_memory

    def let_read(self, layers: Sequence[int], most_tokens: int = 0) -> None:
        """Show from now on what enters these layers; see Reads. Raises ModelError for a model that
        cannot."""
        if not self.shows_states:
            raise ModelError(
                "an EAGLE-3 head reads the states between layers, which this model does not"
                f" expose: it runs by {self.runs_by}. Use another method of speculative_config"
                " (ngram, suffix, draft_model)."
            )
        self.reads = Reads(layers, most_tokens)

    def last_read(self, num_tokens: int) -> torch.Tensor:
        """Return what the last forward pass has shown, [T, F], of its tokens in their order. Valid
        until the next."""
        assert self.reads is not None, "let_read comes first"
        return self.reads.last(num_tokens)

    def leave_head(self, tensors: Sequence[str]) -> None:
        """Let the states be all that is used. The head shares the table of tokens then, and what
        files hold of it, or of these tensors by the ends of their names, is not the model's."""
        self.ignored_tensors = (*self.ignored_tensors, self.head_tensor, *tensors)
        self.head_tensor = ""

    def adopt(self, names: Iterable[str]) -> None:
        """Learn which tensors the weight files hold, before anything is filled from them."""

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return what the layers' sources may call a tensor of the weight files."""
        return name, f"{self.base_prefix}{name}"

    def ignores(self, name: str) -> bool:
        """Tell whether a tensor that no source names is harmless: a constant, a scale that is not
        for the layers (kv_scales.py), a tied head stored again, or another rank's."""
        if self.is_elsewhere(name):
            return True
        is_tied = self.head is not None and not self.head.sources()
        tied_head = is_tied and self.head_tensor in self.names_of(name)
        return tied_head or name.endswith(self.ignored_tensors)

    def is_elsewhere(self, name: str) -> bool:
        """Tell whether a tensor of the weight files is another rank's, which looks at it."""
        return any(each.startswith(self.elsewhere) for each in self.names_of(name))

    def take_place(
        self,
        factory: ParamFactory,
        layers: Sequence[str],
        before: Sequence[str],
        behind: Sequence[str],
        width: int,
    ) -> None:
        """Note what other stages have, and that E numbers cross. layers: what the modules of each
        layer of the whole model are in; before, behind: modules that stand before and behind the
        layers."""
        place, self.dtype = factory.place, factory.dtype
        here = place.layers(len(layers))
        others = [name for layer, name in enumerate(layers) if layer not in here]
        others += [] if place.is_first else before
        others += [] if place.is_last else behind
        self.elsewhere = tuple(f"{name}." for name in others)
        self.entering = 0 if place.is_first else width
        self.leaving = 0 if place.is_last else width


class PositionedModel(Model):
    """A model whose positions are a table that is added to the embedded tokens."""

    shows_states = has_stages = True
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
    """Queries, keys and values, attention and the output projection; nothing is rotated. heads:
    those that this rank has."""

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
