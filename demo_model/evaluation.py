"""Measure the shipped model on held-out items: python -m demo_model.evaluation [--items 2000]."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path

from tokenizers import Tokenizer

from . import chat, curriculum, generation
from .item import Item
from .tokenizer import DEFAULT_FOLDER

LIMIT = 1024
BATCH_TOKENS = 40_000


def held_out_items(kind: str, count: int, seed: int) -> list[Item]:
    """Return up to `count` held-out items of a kind, no prompt twice."""
    rng = random.Random(f"{seed} {kind}")
    items: dict[str, Item] = {}
    for _ in range(count * 5):
        item = curriculum.one(kind, rng, test=True)
        items.setdefault(chat.render_prompt(item), item)
        if len(items) == count:
            break
    return list(items.values())


def right(item: Item, answer: str) -> bool:
    """Return whether an answer is the wanted one (or passes the check of the item)."""
    return item.check(answer) if item.check else answer == chat.content_of(item.answer)


def answers(model: generation.Llama, tokenizer: Tokenizer, items: list[Item]) -> list[str]:
    """Return the model's greedy answers, computed in batches of similar length."""
    prompts = [tokenizer.encode(chat.render_prompt(item)).ids for item in items]
    lengths = [len(tokenizer.encode(chat.content_of(item.answer)).ids) for item in items]
    order = sorted(range(len(items)), key=lambda index: (lengths[index], len(prompts[index])))
    found = [""] * len(items)
    while order:
        size = max(1, BATCH_TOKENS // (len(prompts[order[-1]]) + lengths[order[-1]] + 40))
        chosen, order = order[-size:], order[:-size]
        limit = min(LIMIT, max(lengths[index] for index in chosen) + 40)
        outputs = generation.generate(model, [prompts[index] for index in chosen], limit)
        for index, output in zip(chosen, outputs, strict=True):
            found[index] = tokenizer.decode(output, skip_special_tokens=False)
    return found


def measure(
    model: generation.Llama, tokenizer: Tokenizer, kind: str, count: int, show: int
) -> dict[str, object]:
    """Return the accuracy on one kind, in all and by part; print up to `show` wrong answers."""
    items = held_out_items(kind, count, seed=2024)
    total: Counter[str] = Counter()
    good: Counter[str] = Counter()
    for item, answer in zip(items, answers(model, tokenizer, items), strict=True):
        total[item.part] += 1
        if right(item, answer):
            good[item.part] += 1
        elif show > 0:
            show -= 1
            print(
                f"  WRONG {chat.render_prompt(item)!r}\n    wanted "
                f"{chat.content_of(item.answer)!r}\n    got    {answer!r}"
            )
    parts = {part: round(good[part] / total[part], 4) for part in sorted(total)}
    return {
        "items": len(items),
        "accuracy": round(sum(good.values()) / len(items), 4),
        "parts": parts if len(parts) > 1 else {},
        "part_items": {part: total[part] for part in parts} if len(parts) > 1 else {},
    }


def main() -> None:
    """Measure all kinds and write the accuracies as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--items", type=int, default=2000)
    parser.add_argument("--kinds", nargs="*", default=list(curriculum.KINDS))
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print per kind")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "accuracy.json")
    options = parser.parse_args()
    model = generation.load(options.folder)
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    table = {}
    for kind in options.kinds:
        began = time.monotonic()
        table[kind] = measure(model, tokenizer, kind, options.items, options.show)
        print(kind, json.dumps(table[kind]), f"{time.monotonic() - began:.0f} s", flush=True)
    options.output.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
