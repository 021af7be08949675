"""Train an EAGLE-3 head: python -m demo_model.train_eagle3 --folder heads/eagle3.

As in the paper the head is unrolled on its own states ("training-time test"), and learns the demo
model's probabilities at every depth. About half an hour on one core of a desktop.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from . import distillation, generation
from .batches import Packer
from .eagle3 import LAYERS, Head
from .tokenizer import DEFAULT_FOLDER

DEPTH_WEIGHT = 0.8  # of each depth to the one before


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the head is written")
    parser.add_argument("--target", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--seed", type=int, default=22)
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--tokens", type=int, default=2304, help="per step")
    parser.add_argument("--depth", type=int, default=4, help="guesses in a row")
    parser.add_argument("--vocabulary", type=int, default=1024, help="ids that the head can guess")
    parser.add_argument("--rate", type=float, default=0.03)
    parser.add_argument("--items", type=int, default=60, help="held-out texts per kind; 0: none")
    return parser.parse_args()


def common_ids(packer: Packer, count: int, steps: int = 60) -> Tensor:
    """Return the ids that carry loss most often, in order."""
    seen: Counter[int] = Counter()
    for step in range(steps):
        tokens, marks = distillation.rows(packer, -1 - step, 1)
        seen.update(tokens[marks].tolist())
    return torch.tensor(sorted(token for token, _ in seen.most_common(count)))


def target_states(target: generation.Llama, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the head's input states [B, T, 3 D], and the target's normed last states."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        states = [state.float() for state in target.states(tokens)]
        return torch.cat([states[i] for i in LAYERS], -1), target.model.norm(states[-1])


def loss_of(
    head: Head, target: generation.Llama, tokens: Tensor, marks: Tensor, depth: int
) -> Tensor:
    """Return the mean cross entropy to the target's probabilities over depths and columns; tokens
    and marks are [B, T]."""
    time_ = tokens.shape[1] - depth - 1
    states, last = target_states(target, tokens[:, :-1])
    columns = distillation.choose(marks[:, 2 : time_ + 2])
    ids = torch.arange(len(head.d2t)) + head.d2t
    total, weights = torch.zeros(()), 0.0
    with torch.autocast("cpu", torch.bfloat16):
        unrolled = head.unroll(states[:, :time_], tokens, target.model.embed_tokens, columns, depth)
        for step, logits in enumerate(unrolled):
            at = columns + 1 + step
            with torch.no_grad():
                hidden = last.gather(1, at[..., None].expand(-1, -1, last.shape[-1]))
                target_probabilities = (
                    F.linear(hidden, target.model.embed_tokens.weight[ids]).float().softmax(-1)
                )
            marked = marks.gather(1, at + 1)
            each = -(target_probabilities * logits.float().log_softmax(-1)).sum(-1)
            total = total + DEPTH_WEIGHT**step * each[marked].sum() / marked.sum().clamp(min=1)
            weights += DEPTH_WEIGHT**step
    return total / weights


@torch.no_grad()
def accepted(
    head: Head, target: generation.Llama, text: list[int], prompt: int, depth: int
) -> Tensor:
    """Count runs of greedy draft tokens: [1 + depth]. The first number counts the positions of an
    answer. The others count those where the first 1, 2, ... drafts are all right."""
    if len(text) - depth <= prompt:
        return torch.zeros(1 + depth, dtype=torch.long)
    tokens = torch.tensor([text])
    columns = torch.arange(prompt - 1, len(text) - 1 - depth)[None]
    states = torch.cat([s for i, s in enumerate(target.states(tokens)) if i in LAYERS], -1)
    embedding = target.model.embed_tokens
    right = torch.ones(columns.shape, dtype=torch.bool)
    found = [right.sum()]
    time_ = len(text) - 1
    unrolled = head.unroll(states[:, :time_], tokens, embedding, columns, depth, own_drafts=True)
    for step, logits in enumerate(unrolled):
        best = logits.argmax(-1)
        right = right & (best + head.d2t[best] == tokens.gather(1, columns + 2 + step))
        found.append(right.sum())
    return torch.stack(found)


def train(options: argparse.Namespace, target: generation.Llama, packer: Packer) -> Head:
    """Train a head; the loss is reported every 25 steps."""
    torch.manual_seed(options.seed)
    head = Head(target, common_ids(packer, options.vocabulary))
    descent = distillation.Descent(head.named_parameters(), options.steps, options.rate)
    began = time.monotonic()
    for step in range(options.steps):
        tokens, marks = distillation.rows(packer, step, options.depth + 1)
        loss = loss_of(head, target, tokens, marks, options.depth)
        descent.take(loss)
        if (step + 1) % 25 == 0:
            spent = time.monotonic() - began
            print(f"step {step + 1} loss {loss.item():.4f} {spent:.0f} s", flush=True)
        if (step + 1) % 250 == 0:
            distillation.write(options.folder, head.state_dict(), head.config())
    return head


def main() -> None:
    """Train, write and measure."""
    options = arguments()
    target = generation.load(options.target)
    target.requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(options.target / "tokenizer.json"))
    packer = Packer(tokenizer, options.seed, options.tokens)
    head = train(options, target, packer)
    distillation.write(options.folder, head.state_dict(), head.config())
    if not options.items:
        return
    head.load_state_dict(
        {
            n: w.bfloat16().float() if w.is_floating_point() else w
            for n, w in head.state_dict().items()
        }
    )
    table = {}
    for kind in distillation.MEASURED_KINDS:
        texts = distillation.answered(target, tokenizer, kind, options.items)
        counts = sum(accepted(head, target, *text, options.depth) for text in texts)
        table[kind] = [round(float(count / counts[0]), 4) for count in counts[1:]]
        print(kind, json.dumps(table[kind]), flush=True)
    (options.folder / "acceptance.json").write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
