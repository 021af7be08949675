"""Draft heads with random weights, and what they compute by their definitions in float64.

EAGLE-3 heads (arXiv 2503.01840) come in both layouts, and compute one token after the other. Layers
for multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2) come with their model. Their
decoder layer is a model of transformers with one layer, over all positions at once.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from quire.spec.model_spec import ModelSpec, parse_spec
from quire.tools.verify.precision import WholePrecision
from tests.support.models.checkpoints import (
    EAGER,
    OFFSET_NORMS,
    VARIANTS,
    Checkpoint,
    write_own,
)

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


# ---- layers for multi-token prediction ---------------------------------------------------------

WEIGHTS = "model.safetensors"
ONE_LAYER = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "mlp_layer_types": ["sparse"],
    "layer_types": ["full_attention"],
    "mlp_only_layers": [],
}
QWEN = {
    "model.layers.0": "mtp.layers.0",
    "model.norm": "mtp.norm",
    "token_norm": "mtp.pre_fc_norm_embedding",
    "state_norm": "mtp.pre_fc_norm_hidden",
    "project": "mtp.fc",
}


def _nextn(num_layers: int) -> dict[str, str]:
    layer = f"model.layers.{num_layers}"
    return {
        "model.layers.0": layer,
        "model.norm": f"{layer}.shared_head.norm",
        "token_norm": f"{layer}.enorm",
        "state_norm": f"{layer}.hnorm",
        "project": f"{layer}.eh_proj",
    }


@dataclass(frozen=True)
class MtpCheckpoint:
    """A checkpoint, and a directory with its MTP layer as a model of its own."""

    checkpoint: Checkpoint
    layer_directory: Path
    names: dict[str, str]

    @property
    def directory(self) -> Path:
        return self.checkpoint.directory


def write_mtp(directory: Path, variant: str, **changed: Any) -> MtpCheckpoint:
    """Write a variant's checkpoint with an MTP layer. changed: fields of its config."""
    model_type, config = VARIANTS[variant]
    made = write_own(directory, model_type, config | changed)
    inside = directory / "layer"
    only = {name: each for name, each in ONE_LAYER.items() if name != "mlp_layer_types"}
    if model_type == "glm4_moe_lite":
        only = ONE_LAYER
    write_own(inside, model_type, config | changed | only)
    layer, size = load_file(inside / WEIGHTS), config["hidden_size"]
    names = QWEN if model_type.startswith("qwen") else _nextn(made.spec.num_layers)
    generator = torch.Generator().manual_seed(3)
    one = 0.0 if model_type.startswith(OFFSET_NORMS) else 1.0
    own = {
        f"{names['token_norm']}.weight": one + 0.25 * torch.randn(size, generator=generator),
        f"{names['state_norm']}.weight": one + 0.25 * torch.randn(size, generator=generator),
        f"{names['project']}.weight": 0.25 * torch.randn(size, 2 * size, generator=generator),
    }
    for name, tensor in layer.items():
        old = "model.norm" if name.startswith("model.norm") else "model.layers.0"
        if name.startswith(old):
            own[names[old] + name.removeprefix(old)] = tensor
    if names is not QWEN:  # copies, here with other values, since they are not read
        table = torch.randn(config["vocab_size"], size, generator=generator)
        own |= {f"{names['model.layers.0']}.embed_tokens.weight": table}
        own |= {f"{names['model.layers.0']}.shared_head.head.weight": table + 1}
    change_weights(directory, own)
    if names is not QWEN:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))
    return MtpCheckpoint(made, inside, names)


def write_exact_mtp(directory: Path, variant: str) -> None:
    """Write a checkpoint whose MTP layer predicts exactly what its model does: no layer of either
    adds to the residual stream, and the MTP layer passes on the token alone."""
    made = write_mtp(directory, variant)
    found, size = load_file(directory / WEIGHTS), made.checkpoint.spec.hidden_size
    silent = ("o_proj.weight", "down_proj.weight", "down_proj", "out_proj.weight")
    exact = {name: torch.zeros_like(w) for name, w in found.items() if name.endswith(silent)}
    names = made.names
    exact[f"{names['project']}.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
    norm = f"{names['token_norm']}.weight"
    exact[norm] = torch.full_like(found[norm], 1.0 - model_offset(made))
    exact[f"{names['model.norm']}.weight"] = found["model.norm.weight"]
    change_weights(directory, exact)


def model_offset(made: MtpCheckpoint) -> float:
    """Return what the model's norms add to their weights."""
    return float(made.checkpoint.spec.model_type.startswith(OFFSET_NORMS))


def change_weights(directory: Path, changed: dict[str, torch.Tensor]) -> None:
    """Add tensors to a checkpoint, or replace its own."""
    found = load_file(directory / WEIGHTS) | changed
    save_file({name: each.contiguous() for name, each in found.items()}, directory / WEIGHTS)


class MtpByDefinition:
    """An MTP layer and its model in float64."""

    def __init__(self, made: MtpCheckpoint) -> None:
        self.weights = {n: w.double() for n, w in load_file(made.directory / WEIGHTS).items()}
        self.names = made.names
        with WholePrecision():
            self.model, self.layer = (
                transformers.AutoModelForCausalLM.from_pretrained(
                    path, dtype=torch.float64, **EAGER
                )
                for path in (made.directory, made.layer_directory)
            )
        self.offset = float(self.model.config.model_type.startswith(OFFSET_NORMS))

    def states(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the model's states after its last norm, [T, D]."""
        with WholePrecision():
            found: torch.Tensor = self.model.model(torch.tensor([tokens])).last_hidden_state[0]
        return found

    def norm(self, name: str, x_TD: torch.Tensor) -> torch.Tensor:
        scale = (x_TD.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps).rsqrt()
        return x_TD * scale * (self.offset + self.weights[f"{self.names[name]}.weight"])

    def run(self, tokens: Sequence[int], states_TD: torch.Tensor) -> torch.Tensor:
        """Return the layer's states, [T, D]. tokens: each is the one after a state's token."""
        embedded_TD = self.model.get_input_embeddings()(torch.tensor(tokens))
        both = torch.cat(
            (self.norm("token_norm", embedded_TD), self.norm("state_norm", states_TD)), 1
        )
        x_TD = F.linear(both, self.weights[f"{self.names['project']}.weight"])
        with WholePrecision():
            found: torch.Tensor = self.layer.model(inputs_embeds=x_TD[None]).last_hidden_state[0]
        return found

    def drafts(
        self, tokens: Sequence[int], read_TD: torch.Tensor, num_more: int
    ) -> tuple[list[int], list[torch.Tensor]]:
        """Draft 1 + num_more tokens after `tokens`, greedily. read: the model's states of all
        tokens but the last, [T - 1, D]. Also returns the logits of each."""
        later, states_TD = list(tokens[1:]), read_TD.double()
        drafts, found = list[int](), list[torch.Tensor]()
        for _ in range(1 + num_more):
            state_D = self.run(later, states_TD)[-1]
            found.append(self.model.lm_head(state_D))
            drafts.append(int(found[-1].argmax()))
            later, states_TD = [*later, drafts[-1]], torch.cat((states_TD, state_D[None]))
        return drafts, found
