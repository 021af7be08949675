"""Questions about a story or about a few plain facts, with their answers."""

from __future__ import annotations

import random
from collections.abc import Callable

from . import stories
from .item import Item, assistant, user
from .stories import Story
from .words import COLOURS, FOODS, NAMES, OBJECTS, ROOMS, article, pick

UNTOLD = "The story does not say."

# Story part -> question wordings and the answer.
STORY_QUESTIONS: dict[str, list[tuple[list[str], str]]] = {
    "": [
        (
            ["What was the name of the {kind}?", "What was the {kind} called?"],
            "The {kind} was called {name}.",
        ),
        (
            ["Who was {name}?", "What kind of animal or person was {name}?"],
            "{name} was {a_trait} {kind}.",
        ),
        (["Where did {name} go?", "Where did {name} walk to?"], "{name} went to the {place}."),
        (["When did {name} go to the {place}?"], "{name} went there one {time}."),
        (
            ["Who is the story about?", "What is the story about?"],
            "The story is about {a_trait} {kind} called {name}.",
        ),
    ],
    "home": [
        (
            ["Where did {name} live?", "Where was the home of {name}?"],
            "{name} lived in a {home} near the {place2}.",
        ),
    ],
    "find": [
        (["What did {name} find?", "What did {name} see?"], "{name} found {a_colour} {thing}."),
        (
            ["What colour was the {thing}?", "Which colour did the {thing} have?"],
            "The {thing} was {colour}.",
        ),
        (
            ["Where was the {thing}?", "Where did {name} find the {thing}?"],
            "The {thing} was {where} a {spot}.",
        ),
    ],
    "friend": [
        (
            ["Who did {name} meet?", "Whom did {name} meet?"],
            "{name} met {a_kind2} called {friend}.",
        ),
        (["Who was {friend}?"], "{friend} was {a_kind2}."),
        (
            ["What did {friend} lose?", "What was {friend} looking for?"],
            "{friend} had lost {a_colour2} {thing2}.",
        ),
        (
            ["What colour was the {thing2}?", "Which colour did the {thing2} have?"],
            "The {thing2} was {colour2}.",
        ),
        (
            ["Who lost the {thing2}?", "Who was looking for the {thing2}?"],
            "{friend} had lost the {thing2}.",
        ),
    ],
    "food": [(["What did {eater} eat?"], "{Eater} ate {food}.")],
    "feel": [
        (["How did {name} feel?", "How did {name} feel in the end?"], "{name} felt {feeling}.")
    ],
}

PROMPTS = [
    "{story}\n\n{question}",
    "{story}\n{question}",
    "{story} {question}",
    "Read this story and answer the question.\n\n{story}\n\n{question}",
    "Here is a story: {story}\n\nQuestion: {question}",
]


def story_question(rng: random.Random, story: Story) -> tuple[str, str]:
    """Return one question about the story and its answer (sometimes that the story does not say
    it)."""
    slots = dict(story.slots)
    parts = set(slots["told"].split(","))
    together = "friend" in parts
    slots["eater"] = "they" if together else slots["name"]
    slots["Eater"] = "They" if together else slots["name"]
    if rng.random() < 0.08:
        part = rng.choice(sorted(STORY_QUESTIONS.keys() - parts - {""}) or [""])
    else:
        part = rng.choice(sorted(parts | {""}, key=lambda part: (len(part), part)))
    if part and part not in parts:
        wordings, _ = STORY_QUESTIONS[part][0]
        return rng.choice(wordings).format(**slots), UNTOLD
    wordings, answer = rng.choice(STORY_QUESTIONS[part])
    return rng.choice(wordings).format(**slots), answer.format(**slots)


def about_story(rng: random.Random) -> Item:
    """Return a question whose story stands in the same user message."""
    story = stories.build(rng)
    question, answer = story_question(rng, story)
    text = rng.choice(PROMPTS).format(story=story.text, question=question)
    return Item("questions", [user(text), assistant(answer)], story.text, part="story in prompt")


def after_story(rng: random.Random) -> Item:
    """Return a chat with a story, then one to three questions about it."""
    request, story = requested_story(rng)
    if rng.random() < 0.3:
        messages = [user("Here is a story: " + story.text), assistant("Thank you for the story.")]
    else:
        messages = [user(request), assistant(story.text)]
    for _ in range(rng.randint(1, 3)):
        question, answer = story_question(rng, story)
        messages += [user(question), assistant(answer)]
    return Item("questions", messages, story.text, part="story earlier in the chat")


def requested_story(rng: random.Random) -> tuple[str, Story]:
    """Return a request for a story and a story that fits it."""
    slots = stories.new_slots(rng)
    subject = rng.choice(["kind", "kind", "kind", "named", "two", "thing", "any", "name"])
    given: dict[str, str] = {}
    if subject in ("kind", "named", "two"):
        given["kind"] = slots["kind"]
        about = article(slots["kind"])
        if subject == "named":
            given["name"] = slots["name"]
            about += rng.choice([" named ", " called "]) + slots["name"]
        if subject == "two":
            given["kind2"] = slots["kind2"]
            about += " and " + article(slots["kind2"])
    elif subject == "thing":
        given.update(thing=slots["thing"], colour=slots["colour"])
        about = article(slots["colour"]) + " " + slots["thing"]
    elif subject == "name":
        given["name"] = about = slots["name"]
    story = stories.build(rng, given)
    if not given:
        wording = [
            "Tell me a story.",
            "Tell me a short story",
            "Write a story.",
            "A story, please.",
        ]
        return rng.choice(wording), story
    wording = [
        "Tell me a story about {0}.",
        "Tell me a story about {0}",
        "Write a short story about {0}.",
        "Please tell me a short story about {0}.",
        "Can you tell me a story about {0}?",
        "I want a story about {0}.",
        "Write a story about {0}",
        "tell me a story about {0}",
    ]
    return rng.choice(wording).format(about), story


Fact = tuple[str, list[tuple[str, str]]]


def _fact_have(rng: random.Random, person: str, thing: str) -> Fact:
    colour = rng.choice(COLOURS)
    owned = f"{article(colour)} {thing}"
    return f"{person} has {owned}.", [
        (f"What does {person} have?", f"{person} has {owned}."),
        (f"Who has the {thing}?", f"{person} has the {thing}."),
        (f"What colour is the {thing}?", f"The {thing} is {colour}."),
        (f"Which colour is the {thing} of {person}?", f"The {thing} is {colour}."),
    ]


def _fact_location(rng: random.Random, person: str, thing: str) -> Fact:
    room = pick(rng, ROOMS)
    return f"The {thing} is in the {room}.", [
        (f"Where is the {thing}?", f"The {thing} is in the {room}."),
        (f"What is in the {room}?", f"The {thing} is in the {room}."),
    ]


def _fact_colour(rng: random.Random, person: str, thing: str) -> Fact:
    colour = rng.choice(COLOURS)
    return f"The {thing} is {colour}.", [
        (f"What colour is the {thing}?", f"The {thing} is {colour}."),
        (f"Which colour does the {thing} have?", f"The {thing} is {colour}."),
    ]


def _fact_like(rng: random.Random, person: str, thing: str) -> Fact:
    food = pick(rng, FOODS, 0.1)
    return f"{person} likes {food}.", [
        (f"What does {person} like?", f"{person} likes {food}."),
        (f"Who likes {food}?", f"{person} likes {food}."),
    ]


def _fact_number(rng: random.Random, person: str, thing: str) -> Fact:
    number, food = rng.randint(2, 99), rng.choice(FOODS)
    return f"{person} has {number} {food}.", [
        (f"How many {food} does {person} have?", f"{person} has {number} {food}."),
    ]


FACTS: list[Callable[[random.Random, str, str], Fact]] = [
    _fact_have,
    _fact_location,
    _fact_colour,
    _fact_like,
    _fact_number,
]


def about_facts(rng: random.Random) -> Item:
    """Return a question about one of several plain facts in the same message."""
    count = rng.randint(1, 7)
    people, things = rng.sample(NAMES, count), rng.sample(OBJECTS, count)
    people = [pick(rng, NAMES, 1.0) if rng.random() < 0.1 else person for person in people]
    facts, used = [], set()
    for person, thing in zip(people, things, strict=True):
        text, questions = rng.choice(FACTS)(rng, person, thing)
        last = text.rsplit(" ", 1)[1]
        if last not in used:
            facts.append((text, questions))
            used.add(last)
    text = " ".join(fact[0] for fact in facts)
    messages = []
    for turn in range(rng.choice((1, 1, 2, 3))):
        question, answer = rng.choice(rng.choice(facts)[1])
        lead = text + rng.choice([" ", "\n", "\n\n"]) if turn == 0 else ""
        messages += [user(lead + question), assistant(answer)]
    return Item("questions", messages, text, part="plain facts")


def make(rng: random.Random) -> Item:
    """Return an item of kind `questions`."""
    return rng.choice((about_story, after_story, about_facts))(rng)
