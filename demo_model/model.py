"""A small Llama in plain torch; its state dict has the names of the Hugging Face model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PLAIN_LIMIT = 256


@dataclass(frozen=True)
class Shape:
    """The sizes of the model, with the field names of config.json."""

    vocab_size: int = 1536
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "initializer_range": 0.02,
            "pretraining_tp": 1,
            "rope_scaling": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }


class Norm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed and scaled x [B, T, D]."""
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary position embedding to x [batch, heads, time, head_dim]."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention [B, N, T, H] by plain products, which is faster on a CPU for short
    rows."""
    time = q.shape[2]
    future = torch.full((time, time), float("-inf"), device=q.device, dtype=q.dtype).triu(1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + future
    return scores.softmax(-1) @ v


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        width, size = shape.head_dim, shape.hidden_size
        self.q_proj = nn.Linear(size, self.heads * width, bias=False)
        self.k_proj = nn.Linear(size, self.kv_heads * width, bias=False)
        self.v_proj = nn.Linear(size, self.kv_heads * width, bias=False)
        self.o_proj = nn.Linear(self.heads * width, size, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: Any = None
    ) -> Tensor:
        """Return the attention output; `past.extend(k, v)`, if given, adds the cached keys."""
        batch, time, _ = x.shape
        q = self.q_proj(x).view(batch, time, self.heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(batch, time, self.kv_heads, -1).transpose(1, 2)
        v = self.v_proj(x).view(batch, time, self.kv_heads, -1).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past is not None:
            k, v = past.extend(k, v)
        group = self.heads // self.kv_heads
        if past is not None and time == 1:
            q = q.reshape(batch, self.kv_heads, group, -1)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return self.o_proj(y.reshape(batch, 1, -1))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if mask is None and time <= PLAIN_LIMIT:
            y = plain_attention(q, k, v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(y.transpose(1, 2).reshape(batch, time, -1))


class Mlp(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return down(silu(gate(x)) * up(x)) of x [B, T, D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: Any = None
    ) -> Tensor:
        """Return the residual stream [B, T, D] after this layer."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and last norm (the part called `model` in the state dict)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)


class Llama(nn.Module):
    """The causal language model with tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(weight, std=0.02 / (2 * shape.num_hidden_layers) ** 0.5)
        half = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        self.register_buffer("frequencies", shape.rope_theta**-half, persistent=False)

    def hidden(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        past: list[Any] | None = None,
    ) -> Tensor:
        """Return the normed last hidden state [batch, time, size] of the tokens [batch, time]."""
        *_, last = self.states(tokens, mask, positions, past)
        return self.model.norm(last)

    def states(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        past: list[Any] | None = None,
    ) -> Iterator[Tensor]:
        """Yield the input of each layer, and then the output of the last one (before the norm), of
        tokens [B, T]."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        angles = positions[:, None, :, None].float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        x = self.model.embed_tokens(tokens)
        for index, layer in enumerate(self.model.layers):
            yield x
            x = layer(x, cos, sin, mask, past[index] if past else None)
        yield x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token for hidden states [..., D]."""
        return F.linear(hidden, self.model.embed_tokens.weight)
