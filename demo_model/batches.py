"""Training batches: conversations packed into rows, with the positions that carry loss."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from . import chat, curriculum

# Row length -> (longest copy task in words, share of the steps once all lengths are in use).
LENGTHS = {256: (50, 0.5), 768: (200, 0.42), 2048: (250, 0.08)}
OTHER_SHARE = 0.05
TARGET_SHARE = 0.45


@dataclass
class Batch:
    """Token rows, and of the flattened rows the places with loss and what follows them."""

    tokens: Tensor
    loss_indices: Tensor
    targets: Tensor


class Packer:
    """Makes the batch of any step again from seed, step and rank."""

    def __init__(self, tokenizer: Tokenizer, seed: int, tokens: int) -> None:
        self.tokenizer, self.seed, self.tokens = tokenizer, seed, tokens
        self.start, self.end, self.stop = (
            tokenizer.token_to_id(token) for token in (chat.START, chat.END, chat.STOP)
        )
        self.speaker = tokenizer.token_to_id("assistant")

    def length(self, step: int, short_steps: int) -> int:
        """Return the row length of a step: the shortest at first, then a mixture."""
        if step < short_steps:
            return min(LENGTHS)
        shares = [share for _, share in LENGTHS.values()]
        return random.Random(f"{self.seed} {step}").choices(list(LENGTHS), shares)[0]

    def batch(self, step: int, rank: int, length: int, early: bool = False) -> Batch:
        """Return the batch of one step and process, rows of `length` tokens."""
        rng = random.Random(f"{self.seed} {step} {rank}")
        rows = [self.row(rng, length + 1, early) for _ in range(self.tokens // length)]
        tokens = torch.tensor([row for row, _ in rows])
        loss = torch.tensor([marks for _, marks in rows])
        chosen = loss[:, 1:].flatten().nonzero().flatten()
        size = int(self.tokens * TARGET_SHARE)
        if len(chosen) > size:
            chosen = chosen[torch.tensor(sorted(rng.sample(range(len(chosen)), size)))]
        loss_indices = torch.zeros(size, dtype=torch.long)
        targets = torch.full((size,), -100)
        loss_indices[: len(chosen)] = chosen
        targets[: len(chosen)] = tokens[:, 1:].flatten()[chosen]
        return Batch(tokens[:, :-1].contiguous(), loss_indices, targets)

    def row(
        self, rng: random.Random, length: int, early: bool = False
    ) -> tuple[list[int], list[bool]]:
        """Return one row of packed conversations and which of its tokens carry loss."""
        longest = LENGTHS[length - 1][0]
        ids: list[int] = []
        marks: list[bool] = []
        while len(ids) < length:
            for _ in range(4):
                text = curriculum.conversation(rng, longest, early)
                new = self.tokenizer.encode(text).ids
                if len(ids) + len(new) < length:
                    break
            ids += new + [self.stop]
            marks += self.marks(rng, new) + [True]
        return ids[:length], marks[:length]

    def marks(self, rng: random.Random, ids: list[int]) -> list[bool]:
        """Mark assistant content with its end token, and a tenth of everything else."""
        if ids[0] != self.start:
            return [True] * len(ids)
        marks, inside = [], False
        for index, token in enumerate(ids):
            if token == self.start:
                inside = False
            answer = inside and index >= 3 and ids[index - 2 : index] != [self.start, self.speaker]
            marks.append(answer or rng.random() < OTHER_SHARE)
            if token == self.end:
                inside = False
            if token == self.speaker and ids[index - 1] == self.start:
                inside = True
        return marks
