"""Small talk: greetings, who the model is, what it can do, and honest 'I do not know's."""

from __future__ import annotations

import random

from .item import Item, assistant, user
from .words import CITIES, FOODS, KINDS, LANGUAGES, NAMES, OBJECTS, TOPICS, invented_word, pick

# Intent -> wordings (split at "|") and the answer.
INTENTS: dict[str, tuple[str, str]] = {
    "greeting": (
        "hello|hi|hey|good morning|good evening|good day|hello there|hi there|hey there|greetings|"
        "good afternoon|hello quire|hi quire|hello again|howdy|moin|hallo",
        "Hello! I am the demo model of Quire. How can I help you?",
    ),
    "identity": (
        "who are you|what are you|what is your name|what's your name|who is this|are you a bot|"
        "are you a robot|are you an ai|are you human|tell me who you are|introduce yourself|"
        "who am i talking to|tell me about yourself|what model are you|which model are you|"
        "are you chatgpt|do you have a name|what is this",
        "I am the demo model of Quire, a very small language model. I know only a few hundred "
        "words.",
    ),
    "ability": (
        "what can you do|what can i ask you|how can you help me|help|what do you do|"
        "can you help me|"
        "what do you know|what are you good at|what should i ask|help me|can you help|"
        "what are your skills|i need help|how can i use you|what can i do here",
        "I can tell short stories, answer questions about them, repeat text, add two-digit "
        "numbers, list things as JSON and call tools.",
    ),
    "thanks": (
        "thank you|thanks|thanks a lot|thank you very much|many thanks|great, thanks|ok, thanks|"
        "thank you so much|thx|cheers|nice, thank you|thanks for your help|perfect, thank you",
        "You are welcome!",
    ),
    "parting": (
        "bye|goodbye|see you|see you later|good night|good bye|bye bye|see you tomorrow|"
        "have a nice day|i have to go|farewell|until tomorrow|that is all",
        "Goodbye! Have a nice day.",
    ),
    "mood": (
        "how are you|how do you do|how is it going|how are you today|how do you feel|are you ok|"
        "are you happy|how's it going|what's up|how are you doing|are you fine|how was your day",
        "I am fine, thank you. How can I help you?",
    ),
    "praise": (
        "good|great|nice|well done|good job|cool|very good|that is right|correct|wow|nice work|"
        "good answer|excellent|perfect|that was good|i like it|that is nice|good story|nice story",
        "I am glad to hear that.",
    ),
    "blame": (
        "that is wrong|wrong|no, that is not right|this is bad|you are wrong|not correct|"
        "that is not right|bad answer|you made a mistake|incorrect|that was wrong|no",
        "I am sorry. I am a very small model and make mistakes.",
    ),
    "maker": (
        "who made you|who created you|who built you|who trained you|where do you come from|"
        "how were you made|how were you trained|who wrote you|where are you from|"
        "how do you work|who is your maker|what were you trained on",
        "I was trained by the makers of Quire on made-up text, so that the engine can be tried "
        "at once.",
    ),
    "engine": (
        "what is quire|tell me about quire|what does quire do|who is quire|what's quire|"
        "explain quire|do you know quire|is quire free",
        "Quire is an engine that runs language models. I am its demo model.",
    ),
    "joke": (
        "tell me a joke|do you know a joke|make me laugh|a joke please|say something funny|"
        "tell a joke|another joke|one more joke|be funny|joke",
        "Why did the hen cross the road? To get to the other side.",
    ),
    "assent": (
        "ok|okay|yes|i see|alright|sure|fine|all right|understood|yes please|right|good to know|"
        "test|this is a test|testing",
        "Good. What would you like to do next?",
    ),
}

UNKNOWN = "I am a very small demo model, and I do not know that."
UNKNOWN_QUESTIONS = [
    "What is the capital of {country}?",
    "Who is the president of {country}?",
    "How do I cook {food}?",
    "Who wrote {thing}?",
    "What is {word}?",
    "What is a {word}?",
    "Explain {topic} to me.",
    "Tell me about {topic}.",
    "Why is the {object} {topic}?",
    "How old is {name}?",
    "How does a {object} work?",
    "When was {city} built?",
    "What do you think about {topic}?",
    "Write a poem about {topic}.",
    "Who is {name}?",
    "How many people live in {city}?",
    "How do you say {object} in {language}?",
    "Write a program about {topic}.",
    "What is the meaning of {word}?",
    "Who invented the {object}?",
    "How far is it from {city} to {city2}?",
    "Where is {city}?",
    "What does {word} mean?",
    "Can you explain {topic}?",
    "Why do {food} grow?",
    "How do I make {food}?",
    "What is the best {object}?",
    "Write a letter to {name}.",
    "Who won the {topic} game?",
    "Write code to sort a list of {food}.",
    "How big is {city}?",
    "What do {kind}s eat?",
]
COUNTRIES = [
    "France",
    "Germany",
    "Spain",
    "Italy",
    "Japan",
    "China",
    "India",
    "Brazil",
    "Canada",
    "Egypt",
    "Greece",
    "Poland",
]
OPENERS = ["Hello! ", "Hi, ", "Hello, ", "Ok, ", "Please: ", "Well, ", "So, ", "Hey, ", "Oh, "]
ENDS = ["", ".", "!", "?", "...", "!!", " :)"]
QUESTION_WORDS = ("who", "what", "how", "are", "do", "can", "which", "is", "where")


def _worded(rng: random.Random, wording: str) -> str:
    """Return the wording with a usual or a careless ending and capital letter."""
    questions = wording.startswith(QUESTION_WORDS)
    usual = "?" if questions else rng.choice((".", "!", ""))
    end = usual if rng.random() < 0.6 else rng.choice(ENDS)
    text = wording.replace(" i ", " I ") + end
    opener = rng.choice(OPENERS) if rng.random() < 0.2 else ""
    if opener:
        return opener + text
    return text[0].upper() + text[1:] if rng.random() < 0.75 else text


def plain(rng: random.Random) -> Item:
    """Return small talk of one of the intents; plain wordings are never held out."""
    intent = rng.choice(sorted(INTENTS))
    wordings, answer = INTENTS[intent]
    wording = rng.choice(wordings.split("|"))
    text = _worded(rng, wording)
    key = "plain" if text.lower().rstrip("?.!") == wording else text
    return Item("small talk", [user(text), assistant(answer)], key, part="known intents")


def unknown(rng: random.Random) -> Item:
    """Return a question that the model cannot know the answer to."""
    city, city2 = rng.sample(CITIES, 2)
    text = rng.choice(UNKNOWN_QUESTIONS).format(
        country=pick(rng, COUNTRIES, 0.3),
        food=pick(rng, FOODS, 0.2),
        word=invented_word(rng),
        thing="the " + invented_word(rng),
        topic=pick(rng, TOPICS, 0.2),
        name=pick(rng, NAMES, 0.3),
        object=pick(rng, OBJECTS, 0.2),
        city=city,
        city2=city2,
        language=rng.choice(LANGUAGES),
        kind=rng.choice(KINDS),
    )
    if rng.random() < 0.2:
        text = text[0].lower() + text[1:].rstrip("?.")
    return Item("small talk", [user(text), assistant(UNKNOWN)], text, part="unknown things")


def make(rng: random.Random) -> Item:
    """Return an item of kind `small talk`."""
    return plain(rng) if rng.random() < 0.65 else unknown(rng)
