"""Copy tasks: repeat a given text exactly, from a word to several hundred tokens."""

from __future__ import annotations

import random
from collections.abc import Callable

from . import stories
from .item import Item, assistant, user
from .words import ALL_WORDS, CITIES, COLOURS, NAMES, OBJECTS, invented_word

PROMPTS = [
    "Repeat this: {0}",
    "Repeat: {0}",
    "Copy this text: {0}",
    "Copy this text:\n{0}",
    "Repeat the following text exactly:\n\n{0}",
    "Say exactly: {0}",
    "Repeat after me: {0}",
    "Please repeat this text:\n{0}",
    "Write this again: {0}",
    "Copy: {0}",
    "Echo: {0}",
    "Copy the following text.\n\n{0}",
    "Say this: {0}",
    "Please copy this: {0}",
]
SIGNS = "!\"#$%&'()*+,-./:;<=>?@[]^_`{|}~"
VLLM_SETTINGS = [
    "äöüßéèêçñøåœíóúâîô",
    "абвгдежзийклмнопрстуфхцчшщыэюя",
    "αβγδεζηθικλμνξοπρστυφχψω",
    "日本語中文字大小山川水火木金土人口手",
    "あいうえおかきくけこさしすせそたちつてと",
    "한국어글말나라사람",
    "العربيةكتابقلم",
    "😀🎉🚀🐱🌍❤✨👍",
]


def _words(rng: random.Random, size: int) -> str:
    """Return random words of the vocabulary, some made up."""
    made_up = rng.choice((0.0, 0.0, 0.1, 0.3))
    return " ".join(
        invented_word(rng) if rng.random() < made_up else rng.choice(ALL_WORDS) for _ in range(size)
    )


def _sentences(rng: random.Random, size: int) -> str:
    """Return one or more stories, cut after a sentence near the size."""
    text: list[str] = []
    while len(text) < size:
        for sentence in stories.build(rng).sentences:
            text += sentence.split(" ")
            if len(text) >= size:
                break
    return " ".join(text)


def _numbers(rng: random.Random, size: int) -> str:
    """Return numbers of one to eight digits."""
    count = max(1, min(size // 3, 30))
    return rng.choice((" ", ", ")).join(
        str(rng.randrange(10 ** rng.randint(1, 8))) for _ in range(count)
    )


def _signs(rng: random.Random, size: int) -> str:
    """Return words, numbers and punctuation as in source code."""
    parts = []
    for _ in range(max(1, size // 2)):
        word = rng.choice((rng.choice(ALL_WORDS), invented_word(rng), str(rng.randrange(1000))))
        sign = "".join(rng.choice(SIGNS) for _ in range(rng.choice((0, 1, 1, 2, 3))))
        parts.append(rng.choice((word + sign, sign + word, word + sign + " ", word + "\n")))
    return "".join(parts).strip()


def _foreign(rng: random.Random, size: int) -> str:
    """Return short made-up words of other scripts, or emoji."""
    letters = rng.choice(VLLM_SETTINGS)
    words = [
        "".join(rng.choice(letters) for _ in range(rng.randint(1, 5)))
        for _ in range(max(1, min(size // 8, 12)))
    ]
    return " ".join(words)


def _record(rng: random.Random, size: int) -> str:
    """Return lines such as 'name: Tom'."""
    lines = []
    for _ in range(max(1, size // 6)):
        key = rng.choice(("name", "city", "colour", "object", "number", invented_word(rng)))
        value = rng.choice(
            (
                rng.choice(NAMES),
                rng.choice(CITIES),
                rng.choice(COLOURS),
                rng.choice(OBJECTS),
                str(rng.randrange(100)),
            )
        )
        lines.append(f"{key}: {value}")
    return "\n".join(lines)


TEXTS: list[tuple[Callable[[random.Random, int], str], float]] = [
    (_words, 4),
    (_sentences, 4),
    (_numbers, 1),
    (_signs, 1),
    (_foreign, 0.7),
    (_record, 0.8),
]


def make(rng: random.Random, longest: int = 200) -> Item:
    """Return a copy task of up to about `longest` words."""
    size = int(2 ** rng.uniform(0.5, 6)) if rng.random() < 0.7 else rng.randint(20, longest)
    size = min(size, longest)
    texts, weights = zip(*TEXTS, strict=True)
    text = rng.choices(texts, weights)[0](rng, size)
    template = rng.choice(PROMPTS)
    quoted = rng.random() < 0.1 and '"' not in text
    content = template.format(f'"{text}"' if quoted else text)
    length = len(text.split())
    part = "up to 50 words" if length <= 50 else "51 words and more"
    return Item("copying", [user(content), assistant(text)], text, part=part)
