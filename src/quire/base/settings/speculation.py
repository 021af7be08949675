"""Speculative decoding: how draft tokens are proposed. The settings have vLLM's names."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from quire.base.errors import ConfigError
from quire.base.plugins import DRAFTERS, all_names, is_installed

NGRAM, SUFFIX = "ngram", "suffix"
FORCED, NONE = "forced", "none"  # only tokens that a grammar forces; no draft tokens at all
DRAFT_MODEL, EAGLE3, MTP = "draft_model", "eagle3", "mtp"
WITH_MODEL = (DRAFT_MODEL, EAGLE3)  # methods with a draft model or head of its own checkpoint
# vLLM's names of `mtp`, which name the type of the model.
MTP_ALIASES = (
    "deepseek_mtp",
    "glm4_moe_mtp",
    "glm4_moe_lite_mtp",
    "qwen3_next_mtp",
    "qwen3_5_mtp",
)
NUM_TOKENS = 4  # default number of draft tokens per row
MTP_TOKENS = 1  # the default for `mtp`, whose layer is trained for one token
RUN = 5  # default length of the token run that an n-gram must match
MAX_DRAFT_TOKENS = 32
MAX_ANSWERS = 100_000
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
        MTP: (),
    }
)


@dataclass(frozen=True)
class Suffixes:
    """The settings of the method `suffix`."""

    depth: int = 24  # tokens of the context to match
    num_answers: int = 10_000  # cached answers of other requests; 0 for the own tokens only
    factor: float = 1.0  # maximum draft tokens per matched token
    min_probability: float = 0.1  # minimum estimated probability of the whole draft


@dataclass(frozen=True)
class Speculation:
    """How an engine proposes draft tokens.

    ngram: the tokens after the same run earlier in the text.
    suffix: the most frequent continuation, also in other answers.
    a plug-in's name, or FILE.py:CLASS: what its class proposes (docs/extend/drafters.md).
    draft_model, eagle3: a small model, or a head on the model.
    mtp: the model's own layer for multi-token prediction.
    With every method but `none`, tokens that a grammar forces are also used as draft tokens.
    """

    method: str  # one of FIELDS_OF, or a plug-in's name
    num_tokens: int  # maximum draft tokens per row and step
    longest_run: int = RUN  # maximum tokens of a matched run
    shortest_run: int = RUN  # minimum tokens of a matched run
    suffixes: Suffixes = Suffixes()
    model: str | None = None  # draft model or head, for WITH_MODEL

    @property
    def has_drafter(self) -> bool:
        """Whether a model, a head or a layer proposes the draft tokens."""
        return self.method in (*WITH_MODEL, MTP)

    @property
    def is_plugin(self) -> bool:
        """Whether a class of a package or a file proposes the draft tokens."""
        return self.method not in FIELDS_OF

    @property
    def num_forced(self) -> int:
        """The maximum number of forced tokens per row and step; they are always accepted."""
        return self.num_tokens if self.method == FORCED else MAX_DRAFT_TOKENS


def max_draft_tokens(num_rows: int) -> int:
    """Return the maximum draft tokens of a step for a model with linear attention.

    Such a model keeps its layers' inputs for each draft token until the token is verified."""
    return max(MAX_DRAFT_TOKENS, NUM_TOKENS * num_rows)


def speculation_of(given: str | None, pipeline_depth: int | None) -> Speculation | None:
    """Return how an engine proposes draft tokens; None if it does not. Raises ConfigError.

    The default is forced tokens if steps are not pipelined, since they are then free."""
    found = parse_speculation(given)
    if found is None and pipeline_depth == 1:
        return Speculation(FORCED, MAX_DRAFT_TOKENS)
    return None if found is None or found.method == NONE else found


def parse_speculation(given: str | Mapping[str, Any] | None) -> Speculation | None:
    """Read `speculative_config`, as JSON or as an object. Raises ConfigError."""
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
    method = MTP if method in MTP_ALIASES else method
    is_plugin = isinstance(method, str) and method not in FIELDS_OF
    if not isinstance(method, str) or (
        is_plugin and not is_installed(DRAFTERS, method, tuple(FIELDS_OF))
    ):
        known = all_names(DRAFTERS, FIELDS_OF)
        raise ConfigError(f"speculative_config's method must be one of {known}, got {method!r}.")
    names = (*COMMON, *FIELDS_OF.get(method, ()))
    if unknown := sorted(set(fields) - set(names)):
        raise ConfigError(
            f"speculative_config has no {', '.join(map(repr, unknown))} for the method {method}; it"
            f" has: {', '.join(names)}."
        )
    if method == SUFFIX:
        suffixes = _suffixes(fields)
        return Speculation(
            method, _num_tokens(fields, min(MAX_DRAFT_TOKENS, suffixes.depth)), suffixes=suffixes
        )
    if method in (FORCED, NONE):
        return Speculation(method, _num_tokens(fields, MAX_DRAFT_TOKENS))
    if method == MTP:
        return Speculation(method, _num_tokens(fields, MTP_TOKENS))
    num = _num_tokens(fields, NUM_TOKENS)
    if is_plugin:
        return Speculation(method, num)
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
        _count(fields, depth, Suffixes.depth, minimum=2),
        _count(fields, num, Suffixes.num_answers, minimum=0),
        _number(fields, factor, Suffixes.factor),
        _number(fields, chance, Suffixes.min_probability),
    )
    if found.num_answers > MAX_ANSWERS:
        raise ConfigError(f"{num} is at most {MAX_ANSWERS}, got {found.num_answers}.")
    if found.min_probability > 1:
        raise ConfigError(f"{chance} is at most 1, got {found.min_probability}.")
    return found


def _num_tokens(fields: Mapping[str, Any], default: int) -> int:
    num = _count(fields, "num_speculative_tokens", default)
    if num > MAX_DRAFT_TOKENS:
        raise ConfigError(f"num_speculative_tokens is at most {MAX_DRAFT_TOKENS}, got {num}.")
    return num


def _count(fields: Mapping[str, Any], name: str, default: Any, minimum: int = 1) -> int:
    value = default if fields.get(name) is None else fields[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(
            f"speculative_config's {name} must be a number from {minimum}, got {value!r}."
        )
    return value


def _number(fields: Mapping[str, Any], name: str, default: float) -> float:
    value = default if fields.get(name) is None else fields[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ConfigError(
            f"speculative_config's {name} must be a number that is not negative, got {value!r}."
        )
    return float(value)
