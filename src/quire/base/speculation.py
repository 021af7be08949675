"""How an engine guesses tokens ahead: the settings, in vLLM's words."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.base.errors import ConfigError

NGRAM = "ngram"
METHODS = (NGRAM,)
NUM_TOKENS = 4  # guesses of a row, if not said
RUN = 5  # tokens that must stand before, if not said
MOST_TOKENS = 32
NAMES = ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")


@dataclass(frozen=True)
class Speculation:
    """method: who guesses; `ngram`: what followed the same tokens before. num_tokens: most guesses
    of a row in a step. longest_run, shortest_run: how many tokens must stand before, so that what
    followed them is guessed."""

    method: str
    num_tokens: int
    longest_run: int = RUN
    shortest_run: int = RUN


def parse_speculation(given: str | Mapping[str, Any] | None) -> Speculation | None:
    """Read `speculative_config`: JSON, or what it stands for. Raises ConfigError."""
    if given is None:
        return None
    fields = given
    if isinstance(given, str):
        try:
            fields = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"speculative_config is not JSON ({error}): {given!r}.") from error
    if not isinstance(fields, Mapping):
        raise ConfigError(f'speculative_config must be like {{"method": "ngram"}}, got {given!r}.')
    if unknown := sorted(set(fields) - set(NAMES)):
        names = ", ".join(map(repr, unknown))
        raise ConfigError(f"speculative_config has no {names}; it has: {', '.join(NAMES)}.")
    method = fields.get("method", NGRAM)
    if method not in METHODS:
        raise ConfigError(
            f"speculative_config's method must be one of {', '.join(METHODS)}, got {method!r}."
        )
    num = _count(fields, "num_speculative_tokens", NUM_TOKENS)
    if num > MOST_TOKENS:
        raise ConfigError(f"num_speculative_tokens is at most {MOST_TOKENS}, got {num}.")
    longest = _count(fields, "prompt_lookup_max", fields.get("prompt_lookup_min") or RUN)
    shortest = _count(fields, "prompt_lookup_min", longest)
    if shortest > longest:
        raise ConfigError(
            f"prompt_lookup_min must not be above prompt_lookup_max, got {shortest} and {longest}."
        )
    return Speculation(method, num, longest, shortest)


def _count(fields: Mapping[str, Any], name: str, default: Any) -> int:
    value = default if fields.get(name) is None else fields[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"speculative_config's {name} must be a number from 1, got {value!r}.")
    return value
