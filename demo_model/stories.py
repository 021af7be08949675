"""Short stories from a small grammar, each with the facts that it states."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from .words import (
    COLOURS,
    FEELINGS,
    FOODS,
    KINDS,
    NAMES,
    OBJECTS,
    PLACES,
    SPOTS,
    TRAITS,
    article,
    pick,
)

TIMES = ["morning", "day", "evening", "afternoon", "night"]
HOMES = ["house", "hut", "tower", "cottage", "tent"]
PREPOSITIONS = ["under", "behind", "near", "next to", "in front of"]
WEATHER = [
    "The sun was warm.",
    "It was raining.",
    "The wind was cold.",
    "Snow fell from the sky.",
    "The sky was blue.",
    "The birds were singing.",
    "It was very quiet there.",
]
ENDINGS = [
    "They were friends for ever.",
    "It was a good day.",
    "That was the end of the day.",
    "And they never forgot it.",
    "From then on they met every day.",
    "Then the moon came up.",
]


@dataclass
class Story:
    """A story: its text and the slots that fill it (absent slots do not occur)."""

    slots: dict[str, str]
    sentences: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole story as one paragraph."""
        return " ".join(self.sentences)

    def write_one(self, rng: random.Random, *variants: str) -> None:
        """Add one of the sentence variants, filled from the slots."""
        self.sentences.append(rng.choice(variants).format(**self.slots))


def new_slots(rng: random.Random) -> dict[str, str]:
    """Return freshly drawn slots: two characters, two things, places, food and feelings."""
    name, friend = rng.sample(NAMES, 2)
    kind, kind2 = rng.sample(KINDS, 2)
    thing, thing2 = rng.sample(OBJECTS, 2)
    if rng.random() < 0.1:
        name = pick(rng, NAMES, 1.0)
    if rng.random() < 0.05:
        kind = pick(rng, KINDS, 1.0)
    trait, trait2 = rng.sample(TRAITS, 2)
    return {
        "name": name,
        "friend": friend,
        "kind": kind,
        "a_kind2": article(kind2),
        "kind2": kind2,
        "trait": trait,
        "a_trait": article(trait),
        "trait2": trait2,
        "thing": thing,
        "colour": rng.choice(COLOURS),
        "thing2": thing2,
        "colour2": rng.choice(COLOURS),
        "place": rng.choice(PLACES),
        "home": rng.choice(HOMES),
        "place2": rng.choice(PLACES),
        "spot": rng.choice(SPOTS),
        "time": rng.choice(TIMES),
        "where": rng.choice(PREPOSITIONS),
        "food": rng.choice(FOODS),
        "feeling": rng.choice(FEELINGS),
        "feeling2": rng.choice(FEELINGS),
    }


def with_articles(slots: dict[str, str]) -> dict[str, str]:
    """Return the slots with the colour words also in their 'a red' form."""
    slots["a_colour"] = article(slots["colour"])
    slots["a_colour2"] = article(slots["colour2"])
    slots["a_trait"] = article(slots["trait"])
    slots["a_kind2"] = article(slots["kind2"])
    slots["a_kind"] = article(slots["kind"])
    return slots


def build(rng: random.Random, given: dict[str, str] | None = None, long: bool = False) -> Story:
    """Return a new story; `given` fixes some slots, `long` adds every optional sentence.

    Slot `parts` lists the names of the optional parts that occur.
    """
    slots = new_slots(rng)
    slots.update(given or {})
    story = Story(with_articles(slots))
    parts = {part for part in ("home", "find", "friend", "food", "feel") if rng.random() < 0.75}
    if long:
        parts = {"home", "find", "friend", "food", "feel"}
    if given and "thing" in given:
        parts.add("find")
    if given and "kind2" in given:
        parts.add("friend")
    if not parts & {"find", "friend"}:
        parts.add("find")
    _opening(story, rng, parts)
    _middle(story, rng, parts)
    _ending(story, rng, parts)
    story.slots["told"] = ",".join(sorted(parts))
    return story


def _opening(story: Story, rng: random.Random, parts: set[str]) -> None:
    """Write the hero and the home."""
    story.write_one(
        rng,
        "Once upon a time there was {a_trait} {kind} named {name}.",
        "There was once {a_trait} {kind} called {name}.",
        "{name} was {a_trait} {kind}.",
    )
    if "home" in parts:
        story.write_one(
            rng,
            "{name} lived in a {home} near the {place2}.",
            "{name} had a {home} near the {place2}.",
        )


def _middle(story: Story, rng: random.Random, parts: set[str]) -> None:
    """Write the walk, the found thing and the friend."""
    story.write_one(
        rng, "One {time}, {name} went to the {place}.", "One {time} {name} walked to the {place}."
    )
    if rng.random() < 0.5:
        story.write_one(rng, *WEATHER)
    if "find" in parts:
        story.write_one(
            rng,
            "There {name} found {a_colour} {thing} {where} a {spot}.",
            "{name} saw {a_colour} {thing} {where} a {spot}.",
        )
    if "friend" in parts:
        story.write_one(
            rng,
            "Then {name} met {a_kind2} named {friend}.",
            "Soon {a_kind2} called {friend} came along.",
        )
        story.write_one(
            rng,
            "{friend} had lost {a_colour2} {thing2}.",
            "{friend} was looking for {a_colour2} {thing2}.",
        )
        story.write_one(
            rng,
            "{name} wanted to help, so they looked everywhere.",
            '"Can you help me?" said {friend}. "Yes," said {name}.',
            "{name} helped {friend}, and they found it.",
        )


def _ending(story: Story, rng: random.Random, parts: set[str]) -> None:
    """Write the meal, the feeling and a closing sentence."""
    if "food" in parts:
        if "friend" in parts:
            story.write_one(
                rng, "Then they ate {food} together.", "After that they ate some {food}."
            )
        else:
            story.write_one(rng, "Then {name} ate some {food}.", "After that {name} ate {food}.")
    if "feel" in parts:
        story.write_one(
            rng, "In the end {name} felt {feeling}.", "{name} went home and was {feeling}."
        )
    if "friend" in parts:
        story.write_one(rng, *ENDINGS)
    else:
        story.write_one(rng, *ENDINGS[1:3], *ENDINGS[5:])
