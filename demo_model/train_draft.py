"""Train a draft model of two layers: python -m demo_model.train_draft --folder heads/draft.

It learns the demo model's probabilities (distillation), and begins as that one's first and last
layer. Under half an hour on one core of a desktop.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from . import distillation, generation
from .batches import Packer
from .model import Llama
from .tokenizer import DEFAULT_FOLDER

DEPTH = 5  # number of draft tokens in a row that are counted
KEPT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the model is written")
    parser.add_argument("--target", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--seed", type=int, default=22)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--tokens", type=int, default=2304, help="per step")
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--items", type=int, default=60, help="held-out texts per kind; 0: none")
    return parser.parse_args()


def begin_from(target: Llama) -> Llama:
    """Return a model of two layers with the target's first and last, embedding and norm."""
    draft = Llama(replace(target.shape, num_hidden_layers=2))
    last = target.shape.num_hidden_layers - 1
    weights = target.state_dict()
    for name in draft.state_dict():
        weights[name] = weights[name.replace("layers.1.", f"layers.{last}.")]
    draft.load_state_dict({name: weights[name].clone() for name in draft.state_dict()})
    return draft


def loss_of(draft: Llama, target: Llama, tokens: Tensor, marks: Tensor) -> Tensor:
    """Return the mean cross entropy to the target's probabilities at marked tokens; tokens and
    marks are [B, T]."""
    loss_indices = marks[:, 1:].flatten().nonzero().flatten()
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            hidden = target.hidden(tokens[:, :-1]).flatten(0, 1)[loss_indices]
            target_probabilities = target.logits(hidden).float().softmax(-1)
        logits = draft.logits(draft.hidden(tokens[:, :-1]).flatten(0, 1)[loss_indices])
        return F.cross_entropy(logits.float(), target_probabilities)


@torch.no_grad()
def accepted(draft: Llama, text: list[int], prompt: int) -> Tensor:
    """Count as train_eagle3 does. Drafts continue right tokens as long as all were right. So runs
    of right drafts over the text itself are the same."""
    best = draft.logits(draft.hidden(torch.tensor([text[:-1]])))[0].argmax(-1)
    is_right = best == torch.tensor(text[1:])
    runs = is_right[prompt:].unfold(0, DEPTH, 1).long().cumprod(-1)
    return torch.cat((torch.tensor([len(runs)]), runs.sum(0)))


def train(options: argparse.Namespace, target: Llama, packer: Packer) -> Llama:
    """Train a draft model; the loss is reported every 25 steps."""
    torch.manual_seed(options.seed)
    draft = begin_from(target)
    descent = distillation.Descent(draft.named_parameters(), options.steps, options.rate)
    began = time.monotonic()
    for step in range(options.steps):
        loss = loss_of(draft, target, *distillation.rows(packer, step, 1))
        descent.take(loss)
        if (step + 1) % 25 == 0:
            spent = time.monotonic() - began
            print(f"step {step + 1} loss {loss.item():.4f} {spent:.0f} s", flush=True)
        if (step + 1) % 250 == 0:
            distillation.write(options.folder, draft.state_dict(), draft.shape.config())
    return draft


def main() -> None:
    """Train, write and measure."""
    options = arguments()
    target = generation.load(options.target)
    target.requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(options.target / "tokenizer.json"))
    draft = train(options, target, Packer(tokenizer, options.seed, options.tokens))
    distillation.write(options.folder, draft.state_dict(), draft.shape.config())
    for name in KEPT_FILES:
        shutil.copy(options.target / name, options.folder)
    if not options.items:
        return
    draft.load_state_dict({name: w.bfloat16().float() for name, w in draft.state_dict().items()})
    table = {}
    for kind in distillation.MEASURED_KINDS:
        texts = distillation.answered(target, tokenizer, kind, options.items)
        long = [text for text in texts if len(text[0]) - text[1] > DEPTH]
        counts = sum(accepted(draft, *text) for text in long)
        table[kind] = [round(float(count / counts[0]), 4) for count in counts[1:]]
        print(kind, json.dumps(table[kind]), flush=True)
    (options.folder / "acceptance.json").write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
