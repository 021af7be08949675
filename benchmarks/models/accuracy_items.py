"""The items and texts for measuring: held-out ones of the demo model's curriculum.

Items are held out by a hash of their question (demo_model/item.py). So the model was not trained on
any of them, whatever the seed. Text is made of such items in the mixture of the training.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from demo_model import chat, curriculum
from demo_model.item import Item
from quire.render.tokens.tokenizer import Tokenizer

ITEM_SEED = 2024  # demo_model/evaluation.py's, so that both measure the same items
TEXT_SEED = 2026
DRAWS_PER_ITEM = 5
EXTRA_TOKENS = 40  # an answer that is longer than the wanted one by more is wrong
FREE_TOKENS = 400  # where several answers are right
OPENING_TOKENS = 3  # <|im_start|>, the role, a line end


@dataclass(frozen=True)
class Task:
    """An item with its prompt, and how long an answer may get."""

    item: Item
    prompt: str
    max_tokens: int

    def is_right(self, answer: str) -> bool:
        check = self.item.check
        return check(answer) if check else answer == chat.content_of(self.item.answer)


@dataclass(frozen=True)
class Text:
    """A conversation. is_answer: which tokens are the assistant's, the end of its turn included."""

    token_ids: list[int]
    is_answer: npt.NDArray[np.bool_]


def held_out_tasks(kind: str, count: int, tokenizer: Tokenizer) -> list[Task]:
    """Return up to `count` tasks of a kind, without repeated prompts."""
    rng = random.Random(f"{ITEM_SEED} {kind}")
    items: dict[str, Item] = {}
    for _ in range(count * DRAWS_PER_ITEM):
        item = curriculum.one(kind, rng, test=True)
        items.setdefault(chat.render_prompt(item), item)
        if len(items) == count:
            break
    return [Task(item, prompt, _limit(item, tokenizer)) for prompt, item in items.items()]


def _limit(item: Item, tokenizer: Tokenizer) -> int:
    if item.check:
        return FREE_TOKENS
    return len(tokenizer.encode(chat.content_of(item.answer))) + EXTRA_TOKENS


def held_out_texts(num_tokens: int, tokenizer: Tokenizer) -> list[Text]:
    """Return conversations of one item each, until there are as many tokens."""
    rng, kinds = random.Random(TEXT_SEED), curriculum.KINDS
    texts: list[Text] = []
    while sum(len(text.token_ids) for text in texts) < num_tokens:
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        item = curriculum.one(kind, rng, test=True)
        messages = curriculum.system_message(rng) + item.messages
        token_ids = list(tokenizer.encode(chat.render(messages, item.tools)))
        texts.append(Text(token_ids, answer_mask(token_ids, *_marks(tokenizer))))
    return texts


def _marks(tokenizer: Tokenizer) -> tuple[int, int, int]:
    """Return the tokens that open a turn, name the assistant, and end a turn."""
    start, speaker, end = tokenizer.encode(f"{chat.START}assistant{chat.END}")
    return start, speaker, end


def answer_mask(
    token_ids: Sequence[int], start: int, speaker: int, end: int
) -> npt.NDArray[np.bool_]:
    """Return which tokens are content of the assistant's turns, or end them; bool [T]."""
    mask = np.zeros(len(token_ids), dtype=np.bool_)
    opened: int | None = None
    for index, token in enumerate(token_ids):
        if token == start:
            is_assistant = list(token_ids[index + 1 : index + 2]) == [speaker]
            opened = index if is_assistant else None
        mask[index] = opened is not None and index >= opened + OPENING_TOKENS
        if token == end:
            opened = None
    return mask
