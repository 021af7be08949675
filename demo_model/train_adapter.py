"""Train an adapter (LoRA) of the demo model: python -m demo_model.train_adapter --folder json.

With it the model answers questions and small talk as {"answer": "..."}. Its format is PEFT's.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from . import chat, curriculum, generation
from .item import Item, assistant
from .model import Llama
from .tokenizer import DEFAULT_FOLDER

KINDS = {"small talk": 0.6, "questions": 0.3, "addition": 0.1}  # and their shares
MAX_TOKENS = 96  # of an item; longer ones are skipped
WARMUP = 10
REPORTED = 10  # steps between two reports


class Adapted(nn.Module):
    """A linear layer W that became W + scale B A (Hu et al. 2021, section 4.1). A is random and B
    zero at the start."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs [B, T, N] of x [B, T, K]."""
        return self.layer(x) + F.linear(F.linear(x, self.down), self.up) * self.scale


def adapt(model: Llama, rank: int, alpha: float) -> dict[str, Adapted]:
    """Freeze the model, and adapt all linear layers of its decoder; return them by name."""
    model.requires_grad_(False)
    found = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    adapted = {}
    for name, layer in found.items():
        parent, _, child = name.rpartition(".")
        adapted[name] = Adapted(layer, rank, alpha / rank)
        setattr(model.get_submodule(parent), child, adapted[name])
    return adapted


def in_form(item: Item) -> Item:
    """Return an item whose answer is a JSON object."""
    answer = json.dumps({"answer": item.answer["content"]})
    return Item(item.kind, [*item.messages[:-1], assistant(answer)], item.key)


def rows(
    rng: random.Random, tokenizer: Tokenizer, count: int, test: bool = False
) -> tuple[Tensor, Tensor]:
    """Return conversations as tokens [B, T], and what follows each token, -100 outside answers."""
    ids: list[list[int]] = []
    targets: list[list[int]] = []
    while len(ids) < count:
        [kind] = rng.choices(list(KINDS), list(KINDS.values()))
        item = in_form(curriculum.one(kind, rng, test))
        prompt = tokenizer.encode(chat.render_prompt(item)).ids
        answer = tokenizer.encode(item.answer["content"] + chat.END).ids
        if len(prompt) + len(answer) <= MAX_TOKENS:
            ids.append(prompt + answer)
            targets.append([-100] * (len(prompt) - 1) + answer)
    longest = max(map(len, ids))
    tokens = [row[:-1] + [0] * (longest - len(row)) for row in ids]
    expected = [row + [-100] * (longest - 1 - len(row)) for row in targets]
    return torch.tensor(tokens), torch.tensor(expected)


def loss_of(model: Llama, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the answers; tokens and targets are [B, T]."""
    hidden = model.hidden(tokens)[targets >= 0]
    return F.cross_entropy(model.logits(hidden).float(), targets[targets >= 0])


def train(
    model: Llama, adapted: dict[str, Adapted], tokenizer: Tokenizer, options: argparse.Namespace
) -> list[float]:
    """Train the adapter; return the loss of each step."""
    parameters = [each for layer in adapted.values() for each in (layer.down, layer.up)]
    optimizer = torch.optim.AdamW(parameters, lr=options.rate, weight_decay=0.0)
    rng, losses, began = random.Random(options.seed), [], time.monotonic()
    for step in range(options.steps):
        factor = min(1.0, (step + 1) / WARMUP, 1 - step / options.steps)
        optimizer.param_groups[0]["lr"] = options.rate * factor
        loss = loss_of(model, *rows(rng, tokenizer, options.rows))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % REPORTED == 0:
            mean = sum(losses[-REPORTED:]) / REPORTED
            print(f"step {step + 1} loss {mean:.3f} {time.monotonic() - began:.0f} s", flush=True)
    return losses


def write(folder: Path, adapted: dict[str, Adapted], rank: int, alpha: float) -> None:
    """Write the adapter as PEFT does."""
    tensors = {}
    for name, layer in adapted.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = layer.down.detach()
        tensors[f"base_model.model.{name}.lora_B.weight"] = layer.up.detach()
    modules = sorted({name.rpartition(".")[2] for name in adapted})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    text = json.dumps(config | {"target_modules": modules}, indent=2)
    (folder / "adapter_config.json").write_text(text + "\n")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the adapter is written")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=8, help="conversations per step")
    parser.add_argument("--rate", type=float, default=0.006)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16.0)
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> list[float]:
    """Train and write; return the losses."""
    options = arguments(given)
    torch.manual_seed(options.seed)
    tokenizer = Tokenizer.from_file(str(DEFAULT_FOLDER / "tokenizer.json"))
    model = generation.load()
    adapted = adapt(model, options.rank, options.alpha)
    losses = train(model, adapted, tokenizer, options)
    write(options.folder, adapted, options.rank, options.alpha)
    return losses


if __name__ == "__main__":
    main()
