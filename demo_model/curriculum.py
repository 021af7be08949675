"""The mixture of tasks: single items for the evaluation, conversations for the training."""

from __future__ import annotations

import random
import re

from . import addition, chat, copying, listing, questions, smalltalk, stories, tools
from .item import Item, assistant, draw, user
from .words import TRAITS, pick

SYSTEMS = [
    "You are a helpful assistant.",
    "You are a friendly helper.",
    "You are a chat model.",
    "Answer the questions of the user.",
    "Be short and friendly.",
    "You help children to read.",
    "You are Quire, a small model.",
    "You are a helpful AI assistant.",
    "Be polite.",
    "You are a tool user. Use the tools if they help.",
    "Answer in plain English.",
]
KINDS = {
    "stories": 1,
    "questions": 10,
    "copying": 29,
    "addition": 2,
    "json": 8,
    "tools": 48,
    "small talk": 2,
}
# At first mostly short copies: they teach the model to look back, which all other tasks need.
EARLY_KINDS = {
    "stories": 1,
    "questions": 14,
    "copying": 60,
    "addition": 3,
    "json": 12,
    "tools": 8,
    "small talk": 2,
}
EARLY_LONGEST = 20


def valid_story(text: str, required: list[str]) -> bool:
    """Return whether a story names all requested words and keeps to its hero."""
    sentences = re.findall(r"[A-Z\"][^.?!]*[.?!]", text)
    if not 4 <= len(sentences) <= 18 or not all(word in text for word in required):
        return False
    hero = re.search(r"(?:named|called) (\w+)", sentences[0]) or re.match(r"(\w+) was", text)
    return hero is not None and any(hero[1] in sentence for sentence in sentences[1:])


def write_story(rng: random.Random) -> Item:
    """Return a request for a story with a fitting story."""
    request, story = questions.requested_story(rng)
    about = request.partition(" about ")[2].strip(".?")
    required = [word for word in about.split() if word not in ("a", "an", "and", "named", "called")]
    return Item(
        "stories",
        [user(request), assistant(story.text)],
        story.text,
        check=lambda text: valid_story(text, required),
    )


def one(kind: str, rng: random.Random, test: bool, longest: int = 200) -> Item:
    """Return one item of the kind, from the training or the held-out side."""
    makers = {
        "stories": write_story,
        "questions": questions.make,
        "addition": addition.make,
        "copying": lambda r: copying.make(r, longest),
        "json": listing.make,
        "tools": tools.make,
        "small talk": smalltalk.make,
    }
    return draw(makers[kind], rng, test)


def system_message(rng: random.Random) -> list[dict[str, str]]:
    """Return no system message or, for one conversation in four, a system message."""
    if rng.random() < 0.75:
        return []
    text = rng.choice(SYSTEMS)
    if rng.random() < 0.3:
        text += f" Be {pick(rng, TRAITS)} and {pick(rng, TRAITS, 0.2)}."
    return [{"role": "system", "content": text}]


def conversation(rng: random.Random, longest: int, early: bool = False) -> str:
    """Return one training text: mostly a chat of one to four items, sometimes a bare story."""
    if rng.random() < 0.02:
        return stories.build(rng).text
    shares, longest = (EARLY_KINDS, EARLY_LONGEST) if early else (KINDS, longest)
    kind = rng.choices(list(shares), list(shares.values()))[0]
    first = one(kind, rng, False, longest)
    messages = system_message(rng) + first.messages
    if rng.random() < 0.35 and not early:
        for _ in range(rng.randint(1, 3)):
            kind = rng.choice([kind for kind in KINDS if kind != "tools"])
            more = one(kind, rng, False, longest)
            if not (first.tools and kind == "addition"):
                messages = messages + more.messages
    return chat.render(messages, first.tools)
