"""Addition of two two-digit numbers, answered with the worked steps and then the sum."""

from __future__ import annotations

import random

from .item import Item, assistant, user

PROMPTS = [
    "What is {0} + {1}?",
    "{0} + {1}",
    "{0} + {1} =",
    "{0}+{1}",
    "What is {0} plus {1}?",
    "Add {0} and {1}.",
    "Calculate {0} + {1}.",
    "How much is {0} + {1}?",
    "{0} plus {1}",
    "Please add {0} and {1}",
    "What is the sum of {0} and {1}?",
    "What's {0} + {1}?",
    "How much is {0} plus {1}?",
    "what is {0}+{1}?",
    "Can you add {0} and {1}?",
]


def worked(a: int, b: int) -> str:
    """Return the worked addition of two numbers below 100, ending with the sum."""
    ones = a % 10 + b % 10
    steps = f"{a % 10} + {b % 10} = {ones}"
    carry = ones // 10
    steps += ", carry 1. " if carry else ". "
    tens = f"{a // 10} + {b // 10}" + (" + 1" if carry else "")
    if a >= 10 or b >= 10:
        steps += f"{tens} = {a // 10 + b // 10 + carry}. "
    return f"{steps}So {a} + {b} = {a + b}."


def make(rng: random.Random) -> Item:
    """Return an addition; one in ten has a one-digit summand (never held out for the test)."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    if rng.random() < 0.1:
        a = rng.randint(0, 9)
        if rng.random() < 0.5:
            a, b = (b, a) if rng.random() < 0.5 else (a, rng.randint(0, 9))
    key = f"{min(a, b)}+{max(a, b)}"
    content = rng.choice(PROMPTS).format(a, b)
    return Item("addition", [user(content), assistant(worked(a, b))], key)
