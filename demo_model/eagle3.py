"""An EAGLE-3 head (arXiv 2503.01840) for the demo model in plain torch.

Its state dict has the names of the authors' checkpoints; the embedding is the target's.

Shape legend: B rows, T time, M columns, D hidden size, V ids of the head.

A column is a position of the text where the head begins to draft. From the target's states at t and
token t + 1 it drafts token t + 2. Then it drafts the next one from its own state and token t + 2,
and so on.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .model import Llama, Mlp, Norm, Shape, rotate

LAYERS = (1, 3, 5)  # of the target: the states that enter them


class HeadAttention(nn.Module):
    """Grouped-query attention over what is twice as wide as its output."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        width, size = shape.head_dim, shape.hidden_size
        self.q_proj = nn.Linear(2 * size, self.heads * width, bias=False)
        self.k_proj = nn.Linear(2 * size, self.kv_heads * width, bias=False)
        self.v_proj = nn.Linear(2 * size, self.kv_heads * width, bias=False)
        self.o_proj = nn.Linear(self.heads * width, size, bias=False)

    def split(self, x: Tensor, heads: int) -> Tensor:
        """Return x as [batch, heads, time, head_dim]."""
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values of x [B, T, 2 D], repeated for every query head."""
        group = self.heads // self.kv_heads
        keys = rotate(self.split(self.k_proj(x), self.kv_heads), cos, sin)
        values = self.split(self.v_proj(x), self.kv_heads)
        return keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)


class HeadLayer(nn.Module):
    """The decoder layer, with a norm for each half of attention's input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.self_attn = HeadAttention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm, self.hidden_norm = Norm(size, eps), Norm(size, eps)
        self.post_attention_layernorm = Norm(size, eps)

    def joined(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """Return the embedding of the next token and the state, both normed, as one vector [B, T, 2
        D]."""
        return torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), -1)


class Head(nn.Module):
    """The head. draft_ids: the target's ids that it can draft, in order."""

    def __init__(self, target: Llama, draft_ids: Tensor) -> None:
        super().__init__()
        shape = self.shape = target.shape
        size = shape.hidden_size
        self.fc = nn.Linear(len(LAYERS) * size, size, bias=False)
        self.midlayer = HeadLayer(shape)
        self.norm = Norm(size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(size, len(draft_ids), bias=False)
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))
        known = torch.zeros(shape.vocab_size, dtype=torch.bool)
        known[draft_ids] = True
        self.register_buffer("t2d", known)
        half = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        self.register_buffer("frequencies", shape.rope_theta**-half, persistent=False)
        self.begin_from(target, draft_ids)

    @torch.no_grad()
    def begin_from(self, target: Llama, draft_ids: Tensor) -> None:
        """Copy the fitting weights of the target: its last layer, norm and output embedding.
        draft_ids [V]."""
        size, last = self.shape.hidden_size, target.model.layers[-1]
        self.fc.weight.zero_()
        self.fc.weight[:, -size:] = torch.eye(size)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(self.midlayer.self_attn, name).weight
            nn.init.normal_(weight, std=0.02)
            weight[:, size:] = getattr(last.self_attn, name).weight
        self.midlayer.self_attn.o_proj.load_state_dict(last.self_attn.o_proj.state_dict())
        self.midlayer.mlp.load_state_dict(last.mlp.state_dict())
        self.midlayer.hidden_norm.load_state_dict(last.input_layernorm.state_dict())
        self.midlayer.post_attention_layernorm.load_state_dict(
            last.post_attention_layernorm.state_dict()
        )
        self.norm.load_state_dict(target.model.norm.state_dict())
        self.lm_head.weight.copy_(target.model.embed_tokens.weight[draft_ids])

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, 1, T, half] for positions [B, T]."""
        angles = positions[:, None, :, None].float() * self.frequencies
        return angles.cos(), angles.sin()

    def unroll(
        self,
        states: Tensor,
        tokens: Tensor,
        embedding: nn.Embedding,
        columns: Tensor,
        steps: int,
        *,
        own_drafts: bool = False,
    ) -> Iterator[Tensor]:
        """Yield for each depth the logits [B, M, V] of the columns [B, M].

        states: [B, T, 3 D], of the target at tokens [B, > T + steps]. Depth s of column t gives
        token t + 2 + s. It attends to the first depth of all columns up to its own, and in its own
        column to all depths before. It is given the tokens of the text, or own_drafts.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        time = states.shape[1]
        places = torch.arange(time, device=states.device)
        fused = self.fc(states)
        x = layer.joined(embedding(tokens[:, 1 : time + 1]), fused)
        keys, values = attention.keys_values(x, *self.turn(places[None]))
        hidden = fused.gather(1, columns[..., None].expand(-1, -1, fused.shape[-1]))
        future = (places > columns[..., None])[:, None]
        ids = tokens.gather(1, columns + 1)
        own: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            x, turn = layer.joined(embedding(ids), hidden), self.turn(columns + step)
            q = rotate(attention.split(attention.q_proj(x), attention.heads), *turn)
            q = q * q.shape[-1] ** -0.5
            if step:
                own.append(attention.keys_values(x, *turn))
            scores = (q @ keys.transpose(-1, -2)).masked_fill(future, float("-inf"))
            mine = [(q * k).sum(-1, keepdim=True) for k, _ in own]
            weights = torch.cat((scores, *mine), -1).float().softmax(-1).to(values.dtype)
            y = weights[..., :time] @ values
            for index, (_, v) in enumerate(own):
                y = y + weights[..., time + index, None] * v
            hidden = hidden + attention.o_proj(y.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            logits = self.lm_head(self.norm(hidden))
            yield logits
            best = logits.argmax(-1)
            ids = best + self.d2t[best] if own_drafts else tokens.gather(1, columns + 2 + step)

    def config(self) -> dict[str, object]:
        """Return the content of config.json."""
        return {
            **self.shape.config(),
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": len(self.d2t),
            "eagle_aux_hidden_state_layer_ids": list(LAYERS),
            "tie_word_embeddings": False,
        }
