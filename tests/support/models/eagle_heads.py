"""EAGLE-3 heads with random weights in both layouts, and what they compute by their definition
(arXiv 2503.01840), one token after the other in float64."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from quire.spec.model_spec import ModelSpec, parse_spec

AUTHORS, SPECULATORS = "authors", "speculators"
LAYER = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
}
DEFAULT_READS = (2, 3, 4)  # of a target with 7 layers


@dataclass(frozen=True)
class HeadShape:
    """What a test's head has. layer: fields of its layer's config that are not LAYER's. reads: of
    its target, as the config says it."""

    layout: str = AUTHORS
    layer: Mapping[str, Any] = field(default_factory=dict)
    vocab: int = 97
    num_ids: int = 41
    has_embedding: bool = False
    norm_first: bool = False
    target_size: int = 32
    reads: tuple[int, ...] | None = None
    top: Mapping[str, Any] | None = None  # of the config itself

    def has(self, flag: str) -> bool:
        return bool((self.top or {}).get(flag))

    @property
    def config(self) -> dict[str, Any]:
        layer = {**LAYER, **self.layer, "vocab_size": self.vocab}
        top: dict[str, Any] = {"draft_vocab_size": self.num_ids, **(self.top or {})}
        if self.reads is not None:
            top["eagle_aux_hidden_state_layer_ids"] = list(self.reads)
        if self.target_size != layer["hidden_size"]:
            top["target_hidden_size"] = self.target_size
        if self.norm_first:
            top["norm_before_residual"] = True
        if self.layout == AUTHORS:
            return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **top}
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            **top,
        }


def head_weights(shape: HeadShape, seed: int = 0) -> dict[str, torch.Tensor]:
    """Make weights large enough that every part matters, by the names of `speculators`."""
    generator = torch.Generator().manual_seed(seed)
    layer = {**LAYER, **shape.layer}
    size, inner, width = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    heads, kv_heads = layer["num_attention_heads"], layer["num_key_value_heads"]
    num_reads = len(shape.reads or DEFAULT_READS)
    shapes: dict[str, tuple[int, ...]] = {"fc": (size, num_reads * shape.target_size)}
    for i in range(layer["num_hidden_layers"]):
        inputs = size if i else 2 * size
        outputs = {"q_proj": heads * width, "k_proj": kv_heads * width, "v_proj": kv_heads * width}
        for name, count in outputs.items():
            shapes[f"layers.{i}.self_attn.{name}"] = (count, inputs)
        shapes[f"layers.{i}.self_attn.o_proj"] = (size, heads * width)
        shapes |= {f"layers.{i}.mlp.{name}_proj": (inner, size) for name in ("gate", "up")}
        shapes[f"layers.{i}.mlp.down_proj"] = (size, inner)
        norms = ("input_layernorm", "post_attention_layernorm", *(() if i else ("hidden_norm",)))
        shapes |= {f"layers.{i}.{name}": (size,) for name in norms}
        if layer["model_type"] == "qwen3":
            shapes |= {f"layers.{i}.self_attn.{name}_norm": (width,) for name in "qk"}
    shapes |= {"norm": (size,), "lm_head": (shape.num_ids, size)}
    if shape.has("norm_before_fc"):
        shapes["input_norm"] = (num_reads * shape.target_size,)
    if shape.has("fc_norm"):
        shapes |= {f"fc_norm.{i}": (shape.target_size,) for i in range(num_reads)}
    if shape.has_embedding:
        shapes["embed_tokens"] = (shape.vocab, size)
    weights = {
        f"{name}.weight": torch.randn(each, generator=generator) * 0.25
        + (1.0 if len(each) == 1 else 0.0)
        for name, each in shapes.items()
    }
    if layer.get("attention_bias"):
        for name in [name for name in weights if ".self_attn." in name and "norm" not in name]:
            bias = torch.randn(len(weights[name]), generator=generator) * 0.25
            weights[name.replace(".weight", ".bias")] = bias
    if shape.num_ids < shape.vocab:
        tokens = torch.randperm(shape.vocab, generator=generator)[: shape.num_ids].sort().values
        weights["d2t"] = tokens - torch.arange(shape.num_ids)
        weights["t2d"] = torch.zeros(shape.vocab, dtype=torch.bool).index_fill(0, tokens, True)
    return weights


def write_head(directory: Path, shape: HeadShape, **changed: torch.Tensor | None) -> dict[str, Any]:
    """Write a head and return its weights by the names of `speculators`. changed: tensors in the
    place of others, by such a name; None leaves one out."""
    weights = {
        name: each for name, each in (head_weights(shape) | changed).items() if each is not None
    }
    stored = weights
    if shape.layout == AUTHORS:
        stored = {name.replace("layers.0.", "midlayer."): each for name, each in weights.items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: each.contiguous() for name, each in stored.items()}, directory / "model.safetensors"
    )
    (directory / "config.json").write_text(json.dumps(shape.config))
    return weights


def target_spec(**changed: Any) -> ModelSpec:
    """Make the spec of a target: seven layers, unlike the head's."""
    config = LAYER | {"num_hidden_layers": 7, "vocab_size": 97, "num_key_value_heads": 4}
    return parse_spec(config | changed)


# A head of the demo model's size. It guesses but a few common tokens, and so is right sometimes.
COMMON = torch.tensor([16, 266, 274, 300, 310, 344, 1147])
DEMO = {"hidden_size": 256, "intermediate_size": 96, "head_dim": 16, "rope_theta": 10000.0}
DEMO_SHAPE = HeadShape(
    layer=DEMO, vocab=1536, num_ids=len(COMMON), target_size=256, reads=(1, 4, 6)
)


def write_demo_head(directory: Path) -> dict[str, torch.Tensor]:
    """Write such a head; see write_head."""
    return write_head(directory, DEMO_SHAPE, d2t=COMMON - torch.arange(len(COMMON)))


class HeadByDefinition:
    """The head in float64, with keys and values of its own in lists."""

    def __init__(self, shape: HeadShape, weights: Mapping[str, torch.Tensor], table: torch.Tensor):
        self.shape, self.layer = shape, {**LAYER, **shape.layer}
        self.weights = {
            name: each.double() if each.is_floating_point() else each
            for name, each in weights.items()
        }
        self.table = self.weights.get("embed_tokens.weight", table.double())
        count = self.layer["num_hidden_layers"]
        self.keys: list[list[torch.Tensor]] = [[] for _ in range(count)]
        self.values: list[list[torch.Tensor]] = [[] for _ in range(count)]

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.layer["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def turned(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half = self.layer["head_dim"] // 2
        angle = position * self.layer["rope_theta"] ** -(torch.arange(half).double() / half)
        one, two = x[:, :half], x[:, half:]
        turned = (one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin())
        return torch.cat(turned, -1)

    def attend(self, i: int, x: torch.Tensor, position: int) -> torch.Tensor:
        name, width = f"layers.{i}.self_attn", self.layer["head_dim"]
        q, k, v = (self.product(f"{name}.{part}_proj", x).view(-1, width) for part in "qkv")
        if self.layer["model_type"] == "qwen3":
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        self.keys[i].append(self.turned(k, position))
        self.values[i].append(v)
        group = len(q) // len(k)
        keys = torch.stack(self.keys[i], 1).repeat_interleave(group, 0)
        values = torch.stack(self.values[i], 1).repeat_interleave(group, 0)
        scores = (keys @ self.turned(q, position)[..., None])[..., 0] / width**0.5
        out = (scores.softmax(-1)[:, None] @ values).flatten()
        return self.product(f"{name}.o_proj", out)

    def feed(self, i: int, x: torch.Tensor) -> torch.Tensor:
        name = f"layers.{i}.mlp"
        gate = F.silu(self.product(f"{name}.gate_proj", x))
        return self.product(f"{name}.down_proj", gate * self.product(f"{name}.up_proj", x))

    def step(self, token: int, state: torch.Tensor, position: int) -> torch.Tensor:
        """Return the head's state for a token behind what has the given state."""
        normed = self.norm("layers.0.hidden_norm", state)
        x = torch.cat((self.norm("layers.0.input_layernorm", self.table[token]), normed))
        stream = (normed if self.shape.norm_first else state) + self.attend(0, x, position)
        stream = stream + self.feed(0, self.norm("layers.0.post_attention_layernorm", stream))
        for i in range(1, self.layer["num_hidden_layers"]):
            x = self.norm(f"layers.{i}.input_layernorm", stream)
            stream = stream + self.attend(i, x, position)
            x = self.norm(f"layers.{i}.post_attention_layernorm", stream)
            stream = stream + self.feed(i, x)
        return self.norm("norm", stream) if self.shape.has("norm_output") else stream

    def fused(self, read: torch.Tensor) -> torch.Tensor:
        read = read.double()
        if self.shape.has("norm_before_fc"):
            read = self.norm("input_norm", read)
        if self.shape.has("fc_norm"):
            parts = read.split(self.shape.target_size)
            read = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)])
        return self.product("fc", read)

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """Over the target's vocabulary."""
        normed = state if self.shape.has("norm_output") else self.norm("norm", state)
        found = self.product("lm_head", normed)
        if "d2t" not in self.weights:
            return found
        logits = torch.full((self.shape.vocab,), -torch.inf, dtype=torch.float64)
        for i, offset in enumerate(self.weights["d2t"].tolist()):
            logits[i + offset] = found[i]
        return logits


def run_by_definition(
    head: HeadByDefinition, tokens: Sequence[int], read_TF: torch.Tensor, num_more: int
) -> tuple[list[int], list[torch.Tensor]]:
    """Guess 1 + num_more tokens behind `tokens`, greedily; read: of all tokens but the last. Also
    returns the logits of each."""
    state = torch.empty(0)
    for position, read in enumerate(read_TF):
        state = head.step(tokens[position + 1], head.fused(read), position)
    found = [head.logits(state)]
    guesses = [int(found[0].argmax())]
    for i in range(num_more):
        state = head.step(guesses[-1], state, len(read_TF) + i)
        found.append(head.logits(state))
        guesses.append(int(found[-1].argmax()))
    return guesses, found
