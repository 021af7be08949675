"""BERT: embeddings that sum words, positions and segments, norms after attention and feed-forward
layer, and bidirectional attention.

RoBERTa, XLM-RoBERTa and CamemBERT have BERT's layers. Their positions begin after the row of
padding, and all tokens belong to one segment (spec/encoders.py).

Shape legend: T tokens, D model dim, F feed-forward dim.
"""

import torch
from torch import nn

from quire.models.model import Model, PositionedAttention
from quire.models.parts.layers import Embedding, LayerNorm, Linear, ParamFactory, activation
from quire.ops.attention.base import AttentionBackend
from quire.ops.elementwise import add, plain_ids, segment_ids
from quire.spec.cuts import all_of
from quire.spec.encoders import num_segments, padding_rows
from quire.spec.model_spec import ModelSpec

# Suffixes of tensors that hidden states do not depend on: heads, and a constant.
UNUSED = (
    "embeddings.position_ids",
    "pooler.dense.weight",
    "pooler.dense.bias",
    "classifier.weight",
    "classifier.bias",
    "classifier.dense.weight",
    "classifier.dense.bias",
    "classifier.out_proj.weight",
    "classifier.out_proj.bias",
)
MASKED_HEADS = ("cls.", "lm_head.")  # prefixes of heads for masked words and next sentences


class BertEmbeddings(nn.Module):
    """The normalised sum of word, position and segment embeddings."""

    def __init__(self, name: str, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__()
        size, fields = spec.hidden_size, spec.fields
        before = padding_rows(fields, spec.model_type)
        self.words = Embedding(f"{name}.word_embeddings", spec.vocab_size, size, factory)
        self.segments = Embedding(
            f"{name}.token_type_embeddings", num_segments(fields), size, factory
        )
        self.positions = Embedding(
            f"{name}.position_embeddings", spec.max_position, size, factory, before
        )
        self.norm = LayerNorm(f"{name}.LayerNorm", size, spec.layers.norm_eps, factory)

    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        words_TD = self.words(plain_ids(input_ids_T))
        x_TD = add(words_TD, self.segments(segment_ids(input_ids_T)))
        out_TD: torch.Tensor = self.norm(add(x_TD, self.positions(positions_T)))
        return out_TD


class BertLayer(nn.Module):
    """Attention and feed-forward, each with a norm after it."""

    def __init__(self, name: str, layer: int, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__()
        size, inner, eps = spec.hidden_size, spec.intermediate_size, spec.layers.norm_eps
        parts = [f"{name}.attention.self.{each}" for each in ("query", "key", "value")]
        self.attention = PositionedAttention(
            all_of(spec.num_heads),
            spec.head_dim,
            layer,
            Linear(parts, size, [size] * 3, factory, bias=True),
            Linear([f"{name}.attention.output.dense"], size, [size], factory, bias=True),
            spec.head_dim**-0.5,
        )
        self.attention_norm = LayerNorm(f"{name}.attention.output.LayerNorm", size, eps, factory)
        self.up = Linear([f"{name}.intermediate.dense"], size, [inner], factory, bias=True)
        self.down = Linear([f"{name}.output.dense"], inner, [size], factory, bias=True)
        self.mlp_norm = LayerNorm(f"{name}.output.LayerNorm", size, eps, factory)
        self._activation = activation(spec.layers.activation)

    def forward(self, x_TD: torch.Tensor, backend: AttentionBackend) -> torch.Tensor:
        x_TD = self.attention_norm(add(self.attention(x_TD, backend), x_TD))
        inner_TF = self._activation(self.up(x_TD))
        out_TD: torch.Tensor = self.mlp_norm(add(self.down(inner_TF), x_TD))
        return out_TD


class Bert(Model):
    """An encoder from token ids to hidden states, without a language model head."""

    base_prefix = "bert."
    ignored_tensors = UNUSED
    head = None

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__()
        self.dtype = factory.dtype
        self.embeddings = BertEmbeddings(f"{self.base_prefix}embeddings", spec, factory)
        self.layers = nn.ModuleList(
            BertLayer(f"{self.base_prefix}encoder.layer.{layer}", layer, spec, factory)
            for layer in range(spec.num_layers)
        )

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: AttentionBackend,
        inputs_embeds_TD: torch.Tensor | None = None,
        intermediate_TE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See Model. Ids also encode which tokens are of the second text (ops/elementwise.py)."""
        x_TD: torch.Tensor = self.embeddings(input_ids_T, positions_T)
        for layer in self.layers:
            x_TD = layer(x_TD, attention)
        return x_TD

    def names_of(self, name: str) -> tuple[str, ...]:
        """See Model. The oldest checkpoints call weight and bias of norms gamma and beta."""
        for old, new in (("LayerNorm.gamma", "weight"), ("LayerNorm.beta", "bias")):
            if name.endswith(old):
                name = f"{name.removesuffix(old)}LayerNorm.{new}"
        return super().names_of(name)

    def ignores(self, name: str) -> bool:
        """See Model."""
        return name.startswith(MASKED_HEADS) or super().ignores(name)


class Roberta(Bert):
    """RoBERTa, an encoder with BERT's layers and its own tensor prefix."""

    base_prefix = "roberta."
