"""The small vocabulary from which every text of the curriculum is built."""

from __future__ import annotations

import random


def _split(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


NAMES = _split(
    "Tom Anna Mia Ben Lily Max Sara Leo Nina Sam Ella Jack Rosa Finn Clara Oscar Ruby Hugo Ivy "
    "Theo Maya Felix Alice Noah Zoe Adam Emma Paul Lucy Peter Eva David Molly Henry Grace Simon "
    "Julia Oliver Hana Omar Bob Amy Kim John Mary"
)
KINDS = _split(
    "fox bear rabbit cat dog mouse bird duck frog owl horse cow pig goat sheep lion tiger wolf "
    "hedgehog squirrel turtle elephant monkey penguin dragon robot girl boy king queen farmer "
    "wizard pirate knight princess snail bee fish hen deer"
)
COLOURS = _split("red blue green yellow orange purple pink brown black white grey golden silver")
OBJECTS = _split(
    "ball hat box key book lamp cup bell coat boat kite drum ring map stone shoe scarf bag clock "
    "basket rope pencil flower feather shell coin letter spoon blanket candle bottle umbrella "
    "button mirror ladder bucket whistle puzzle toy chair table bike car pen"
)
PLACES = _split(
    "park forest river beach market school garden lake hill farm village castle library station "
    "meadow mountain island bridge mill harbour museum field town cave shop"
)
ROOMS = _split("kitchen bedroom bathroom hall cellar attic office garage lounge")
SPOTS = _split("tree rock bush bench log fence wall leaf cart door roof stone")
FOODS = _split(
    "apples bread cheese soup cake honey berries rice pears plums carrots nuts cookies eggs "
    "pancakes grapes corn beans pie noodles cherries tomatoes bananas lemons potatoes"
)
TRAITS = _split(
    "little brave clever kind old young shy happy quiet curious lazy funny gentle proud strong "
    "small tall friendly careful hungry"
)
FEELINGS = _split("happy sad tired glad proud calm angry sleepy excited afraid lonely surprised")
CITIES = _split(
    "Paris London Berlin Rome Madrid Tokyo Vienna Oslo Lisbon Prague Athens Cairo Dublin Boston "
    "Chicago Delhi Lima Sydney Toronto Seoul Zurich Milan Munich Hamburg Geneva Warsaw Helsinki "
    "Moscow Beijing Denver Dallas Seattle"
)
DAYS = _split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
LANGUAGES = _split("French German Spanish Italian English Greek Polish Dutch Japanese Chinese")
VERBS = _split(
    "paint clean open close move find count check fix wash buy sell hide show start stop lock "
    "rent order reserve cancel update delete print scan"
)
TOPICS = _split(
    "music history science weather football cooking travel art trains birds space computers "
    "movies gardens news dinosaurs planets rivers poems chess maps"
)
COMMON = _split(
    "the a and is was to in it of on with for that this they he she you we not but when then very "
    "more some all one two three day night sun moon rain snow wind water fire house road morning "
    "evening good big long new first last here there home friend mother father sister brother"
)

CATEGORIES = {
    "colours": COLOURS,
    "animals": KINDS[:24],
    "foods": FOODS,
    "cities": CITIES,
    "names": NAMES,
    "objects": OBJECTS,
    "places": PLACES,
    "days": DAYS,
    "languages": LANGUAGES,
    "rooms": ROOMS,
}

ALL_WORDS = sorted(
    set(NAMES + KINDS + COLOURS + OBJECTS + PLACES + ROOMS + SPOTS + FOODS + TRAITS + FEELINGS)
    | set(CITIES + DAYS + LANGUAGES + VERBS + TOPICS + COMMON)
)

_ONSETS = _split("b c d f g h j k l m n p r s t v w z br cl dr fl gr pl pr st tr sh ch th qu x y")
_VOWELS = _split("a e i o u ai ea ee oa oo ou")
_CODAS = ["", "", "", "n", "r", "l", "s", "t", "m", "k", "nd", "st", "x", "ck"]


def invented_word(rng: random.Random, parts: int = 0) -> str:
    """Return a made-up lower-case word of one to three syllables."""
    count = parts or rng.choice((1, 2, 2, 3))
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(count)
    )


def pick(rng: random.Random, words: list[str], invented: float = 0.0) -> str:
    """Return one of `words`, or with probability `invented` a made-up word."""
    if invented and rng.random() < invented:
        word = invented_word(rng)
        return word.capitalize() if words[0][0].isupper() else word
    return rng.choice(words)


def article(word: str) -> str:
    """Return `word` with the fitting indefinite article before it."""
    return ("an " if word[0] in "aeiou" else "a ") + word


def joined(items: list[str], last: str = "and") -> str:
    """Return the items as an English enumeration: 'a, b and c'."""
    if len(items) == 1:
        return items[0]
    return ", ".join(items[:-1]) + f" {last} " + items[-1]
