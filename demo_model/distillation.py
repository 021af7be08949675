"""Shared code for the training of drafters: rows of text, a learning rate over a fixed number of
steps, and held-out texts. Accepted draft tokens are counted on these texts."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from . import chat, evaluation, generation
from .batches import Packer
from .optimizer import Muon

LENGTHS = {256: 0.5, 768: 0.5}  # of rows, and their share of the steps
CHOSEN_SHARE = 0.4  # of the columns of a row
WARMUP = 30
MEASURED_KINDS = ("copying", "tools", "json", "stories")


def rows(packer: Packer, step: int, after: int) -> tuple[Tensor, Tensor]:
    """Return the rows of a step, `after` tokens longer than the row length, and which of their
    tokens carry loss."""
    rng = random.Random(f"{packer.seed} {step}")
    length = rng.choices(list(LENGTHS), list(LENGTHS.values()))[0]
    made = [packer.row(rng, length + 1) for _ in range(packer.tokens // length)]
    tokens = torch.tensor([ids for ids, _ in made])
    marks = torch.tensor([marks for _, marks in made])
    missing = after - 1
    return nn.functional.pad(tokens, (0, missing)), nn.functional.pad(marks, (0, missing))


def choose(preferred: Tensor) -> Tensor:
    """Return columns [B, M] of rows [B, T], those wanted before others, in random order."""
    count = max(1, int(preferred.shape[1] * CHOSEN_SHARE))
    order = torch.rand(preferred.shape) + preferred.float()
    return order.topk(count, 1).indices


class Descent:
    """Muon for the inner matrices and Adam for the rest; warm-up, then a linear decay to zero."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], steps: int, rate: float) -> None:
        parameters = dict(named)
        inner = [w for name, w in parameters.items() if w.dim() == 2 and not _is_outer(name)]
        outer = [w for name, w in parameters.items() if w.dim() != 2 or _is_outer(name)]
        self.optimizers = (
            (Muon(inner, lr=rate), rate),
            (
                torch.optim.AdamW(outer, lr=rate / 10, betas=(0.9, 0.98), weight_decay=0.0),
                rate / 10,
            ),
        )
        self.steps, self.step = steps, 0

    def take(self, loss: Tensor) -> None:
        """Do one step down the loss, a scalar."""
        loss.backward()
        self.step += 1
        factor = min(1.0, self.step / WARMUP, 1 - (self.step - 1) / self.steps)
        for optimizer, rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def _is_outer(name: str) -> bool:
    return "embed" in name or "lm_head" in name


def answered(
    target: generation.Llama, tokenizer: Tokenizer, kind: str, count: int
) -> list[tuple[list[int], int]]:
    """Return held-out texts with the target's own greedy answers: tokens, length of the prompt."""
    items = evaluation.held_out_items(kind, count, seed=2025)
    found = []
    for item, answer in zip(items, evaluation.answers(target, tokenizer, items), strict=True):
        prompt = tokenizer.encode(chat.render_prompt(item)).ids
        ends = tokenizer.encode(answer).ids + [tokenizer.token_to_id(chat.END)]
        found.append((prompt + ends, len(prompt)))
    return found


def write(folder: Path, weights: dict[str, Tensor], config: dict[str, object]) -> None:
    """Write model.safetensors (floating point in bf16) and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        name: (weight.bfloat16() if weight.is_floating_point() else weight).contiguous()
        for name, weight in weights.items()
    }
    new = folder / "model.safetensors.new"
    save_file(stored, new, metadata={"format": "pt"})
    new.chmod(0o644)
    os.replace(new, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
