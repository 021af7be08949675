"""How an engine guesses tokens ahead: the settings, in vLLM's words."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from quire.base.errors import ConfigError

NGRAM, SUFFIX = "ngram", "suffix"
FORCED, NONE = "forced", "none"  # what a grammar leaves no choice about, and not even that
DRAFT_MODEL, EAGLE3 = "draft_model", "eagle3"
WITH_MODEL = (DRAFT_MODEL, EAGLE3)  # a model guesses, beside the one that is served
NUM_TOKENS = 4  # guesses of a row, if not said
RUN = 5  # tokens that must stand before, if not said
MOST_TOKENS = 32
MOST_ANSWERS = 100_000
COMMON = ("method", "num_speculative_tokens")
FIELDS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        NGRAM: ("prompt_lookup_max", "prompt_lookup_min"),
        SUFFIX: (
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        ),
        FORCED: (),
        NONE: (),
        DRAFT_MODEL: ("model",),
        EAGLE3: ("model",),
    }
)


@dataclass(frozen=True)
class Suffixes:
    """Method `suffix`. depth: tokens before a place that are compared with a sequence's last ones.
    num_answers: how many of others' answers are kept, 0: a sequence sees its own tokens only.
    factor: most guesses for each token that stood before. least_chance: of all tokens of a guess,
    by how often they came."""

    depth: int = 24
    num_answers: int = 10_000
    factor: float = 1.0
    least_chance: float = 0.1


@dataclass(frozen=True)
class Speculation:
    """method: who guesses, beside grammars, whose forced tokens are tried with any method but
    `none`. `ngram`: what followed the same tokens before; `suffix`: what followed most often, also
    in others' answers; `draft_model`: a small model; `eagle3`: a head of the model; `forced`:
    nobody else. num_tokens: most guesses of a row in a step. longest_run, shortest_run: how many
    tokens must stand before, so that what followed them is guessed. model: who guesses, of
    WITH_MODEL."""

    method: str
    num_tokens: int
    longest_run: int = RUN
    shortest_run: int = RUN
    suffixes: Suffixes = Suffixes()
    model: str | None = None

    @property
    def num_forced(self) -> int:
        """Most forced tokens of a row in a step: they are right."""
        return self.num_tokens if self.method == FORCED else MOST_TOKENS


def most_guesses(num_rows: int) -> int:
    """Return the most guesses of a step, of all its rows, of a model whose layers remember a state:
    what they are given of each is kept until it is known which guesses were right."""
    return max(MOST_TOKENS, NUM_TOKENS * num_rows)


def speculation_of(given: str | None, pipeline_depth: int | None) -> Speculation | None:
    """Return how an engine guesses, None if it does not. If nothing was said, what grammars force
    is tried where the last token is known anyway: that costs nobody anything. Raises
    ConfigError."""
    found = parse_speculation(given)
    if found is None and pipeline_depth == 1:
        return Speculation(FORCED, MOST_TOKENS)
    return None if found is None or found.method == NONE else found


def parse_speculation(given: str | Mapping[str, Any] | None) -> Speculation | None:
    """Read `speculative_config`: JSON, or what it stands for. Raises ConfigError."""
    if given is None:
        return None
    fields = given
    if isinstance(given, str):
        try:
            fields = json.loads(given)
        except ValueError as error:
            raise ConfigError(
                f'speculative_config must be JSON such as {{"method": "ngram"}}, got {given!r}'
                f" ({error})."
            ) from error
    if not isinstance(fields, Mapping):
        raise ConfigError(f'speculative_config must be like {{"method": "ngram"}}, got {given!r}.')
    method = fields.get("method", NGRAM)
    if method not in FIELDS_OF:
        raise ConfigError(
            f"speculative_config's method must be one of {', '.join(FIELDS_OF)}, got {method!r}."
        )
    names = (*COMMON, *FIELDS_OF[method])
    if unknown := sorted(set(fields) - set(names)):
        raise ConfigError(
            f"speculative_config has no {', '.join(map(repr, unknown))} for the method {method}; it"
            f" has: {', '.join(names)}."
        )
    if method == SUFFIX:
        suffixes = _suffixes(fields)
        return Speculation(
            method, _num_tokens(fields, min(MOST_TOKENS, suffixes.depth)), suffixes=suffixes
        )
    if method in (FORCED, NONE):
        return Speculation(method, _num_tokens(fields, MOST_TOKENS))
    num = _num_tokens(fields, NUM_TOKENS)
    if method in WITH_MODEL:
        return Speculation(method, num, model=_model(fields, method))
    longest = _count(fields, "prompt_lookup_max", fields.get("prompt_lookup_min") or RUN)
    shortest = _count(fields, "prompt_lookup_min", longest)
    if shortest > longest:
        raise ConfigError(
            f"prompt_lookup_min must not be above prompt_lookup_max, got {shortest} and {longest}."
        )
    return Speculation(method, num, longest, shortest)


def _model(fields: Mapping[str, Any], method: str) -> str:
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise ConfigError(
            f"the method {method} needs a draft model: a directory, GGUF file or Hugging Face id,"
            f" got {model!r}."
        )
    return model


def _suffixes(fields: Mapping[str, Any]) -> Suffixes:
    depth, num, factor, chance = FIELDS_OF[SUFFIX]
    found = Suffixes(
        _count(fields, depth, Suffixes.depth, fewest=2),
        _count(fields, num, Suffixes.num_answers, fewest=0),
        _number(fields, factor, Suffixes.factor),
        _number(fields, chance, Suffixes.least_chance),
    )
    if found.num_answers > MOST_ANSWERS:
        raise ConfigError(f"{num} is at most {MOST_ANSWERS}, got {found.num_answers}.")
    if found.least_chance > 1:
        raise ConfigError(f"{chance} is at most 1, got {found.least_chance}.")
    return found


def _num_tokens(fields: Mapping[str, Any], default: int) -> int:
    num = _count(fields, "num_speculative_tokens", default)
    if num > MOST_TOKENS:
        raise ConfigError(f"num_speculative_tokens is at most {MOST_TOKENS}, got {num}.")
    return num


def _count(fields: Mapping[str, Any], name: str, default: Any, fewest: int = 1) -> int:
    value = default if fields.get(name) is None else fields[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < fewest:
        raise ConfigError(
            f"speculative_config's {name} must be a number from {fewest}, got {value!r}."
        )
    return value


def _number(fields: Mapping[str, Any], name: str, default: float) -> float:
    value = default if fields.get(name) is None else fields[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ConfigError(
            f"speculative_config's {name} must be a number that is not negative, got {value!r}."
        )
    return float(value)
