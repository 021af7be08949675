"""Greedy generation of many prompts at once, with a key-value cache."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from .model import Llama, Shape
from .tokenizer import DEFAULT_FOLDER


class Cache:
    """Keys and values of one layer for a batch, filled from the left."""

    def __init__(self, rows: int, limit: int, shape: Shape) -> None:
        size = (rows, shape.num_key_value_heads, limit, shape.head_dim)
        self.keys, self.values, self.used = torch.zeros(size), torch.zeros(size), 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add new keys and values [B, N, T, H]; return all that the cache holds."""
        end = self.used + keys.shape[2]
        self.keys[:, :, self.used : end] = keys
        self.values[:, :, self.used : end] = values
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def select_rows(self, rows: Tensor) -> None:
        """Keep only the given rows [rows] of the batch."""
        self.keys, self.values = self.keys[rows], self.values[rows]


def load(folder: Path = DEFAULT_FOLDER) -> Llama:
    """Return the shipped model, its bf16 weights widened to fp32."""
    model = Llama(Shape())
    stored = load_file(folder / "model.safetensors")
    model.load_state_dict({name: weight.float() for name, weight in stored.items()})
    return model.eval()


@torch.no_grad()
def generate(
    model: Llama, prompts: list[list[int]], limit: int, ends: tuple[int, ...] = (2, 0)
) -> list[list[int]]:
    """Return for each prompt the greedy continuation (without its end token).

    The prompts are padded on the left; rows that have ended leave the batch now and then.
    """
    width = max(map(len, prompts))
    pads = torch.tensor([width - len(prompt) for prompt in prompts])
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    caches = [Cache(len(prompts), width + limit, model.shape) for _ in model.model.layers]
    outputs: list[list[int]] = [[] for _ in prompts]
    rows, steps = torch.arange(len(prompts)), torch.arange(width + limit)
    open_ = torch.ones(len(prompts), dtype=torch.bool)
    at = 0
    for _ in range(limit):
        end = at + tokens.shape[1]
        mask = (steps[None, :end] >= pads[:, None])[:, None, None, :]
        mask = mask & (steps[None, None, None, :end] <= steps[at:end][None, None, :, None])
        mask = mask | (steps[:end] == steps[at:end, None])[None, None]
        positions = (steps[at:end][None] - pads[:, None]).clamp(min=0)
        hidden = model.hidden(tokens, mask, positions, caches)
        at, best = end, model.logits(hidden[:, -1]).argmax(-1)
        for index, token in enumerate(best.tolist()):
            if open_[index] and token in ends:
                open_[index] = False
            elif open_[index]:
                outputs[int(rows[index])].append(token)
        if not open_.any():
            break
        if open_.float().mean() < 0.75:
            open_rows = open_.nonzero().flatten()
            rows, pads, best, open_ = (
                rows[open_rows],
                pads[open_rows],
                best[open_rows],
                open_[open_rows],
            )
            for cache in caches:
                cache.select_rows(open_rows)
        tokens = best[:, None]
    return outputs
