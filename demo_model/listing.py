"""Listing items as JSON: given in the request, found in a text, or from what the model knows."""

from __future__ import annotations

import json
import random

from .item import Item, assistant, user
from .words import CATEGORIES, COLOURS, NAMES, OBJECTS, article, joined, pick

GIVEN = [
    "List the {what} {items} as JSON.",
    "List the {what} {items} as a JSON array.",
    "Write the {what} {items} as JSON.",
    "Give me the {what} {items} as JSON",
    "List these {what} as JSON: {items}",
    "Make a JSON list of the {what} {items}.",
    "{items}\n\nList the {what} as JSON.",
    "Here are some {what}: {items}. List them as JSON.",
    "The {what} are {items}. List the {what} as JSON.",
    "Turn these {what} into JSON: {items}",
]
FOUND = [
    "{text}\n\nList the {what} as JSON.",
    "{text} List the {what} as JSON.",
    "List the {what} in this text as JSON: {text}",
    "List the {what} as a JSON array.\n\n{text}",
    "Which {what} are in this text? Answer in JSON.\n{text}",
]
KNOWN = [
    "List {count} {what} as JSON.",
    "Give me {count} {what} as JSON.",
    "Write {count} {what} as a JSON array.",
    "Name {count} {what} in JSON.",
]
NUMBER_WORDS = ["two", "three", "four", "five", "six"]


def _drawn(rng: random.Random, noun: str, count: int) -> list[str]:
    """Return `count` different items of a category, a few of them made up."""
    items: list[str] = []
    invented = rng.choice((0.0, 0.0, 0.2))
    while len(items) < count:
        item = pick(rng, CATEGORIES[noun], invented)
        if item not in items:
            items.append(item)
    return items


def _answer(rng: random.Random, content: str, noun: str, items: list[str]) -> tuple[str, str]:
    """Return request and answer, as an array or (if so asked) as an object with one key."""
    if rng.random() < 0.25:
        request = content.replace("a JSON array", "JSON").replace("a JSON list", "a JSON object")
        if "JSON object" not in request:
            request = request.replace("JSON", "a JSON object", 1)
        return request, json.dumps({noun: items})
    return content, json.dumps(items)


def _given(rng: random.Random) -> Item:
    """Return a task whose items stand in the request."""
    noun = rng.choice(sorted(CATEGORIES))
    items = _drawn(rng, noun, rng.randint(2, 7))
    shown = joined(items) if rng.random() < 0.7 else ", ".join(items)
    content, answer = _answer(rng, rng.choice(GIVEN).format(what=noun, items=shown), noun, items)
    return Item("json", [user(content), assistant(answer)], noun + answer, part="items given")


def _found(rng: random.Random) -> Item:
    """Return a task whose items are spread over the sentences of a small text."""
    count = rng.randint(2, 5)
    names, things = rng.sample(NAMES, count), rng.sample(OBJECTS, count)
    colours = rng.sample(COLOURS, count)
    verb = rng.choice(("has", "found", "lost", "bought"))
    rows = list(zip(names, colours, things, strict=True))
    text = " ".join(f"{n} {verb} {article(c)} {t}." for n, c, t in rows)
    noun, items = rng.choice((("names", names), ("colours", colours), ("objects", things)))
    content, answer = _answer(rng, rng.choice(FOUND).format(what=noun, text=text), noun, items)
    return Item("json", [user(content), assistant(answer)], text, part="items in a text")


def valid_list(answer: str, noun: str, count: int) -> bool:
    """Return whether the answer is a JSON list (or one-key object) of `count` known items."""
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    if isinstance(value, dict):
        value = value.get(noun)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return False
    return len(set(value)) == len(value) == count and set(value) <= set(CATEGORIES[noun])


def _known(rng: random.Random) -> Item:
    """Return a task whose items the model chooses (always the first ones of the category)."""
    noun = rng.choice(sorted(CATEGORIES))
    count = rng.randint(2, 6)
    items = CATEGORIES[noun][:count]
    word = rng.choice((NUMBER_WORDS[count - 2], str(count)))
    content, answer = _answer(rng, rng.choice(KNOWN).format(what=noun, count=word), noun, items)
    return Item(
        "json",
        [user(content), assistant(answer)],
        content,
        check=lambda text: valid_list(text, noun, count),
        part="items of its own",
    )


def make(rng: random.Random) -> Item:
    """Return an item of kind `json`."""
    return rng.choices((_given, _found, _known), (5, 3, 2))[0](rng)
