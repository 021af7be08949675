"""Requests of the drafting benchmark: one at a time, greedy, the same token ids for all engines.

Requests to the demo model are items that its training held out, through its chat template. The
other model continues a cycle of tokens.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

import quire
from benchmarks.cpu.drivers.drafting import Request
from benchmarks.cpu.repeating import NUM_CYCLES, PERIOD, cycle
from benchmarks.cpu.workloads import QWEN
from demo_model import chat, curriculum
from demo_model.item import Item

DEMO = Path(quire.__file__).parent / "demo"
MIN_TOKENS, MAX_TOKENS = 16, 400  # of an answer of the demo model
PARTS = {"tools": ("call needed", "two calls needed")}
SPARE = 32  # tokens in addition to the expected answer
TURNS = 2.5  # of a cycle, in a prompt


@dataclass(frozen=True)
class Task:
    """A kind of requests. aim: the intended ratio to the plain speed, in 16 and in 8 bits."""

    name: str
    model: str
    aim: tuple[float, float]


TASKS = [
    Task("copying", "demo", (2.0, 2.0)),
    Task("tools", "demo", (2.0, 2.0)),
    Task("json", "demo", (2.0, 2.0)),
    Task("repeated", QWEN.name, (2.0, 1.6)),
]


def requests_of(task: Task, num: int, num_tokens: int) -> list[Request]:
    """Return `num` requests after one that warms up. num_tokens: length of an answer that repeats
    itself."""
    if task.model == "demo":
        return demo_requests(task.name, num + 1)
    found = []
    for i in range(num + 1):
        tokens = cycle(i % NUM_CYCLES) * 4
        first = i // NUM_CYCLES % PERIOD
        found.append(Request(tokens[first : first + int(TURNS * PERIOD)], num_tokens, None))
    return found


def demo_requests(kind: str, num: int) -> list[Request]:
    """Return held-out items of a kind whose answers are long enough for a rate."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    rng, found = random.Random(f"guesses {kind}"), dict[str, Request]()
    while len(found) < num:
        item = curriculum.one(kind, rng, test=True)
        length = len(tokenizer.encode(chat.content_of(item.answer)).ids)
        if MIN_TOKENS <= length <= MAX_TOKENS and _fits(item):
            text = chat.render_prompt(item)
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            found[text] = Request(ids, length + SPARE, tokenizer.token_to_id(chat.END))
    return list(found.values())


def _fits(item: Item) -> bool:
    return item.part in PARTS.get(item.kind, (item.part,))
