"""EAGLE-3 heads: a few layers that propose draft tokens for a target model (arXiv 2503.01840).

Shape legend: T tokens, R rows, D model dim, E = 2 D outputs of a pass (the state and its norm), F
values of the target read per token, V the target's vocabulary, I ids of the head's vocabulary.

A head computes a state from the token at p + 1 and the target's states at p. For further draft
tokens, this state replaces the target's states:

    target's states at p -> fc -> norm --.
    token at p + 1 -> embedding -> norm --+-> attention -> feed-forward -> state -> norm -> logits

Tensors have the names of `speculators`; the authors' `midlayer` becomes `layers.0`. A head whose
checkpoint has no embedding shares the target's.
"""

from collections.abc import Iterable, Sequence
from types import MappingProxyType

import torch
from torch import nn

from quire.base.errors import ModelError
from quire.models.checkpoint.sources import Source
from quire.models.draft_head import DraftHead
from quire.models.model import Model
from quire.models.parts.decoder import (
    DecoderAttention,
    DecoderLayer,
    GatedMLP,
    LayerPlace,
    LayerStep,
    norm_of,
)
from quire.models.parts.layers import Embedding, Layer, Linear, LMHead, ParamFactory, RMSNorm
from quire.models.parts.options import DecoderOptions
from quire.models.parts.rope import Rotary
from quire.ops.attention.base import AttentionBackend
from quire.ops.collective import all_gather
from quire.ops.elementwise import concatenate, pad_width
from quire.ops.norms import rms_norm
from quire.spec.eagle3_spec import head_options
from quire.spec.model_spec import ModelSpec

EMBEDDING, IDS = "embed_tokens", "d2t"


class DraftIds(Layer):
    """The target's token for each id of the head, stored as the difference token - id."""

    neutral = MappingProxyType({"weight": 0.0})

    def __init__(self, num_ids: int, factory: ParamFactory) -> None:
        super().__init__()
        self.weight = factory.parameter(num_ids, dtype=torch.int64)

    def sources(self) -> list[Source]:
        return [Source(IDS, self.weight)]

    def tokens(self) -> torch.Tensor:
        """Return the target's token for each id, [I] int64."""
        return self.weight + torch.arange(len(self.weight), device=self.weight.device)


class ReadNorm(Layer):
    """RMS normalisation of the target's states: over all layers at once, or per layer."""

    neutral = MappingProxyType({"weight": 1.0})

    def __init__(self, names: Sequence[str], size: int, eps: float, factory: ParamFactory) -> None:
        super().__init__()
        self._names, self._eps = tuple(names), eps
        self.weight = factory.parameter(len(names), size)

    def forward(self, read_TF: torch.Tensor) -> torch.Tensor:
        parts = read_TF.view(-1, *self.weight.shape)
        return rms_norm(parts, self.weight, self._eps).flatten(1)

    def sources(self) -> list[Source]:
        return [
            Source(f"{name}.weight", row)
            for name, row in zip(self._names, self.weight.unbind(0), strict=True)
        ]


class FirstLayer(nn.Module):
    """Attention over the embedded token concatenated with the previous state, then feed-forward."""

    def __init__(self, at: LayerPlace, norm_first: bool) -> None:
        super().__init__()
        self._norm_first = norm_first
        self.token_norm = norm_of(at, "input_layernorm")
        self.state_norm = norm_of(at, "hidden_norm")
        self.attention = DecoderAttention(at, width=2 * at.spec.hidden_size)
        self.mlp_norm = norm_of(at, "post_attention_layernorm")
        self.mlp = GatedMLP(at)

    def forward(
        self, embedded_TD: torch.Tensor, state_TD: torch.Tensor, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [T, D] and the residual [T, D], as DecoderLayer does."""
        normed_TD = self.state_norm(state_TD)[0]
        x_TD = concatenate(self.token_norm(embedded_TD)[0], normed_TD)
        x_TD = self.attention(x_TD, step)
        x_TD, residual_TD = self.mlp_norm(x_TD, normed_TD if self._norm_first else state_TD)
        return self.mlp(x_TD), residual_TD


class Eagle3(DraftHead):
    """An EAGLE-3 head. size: D."""

    title = "EAGLE-3 head"
    ignored_tensors = ("t2d", "rotary_emb.inv_freq")
    head: LMHead

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__()
        head, layers, size = head_options(spec), spec.layers, spec.hidden_size
        bias = layers.attention_bias
        options = DecoderOptions(
            qkv_bias=bias, output_bias=bias, mlp_bias=layers.mlp_bias, qk_norm=head.qk_norm
        )
        self.target_layers, self.num_read = head.reads, len(head.reads) * head.target_size
        self._vocab_size, self.size, self.dtype = spec.vocab_size, size, factory.dtype
        self._norm_last = head.norm_last
        self.read_norm: ReadNorm | None = None
        if head.norm_of_all or head.norm_of_each:
            names = [f"fc_norm.{i}" for i in range(len(head.reads))]
            names = ["input_norm"] if head.norm_of_all else names
            width = self.num_read // len(names)
            self.read_norm = ReadNorm(names, width, layers.norm_eps, factory)
        self.num_out = 2 * size
        self.fc = Linear(["fc"], self.num_read, [size], factory)
        place = factory.place
        self._vocabulary, self._group = place.vocabulary(spec.vocab_size), place.tensor
        self._ids = place.vocabulary(head.num_ids)
        self.embedding = Embedding(EMBEDDING, self._vocabulary, size, factory)
        self._tokens: torch.Tensor | None = None
        places = [
            LayerPlace(spec, options, layer, f"layers.{layer}", factory)
            for layer in range(spec.num_layers)
        ]
        self.first_layer = FirstLayer(places[0], head.norm_first)
        self.layers = nn.ModuleList(DecoderLayer(place) for place in places[1:])
        self.norm = RMSNorm("norm", size, layers.norm_eps, factory)
        self.head = LMHead("lm_head", self._ids, size, factory, None)
        self.ids: DraftIds | None = DraftIds(head.num_ids, factory)
        self._rotary = Rotary(spec.rope, spec.head_dim, factory)

    def adopt(self, names: Iterable[str]) -> None:
        """See Model. Drop the embedding and the ids that the checkpoint lacks."""
        stored = {own for name in names for own in self.names_of(name)}
        if f"{EMBEDDING}.weight" not in stored:
            self.embedding = None
        if IDS not in stored:
            self.ids = None

    def names_of(self, name: str) -> tuple[str, ...]:
        """See Model. Accept both layouts, with or without the prefix `model.`."""
        own = name.removeprefix("model.")
        if own.startswith("midlayer."):
            own = f"layers.0.{own.removeprefix('midlayer.')}"
        return (own,)

    def attach(self, target: Model) -> None:
        """Share the target's embedding if the checkpoint has none. Raises ModelError if its width
        differs, or if an id is not a token of the target."""
        self._tokens = self._checked_tokens()
        if self.embedding is None:
            self.share_embedding(target, self.size)

    def _checked_tokens(self) -> torch.Tensor | None:
        """Return the token for each id, [I] int64; None if ids and tokens are equal."""
        num_ids = self._ids.whole
        if self.ids is None:
            if num_ids == self._vocab_size:
                return None
            raise ModelError(
                f"the EAGLE-3 head proposes {num_ids} of {self._vocab_size} tokens, but its weight"
                f" files have no {IDS}, which lists them. Download it again."
            )
        tokens = self.ids.tokens()
        is_inside = (tokens >= 0) & (tokens < self._vocab_size)
        if not bool(is_inside.all()) or len(tokens.unique()) < num_ids:
            raise ModelError(
                f"{IDS} of the EAGLE-3 head is invalid: it is damaged, or not for this model's"
                f" vocabulary of {self._vocab_size}. Download it again."
            )
        return tokens

    def first(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        read_TF: torch.Tensor | None,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Return each known token's state and its norm, [T, E]. ids: the tokens at p + 1 for the
        target's states at p."""
        assert read_TF is not None, "a head reads states of its target"
        read_TF = read_TF.to(self.dtype)
        if self.read_norm is not None:
            read_TF = self.read_norm(read_TF)
        return self._run(ids_T, positions_T, self.fc(read_TF), attention)

    def further(
        self,
        ids_R: torch.Tensor,
        positions_R: torch.Tensor,
        out_RE: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Return each draft token's state and its norm, [R, E]. out: results for the previous
        tokens, [R, E]."""
        return self._run(ids_R, positions_R, out_RE[:, : self.size], attention)

    def _run(
        self,
        ids_R: torch.Tensor,
        positions_R: torch.Tensor,
        state_RD: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        step = LayerStep(self._rotary(positions_R), attention, positions_R)
        x_RD, residual_RD = self.first_layer(self.embed(ids_R), state_RD, step)
        for layer in self.layers:
            x_RD, residual_RD = layer(x_RD, residual_RD, step)
        normed_RD, state_RD = self.norm(x_RD, residual_RD)
        return concatenate(normed_RD if self._norm_last else state_RD, normed_RD)

    def logits(self, out_RE: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V], with -inf for tokens outside the head's vocabulary. Under tensor
        parallelism, V counts the rank's part of the target's vocabulary."""
        logits_RI: torch.Tensor = self.head(out_RE[:, self.size :])
        if self._tokens is None:
            return logits_RI
        if not self._ids.is_whole:
            logits_RI = all_gather(logits_RI, self._group).transpose(0, 1).flatten(1)
            logits_RI = logits_RI[:, : self._ids.whole]
        logits_RV = logits_RI.new_full((len(logits_RI), self._vocab_size), -torch.inf)
        logits_RV.index_copy_(1, self._tokens, logits_RI)
        if self._ids.is_whole:
            return logits_RV
        own, each = self._vocabulary, -(-self._vocab_size // self._group.size)
        logits_RV = logits_RV[:, own.first : own.first + own.count]
        return logits_RV if own.count == each else pad_width(logits_RV, each)
