"""The tools that the tool-calling tasks offer: names, arguments, wordings of a need for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .words import (
    CITIES,
    COLOURS,
    DAYS,
    FOODS,
    LANGUAGES,
    NAMES,
    OBJECTS,
    PLACES,
    ROOMS,
    TOPICS,
    VERBS,
    invented_word,
    pick,
)

Draw = Callable[[random.Random], str | int]


@dataclass(frozen=True)
class Argument:
    """One argument: the names that it may have, its JSON type and a draw of a value."""

    names: str
    type: str
    draw: Draw


@dataclass(frozen=True)
class Family:
    """A family of tools for one purpose, with '|'-separated wordings."""

    names: str
    about: str
    arguments: tuple[Argument, ...]
    requests: str


def _word(words: list[str]) -> Draw:
    return lambda rng: pick(rng, words, 0.15)


def _number(low: int, high: int) -> Draw:
    return lambda rng: rng.randint(low, high)


def _phrase(rng: random.Random) -> str:
    """Return a few words, as a message or a title."""
    thing, place = pick(rng, OBJECTS, 0.1), rng.choice(PLACES)
    return rng.choice(
        (
            f"I am in the {place}",
            f"the {thing} is {rng.choice(COLOURS)}",
            f"we need {thing}",
            f"see you on {rng.choice(DAYS)}",
            f"bring the {thing}",
            f"{rng.choice(FOODS)} for dinner",
        )
    )


def _song(rng: random.Random) -> str:
    return rng.choice(
        (
            f"{rng.choice(COLOURS).capitalize()} {rng.choice(OBJECTS).capitalize()}",
            f"{pick(rng, NAMES, 0.3)}",
            f"The {rng.choice(OBJECTS).capitalize()}",
        )
    )


def _query(rng: random.Random) -> str:
    return rng.choice(
        (
            pick(rng, TOPICS, 0.3),
            f"{pick(rng, TOPICS)} in {pick(rng, CITIES)}",
            f"{rng.choice(COLOURS)} {pick(rng, OBJECTS, 0.2)}",
            pick(rng, FOODS, 0.2),
        )
    )


def _file(rng: random.Random) -> str:
    return f"{invented_word(rng)}.{rng.choice(('txt', 'md', 'py', 'json'))}"


def _state(rng: random.Random) -> str:
    return rng.choice(("on", "off"))


CITY = Argument("city|location|place|town", "string", _word(CITIES))

FAMILIES = (
    Family(
        "get_weather|weather|current_weather|fetch_weather|get_current_weather|weather_report",
        "Get the weather in a city.|Get the current weather|Look up the weather of a place.|"
        "Get the current weather in a given location.|Weather for a location",
        (CITY,),
        "What is the weather in {0}?|How is the weather in {0}?|What's the weather in {0}?|"
        "What is the weather like in {0} today?|Is it raining in {0}?|Tell me the weather in "
        "{0}.|weather in {0}|How warm is it in {0}?|What's the weather like in {0}?",
    ),
    Family(
        "get_time|current_time|time_in|clock|get_current_time",
        "Get the time in a city.|Get the current time.|Tell the time of a place.",
        (CITY,),
        "What time is it in {0}?|How late is it in {0}?|Tell me the time in {0}.|"
        "What is the time in {0}?",
    ),
    Family(
        "set_timer|timer|start_timer|countdown",
        "Set a timer.|Start a timer|Count minutes.",
        (Argument("minutes|duration|time", "integer", _number(1, 90)),),
        "Set a timer for {0} minutes.|Wake me in {0} minutes.|Start a timer of {0} minutes|"
        "Timer for {0} minutes, please.",
    ),
    Family(
        "send_message|message|send_text|text_person",
        "Send a message.|Send a text to a person.",
        (
            Argument("to|name|person|recipient", "string", _word(NAMES)),
            Argument("text|message|content|body", "string", _phrase),
        ),
        "Send {0} the message: {1}|Tell {0}: {1}|Send a message to {0}: {1}|"
        "Write to {0}: {1}|Text {0}: {1}",
    ),
    Family(
        "search|web_search|search_web|find_pages|lookup",
        "Search the web.|Look something up.|Search for pages.",
        (Argument("query|text|q|topic", "string", _query),),
        "Search for {0}.|Look up {0}.|Find pages about {0}|Search the web for {0}.|"
        "Can you search for {0}?",
    ),
    Family(
        "play_music|play_song|music|play",
        "Play a song.|Play music.|Start a song",
        (Argument("song|title|name|track", "string", _song),),
        "Play {0}.|Play the song {0}.|Please play {0}|I want to hear {0}.",
    ),
    Family(
        "get_price|price|item_price|product_price",
        "Get the price of a thing.|Find a price.",
        (Argument("item|product|name|thing", "string", _word(OBJECTS)),),
        "How much is the {0}?|What does the {0} cost?|What is the price of the {0}?",
    ),
    Family(
        "switch_light|set_light|light|lamp_control",
        "Switch a light.|Turn a light on or off.",
        (
            Argument("room|place|where", "string", _word(ROOMS)),
            Argument("state|status|value", "string", _state),
        ),
        "Turn {1} the light in the {0}.|Switch the light in the {0} {1}.|Light {1} in the {0}",
    ),
    Family(
        "translate|translate_word|translation|translator",
        "Translate a word.|Translate text.",
        (
            Argument("text|word|content", "string", _word(OBJECTS + FOODS)),
            Argument("language|to|target", "string", _word(LANGUAGES)),
        ),
        "Translate {0} into {1}.|Translate {0} to {1}|How do you say {0} in {1}?|"
        "What is {0} in {1}?",
    ),
    Family(
        "multiply|product|times|multiply_numbers",
        "Multiply two numbers.|Product of numbers.",
        (
            Argument("a|x|first", "integer", _number(2, 999)),
            Argument("b|y|second", "integer", _number(2, 999)),
        ),
        "What is {0} * {1}?|What is {0} times {1}?|Multiply {0} by {1}.|Multiply {0} and {1}.",
    ),
    Family(
        "add|add_numbers|sum|plus",
        "Add two numbers.|Sum of two numbers.|Adds numbers",
        (
            Argument("a|x|first", "integer", _number(2, 999)),
            Argument("b|y|second", "integer", _number(2, 999)),
        ),
        "What is {0} + {1}?|What is {0} plus {1}?|Add {0} and {1}.|{0} + {1}",
    ),
    Family(
        "add_event|create_event|calendar|plan_event",
        "Add an event to the calendar.|Plan a day.",
        (
            Argument("title|event|name", "string", _word(TOPICS)),
            Argument("day|date|when", "string", _word(DAYS)),
        ),
        "Put {0} on {1} in my calendar.|Plan {0} for {1}.|Add {0} to my calendar on {1}.",
    ),
    Family(
        "book_table|reserve_table|table|booking",
        "Book a table.|Reserve a table.",
        (
            Argument("people|guests|persons", "integer", _number(2, 20)),
            Argument("day|date|when", "string", _word(DAYS)),
        ),
        "Book a table for {0} people on {1}.|A table for {0} on {1}, please.|"
        "Reserve a table on {1} for {0} people.",
    ),
    Family(
        "set_temperature|heating|set_heating|thermostat",
        "Set the temperature.|Heat a room.",
        (
            Argument("room|place|where", "string", _word(ROOMS)),
            Argument("degrees|temperature|value", "integer", _number(10, 30)),
        ),
        "Set the {0} to {1} degrees.|Heat the {0} to {1} degrees.|Make it {1} degrees in the {0}.",
    ),
    Family(
        "find_route|route|directions|get_directions",
        "Find the way.|Get directions.",
        (
            Argument("start|from|origin", "string", _word(CITIES)),
            Argument("end|to|destination", "string", _word(CITIES)),
        ),
        "How do I get from {0} to {1}?|Show the way from {0} to {1}.|Route from {0} to {1}",
    ),
    Family(
        "read_file|open_file|load_file|cat_file",
        "Read a file.|Open a file.|Show a file",
        (Argument("path|file|name|filename", "string", _file),),
        "Read the file {0}.|Show me {0}|Open {0}.|What is in the file {0}?",
    ),
)


def composed_family(rng: random.Random) -> Family:
    """Return a family made of a verb and a noun, so that tool names must be read, not known."""
    verb = pick(rng, VERBS, 0.15)
    noun = pick(rng, OBJECTS, 0.15)
    kind = rng.choice(("colour", "number", "place", "name", "word"))
    draws: dict[str, tuple[str, Draw, str]] = {
        "colour": ("string", _word(COLOURS), f"{verb} the {noun} in {{0}}"),
        "number": ("integer", _number(1, 500), f"{verb} {{0}} {noun}s"),
        "place": ("string", _word(PLACES), f"{verb} the {noun} at the {{0}}"),
        "name": ("string", _word(NAMES), f"{verb} the {noun} of {{0}}"),
        "word": ("string", _word(OBJECTS), f"{verb} the {noun} with the {{0}}"),
    }
    type_, draw, request = draws[kind]
    verbs = request[0].upper() + request[1:]
    return Family(
        rng.choice((f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}{noun.capitalize()}")),
        rng.choice((f"{verb.capitalize()} a {noun}.", f"{verb.capitalize()} the {noun}")),
        (Argument(rng.choice((kind, "value", "what", invented_word(rng))), type_, draw),),
        f"{verbs}.|Please {request}.|Can you {request}?|{verbs}",
    )
