"""`SamplingParams`: how tokens are chosen and when a sequence ends, with vLLM's names and defaults.

Client and core run the same validation, so both accept the same requests. `check_vocab` checks
token ids against the vocabulary separately, because it needs the vocabulary's size.
"""

import enum
import math
from collections.abc import Iterable
from typing import Any

import msgspec

from quire.base.errors import RequestError
from quire.base.requests.repetition import FIELD as REPETITION
from quire.base.requests.repetition import RepetitionDetectionParams
from quire.base.requests.structured_outputs import StructuredOutputsParams
from quire.base.settings.kv_transfer import FIELD as KV_TRANSFER

GREEDY_BELOW = 1e-5
MIN_TEMPERATURE = 1e-2
MAX_N = 16384
# Parameters that beam search does not support.
NOT_WITH_BEAMS = (
    "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "top_k",
    "top_p", "stop", "bad_words", "min_tokens", "logprobs", "prompt_logprobs", "logit_bias",
    "allowed_token_ids", "dry_multiplier", "xtc_probability", "logits_processors",
    "repetition_detection", "logprob_token_ids", "prompt_logprob_token_ids",
)  # fmt: skip
ID_LISTS = (
    "stop_token_ids", "allowed_token_ids", "shown_special_token_ids", "dry_breaker_token_ids",
    "logprob_token_ids",
)  # fmt: skip
MAX_NAMED_TOKENS = 128  # limit for tokens named for logprobs
NO_TOKEN = -1  # filler in a list of such tokens
MIN_PENALTY = 0.01  # limit that keeps a logit finite when multiplied or divided by it
LOGIT_BIAS_LIMIT = 100.0
MAX_XTC_THRESHOLD = 0.5  # above it no two tokens can reach the threshold
DRY_BASE_LIMIT = 100.0
DRY_BREAKERS = ("\n", ":", '"', "*")
LENGTH_PENALTY_LIMIT = 10  # limit that keeps length ** penalty finite


class RequestOutputKind(enum.Enum):
    """The part of a request's output that each message contains."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _require(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise RequestError(f"{name} must be {rule}, got {value!r}.", name)


def processor_name(given: Any) -> str | None:
    """Return the name of a package's logits processor; None for a function or an invalid value."""
    if isinstance(given, str):
        return given
    if not isinstance(given, dict) or not given.keys() <= {"name", "kwargs"}:
        return None
    name, kwargs = given.get("name"), given.get("kwargs")
    is_named = isinstance(name, str) and (kwargs is None or isinstance(kwargs, dict))
    return name if is_named else None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=False):
    """Sampling and stopping of one request. Raises RequestError for invalid values.

    Beam search returns the n best of beam_width beams, by cumulative log-probability over
    length ** length_penalty.

    DRY lowers the logit of a token that would repeat n tokens of the text, prompt included, by
    dry_multiplier * dry_base ** (n - dry_allowed_length).

    XTC considers the tokens at least as probable as xtc_threshold. With xtc_probability it excludes
    all of them except the least probable. XTC runs after the filters, and not at temperature 0.
    """

    n: int = 1  # continuations to return
    best_of: int | None = None  # continuations to make; the n most probable are returned
    use_beam_search: bool = False
    beam_width: int | None = None  # None for n
    length_penalty: float = 1.0
    early_stopping: bool | str = False  # True, False or "never", as in transformers
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0  # below 1e-5 greedy; from there to 0.01 raised to 0.01
    top_p: float = 1.0  # 1.0 for off
    top_k: int = 0  # 0 or -1 for off
    min_p: float = 0.0  # 0.0 for off
    seed: int | None = None  # the same seed gives the same text in any batch
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None  # candidates per output token; -1 for the whole vocabulary
    prompt_logprobs: int | None = None  # candidates per prompt token, likewise
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    skip_reading_prefix_cache: bool | None = None
    structured_outputs: StructuredOutputsParams | None = None  # constraint on the answer
    thinking_token_budget: int | None = None  # maximum number of reasoning tokens
    shown_special_token_ids: list[int] | None = None  # exceptions from skip_special_tokens
    dry_multiplier: float = 0.0  # 0.0 for off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # last tokens to search for repetitions; -1 for all
    dry_sequence_breakers: list[str] | None = None  # their last tokens end a repetition
    dry_breaker_token_ids: list[int] | None = None  # the breakers as tokens, and further ones
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    # functions of ([prompt ids,] output ids, logits) that return logits, or names of packages'
    # processors; called in this order
    logits_processors: list[Any] | None = None
    stream_interval: int | None = None  # tokens per message after the first; None for the engine's
    truncate_prompt_tokens: int | None = None  # limit; -1 for what max_tokens leaves room for
    truncation_side: str = "left"  # end of the prompt at which tokens are dropped
    repetition_detection: RepetitionDetectionParams | None = None
    logprob_token_ids: list[int] | None = None  # candidates instead of the most probable tokens
    # candidates for each prompt token after index prompt_logprob_start; -1 is a filler
    prompt_logprob_token_ids: list[list[int]] | None = None
    prompt_logprob_start: int | None = None
    extra_args: dict[str, Any] | None = None  # only kv_transfer_params (settings/kv_transfer.py)

    def __post_init__(self) -> None:
        self._normalise()
        self._check_numbers()
        if self.is_greedy:  # the most probable token passes any filter
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        self._check_lists()
        self.check_samples()

    @property
    def num_samples(self) -> int:
        """Return the number of sequences to make from the prompt."""
        if self.use_beam_search:
            return self.beam_width or self.n
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Return whether the returned sequences are chosen only at the end."""
        return self.use_beam_search or self.num_samples > self.n

    @property
    def width_field(self) -> str:
        """Name of the field that sets the number of sequences."""
        name = "beam_width" if self.use_beam_search else "best_of"
        return "n" if getattr(self, name) is None else name

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar limits the answer."""
        return self.structured_outputs is not None or self.thinking_token_budget is not None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def has_penalties(self) -> bool:
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    @property
    def has_dry(self) -> bool:
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def has_xtc(self) -> bool:
        return (
            self.xtc_probability > 0
            and self.xtc_threshold <= MAX_XTC_THRESHOLD
            and not self.is_greedy
        )

    @property
    def named_in_prompt(self) -> list[list[int]]:
        """Return prompt_logprob_token_ids for each prompt token after the first, without
        fillers."""
        if self.prompt_logprob_token_ids is None:
            return []
        before: list[list[int]] = [[]] * (self.prompt_logprob_start or 0)
        rows = self.prompt_logprob_token_ids
        return before + [[each for each in row if each != NO_TOKEN] for row in rows]

    @property
    def reads_prefix_cache(self) -> bool:
        """Return whether prefix hits may be used. Prompt logprobs need every position computed."""
        if self.skip_reading_prefix_cache is not None:
            return not self.skip_reading_prefix_cache
        return self.prompt_logprobs is None

    @property
    def stop_strings(self) -> list[str]:
        assert self.stop is None or isinstance(self.stop, list)
        return self.stop or []

    def clone(self) -> "SamplingParams":
        """Return a copy whose lists and dictionaries can be changed independently."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        for name, value in fields.items():
            if isinstance(value, (list, dict)):
                fields[name] = value.copy()
        return SamplingParams(**fields)

    def check_vocab(self, vocab_size: int) -> None:
        """Raise RequestError for a token id outside of the model's vocabulary."""
        named: list[tuple[str, Iterable[int]]] = [
            ("stop_token_ids", self.stop_token_ids or ()),
            ("logit_bias", self.logit_bias or ()),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("dry_breaker_token_ids", self.dry_breaker_token_ids or ()),
            ("logprob_token_ids", self.logprob_token_ids or ()),
            ("prompt_logprob_token_ids", {i for row in self.named_in_prompt for i in row}),
        ]
        for name, ids in named:
            for token_id in ids:
                _require(
                    0 <= token_id < vocab_size, name, token_id, f"token ids below {vocab_size}"
                )

    def check_samples(self) -> None:
        """Raise RequestError if n, best_of, temperature and output_kind are inconsistent."""
        n, best_of = self.n, self.best_of
        _require(_is_int(n) and 1 <= n <= MAX_N, "n", n, f"an integer from 1 to {MAX_N}")
        if best_of is not None:
            ok = _is_int(best_of) and n <= best_of <= MAX_N
            rule = f"None or an integer from n={n} to {MAX_N}"
            _require(ok, "best_of", best_of, rule)
        if self.use_beam_search:
            self._check_beams()
            return
        name = "n" if n > 1 else "best_of"
        if self.num_samples > 1 and self.is_greedy:
            raise RequestError(
                f"{name}={getattr(self, name)} needs sampling: at temperature={self.temperature}"
                f" all continuations are the same. Raise temperature, or set {name} to 1.",
                name,
            )
        if self.is_ranked and self.output_kind is RequestOutputKind.DELTA:
            raise RequestError(
                f"best_of={best_of} needs an answer in one piece: the best n={n} are known only at"
                " the end. Do not stream, or remove best_of.",
                "best_of",
            )

    def _check_beams(self) -> None:
        """Check the parameters of beam search, which must leave the model's probabilities
        unchanged. Raises RequestError."""
        width, n = self.beam_width, self.n
        ok = width is None or (_is_int(width) and n <= width <= MAX_N)
        _require(ok, "beam_width", width, f"None or an integer from n={n} to {MAX_N}")
        ok = _is_number(self.length_penalty) and abs(self.length_penalty) <= LENGTH_PENALTY_LIMIT
        rule = f"from -{LENGTH_PENALTY_LIMIT} to {LENGTH_PENALTY_LIMIT}"
        _require(ok, "length_penalty", self.length_penalty, rule)
        ok = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        _require(ok, "early_stopping", self.early_stopping, 'True, False or "never"')
        neutral = SamplingParams()
        for name in NOT_WITH_BEAMS:
            value = getattr(self, name)
            if value not in (None, [], getattr(neutral, name)):
                raise RequestError(
                    f"{name}={value!r} is not possible with beam search; remove it.", name
                )
        if self.output_kind is RequestOutputKind.DELTA:
            raise RequestError(
                "use_beam_search needs an answer in one piece: the best beam is known at the end."
                " Do not stream.",
                "use_beam_search",
            )

    def _normalise(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self._check_kinds()
        if self.seed == -1:
            self.seed = None
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        _require(_is_number(self.temperature), "temperature", self.temperature, "a finite number")
        if GREEDY_BELOW <= self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        if self.stop_token_ids is not None:
            self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids))
        if self.logprob_token_ids is not None:
            self.logprob_token_ids = list(dict.fromkeys(self.logprob_token_ids))
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = list(dict.fromkeys(self.allowed_token_ids))

    def _check_kinds(self) -> None:
        """Check the types of lists and dictionaries before their contents are read."""
        constraint = self.structured_outputs
        known = constraint is None or isinstance(constraint, StructuredOutputsParams)
        _require(known, "structured_outputs", constraint, "StructuredOutputsParams")
        repetition = self.repetition_detection
        known = repetition is None or isinstance(repetition, RepetitionDetectionParams)
        _require(known, REPETITION, repetition, "RepetitionDetectionParams")
        for name in ("stop", "bad_words", "dry_sequence_breakers", "logits_processors", *ID_LISTS):
            value = getattr(self, name)
            _require(value is None or isinstance(value, list | tuple), name, value, "a list")
        extra = self.extra_args
        _require(extra is None or isinstance(extra, dict), "extra_args", extra, "a dictionary")
        for name in extra or {}:
            if name != KV_TRANSFER:
                raise RequestError(
                    f"extra_args[{name!r}] is unknown, and could change the text; extra_args takes"
                    f" {KV_TRANSFER} alone.",
                    "extra_args",
                )
        bias = self.logit_bias
        _require(bias is None or isinstance(bias, dict), "logit_bias", bias, "a dictionary")
        for token_id, value in (bias or {}).items():
            known = _is_int(token_id) or (isinstance(token_id, str) and token_id.isdecimal())
            _require(known, "logit_bias", token_id, "a dictionary from token ids")
            _require(_is_number(value), "logit_bias", value, "a dictionary to finite numbers")
        for name in ID_LISTS:
            for token_id in getattr(self, name) or ():
                _require(_is_int(token_id), name, token_id, "a list of integers")

    def _check_numbers(self) -> None:
        _require(0 <= self.temperature <= 2, "temperature", self.temperature, "from 0 to 2")
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        ok = _is_int(self.top_k) and -1 <= self.top_k < 2**31
        _require(ok, "top_k", self.top_k, "0 or -1 (off), or from 1 to 2**31 - 1")
        _require(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_is_number(value) and -2 <= value <= 2, name, value, "in [-2, 2]")
        value = self.repetition_penalty
        ok = _is_number(value) and MIN_PENALTY <= value <= 1 / MIN_PENALTY
        _require(ok, "repetition_penalty", value, f"from {MIN_PENALTY} to {1 / MIN_PENALTY:g}")
        if self.seed is not None:
            ok = _is_int(self.seed) and -(2**63) <= self.seed < 2**63
            _require(ok, "seed", self.seed, "a 64-bit integer")
        self._check_dry_and_xtc()
        self._check_lengths()

    def _check_dry_and_xtc(self) -> None:
        value = self.dry_multiplier
        _require(_is_number(value) and value >= 0, "dry_multiplier", value, "0 (off) or more")
        value, rule = self.dry_base, f"from 1 to {DRY_BASE_LIMIT:g}"
        _require(_is_number(value) and 1 <= value <= DRY_BASE_LIMIT, "dry_base", value, rule)
        for name, minimum in (("dry_allowed_length", 1), ("dry_penalty_last_n", -1)):
            value = getattr(self, name)
            rule = f"an integer from {minimum}"
            _require(_is_int(value) and minimum <= value < 2**31, name, value, rule)
        value = self.xtc_probability
        _require(_is_number(value) and 0 <= value <= 1, "xtc_probability", value, "in [0, 1]")
        value = self.xtc_threshold
        _require(_is_number(value) and 0 < value <= 1, "xtc_threshold", value, "in (0, 1]")

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            ok = _is_int(self.max_tokens) and self.max_tokens >= 1
            _require(ok, "max_tokens", self.max_tokens, "at least 1, or None for no limit")
        ok = _is_int(self.min_tokens) and self.min_tokens >= 0
        _require(ok, "min_tokens", self.min_tokens, "an integer of at least 0")
        if self.max_tokens is not None:
            ok = self.min_tokens <= self.max_tokens
            _require(ok, "min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        budget = self.thinking_token_budget
        ok = budget is None or (_is_int(budget) and budget >= 0)
        _require(ok, "thinking_token_budget", budget, "None, -1 (no limit) or at least 0")
        interval = self.stream_interval
        ok = interval is None or (_is_int(interval) and interval >= 1)
        _require(ok, "stream_interval", interval, "None or at least 1")
        keep = self.truncate_prompt_tokens
        ok = keep is None or (_is_int(keep) and (keep == -1 or keep >= 1))
        _require(ok, "truncate_prompt_tokens", keep, "at least 1, -1 (what fits) or None (all)")
        side = self.truncation_side
        _require(side in ("left", "right"), "truncation_side", side, "left or right")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            ok = value is None or (_is_int(value) and value >= -1)
            _require(ok, name, value, "None, -1 (the whole vocabulary) or at least 0")

    def _check_lists(self) -> None:
        for text in self.stop or ():
            _require(isinstance(text, str) and text != "", "stop", text, "non-empty strings")
        if self.stop:
            _require(
                self.detokenize,
                "stop",
                self.stop,
                "used with detokenize=True, which is off",
            )
        for name in ("bad_words", "dry_sequence_breakers"):
            for word in getattr(self, name) or ():
                _require(isinstance(word, str) and word != "", name, word, "non-empty strings")
        for processor in self.logits_processors or ():
            ok = callable(processor) or processor_name(processor) is not None
            rule = 'functions, names, or {"name": ..., "kwargs": {...}}'
            _require(ok, "logits_processors", processor, rule)
        named = self.logprob_token_ids
        if named is not None:
            ok = 1 <= len(named) <= MAX_NAMED_TOKENS
            rule = f"None or a list of 1 to {MAX_NAMED_TOKENS} ids"
            _require(ok, "logprob_token_ids", named, rule)
            rule = f"absent with logprob_token_ids, or {len(named)}, which is their number"
            _require(self.logprobs in (None, 0, len(named)), "logprobs", self.logprobs, rule)
            self.logprobs = 0  # the chosen token's logprob, next to the named ones
        self._check_named_in_prompt()
        if self.allowed_token_ids is not None:
            ok = len(self.allowed_token_ids) > 0
            _require(ok, "allowed_token_ids", self.allowed_token_ids, "None or a non-empty list")
        if self.logit_bias is not None:
            self.logit_bias = {
                int(token_id): max(-LOGIT_BIAS_LIMIT, min(LOGIT_BIAS_LIMIT, float(bias)))
                for token_id, bias in self.logit_bias.items()
            }

    def _check_named_in_prompt(self) -> None:
        name, rows = "prompt_logprob_token_ids", self.prompt_logprob_token_ids
        first = self.prompt_logprob_start
        ok = first is None or (_is_int(first) and first >= 0 and rows is not None)
        _require(ok, "prompt_logprob_start", first, f"at least 0, together with {name}")
        if rows is None:
            return
        ok = isinstance(rows, list | tuple) and all(isinstance(row, list | tuple) for row in rows)
        _require(ok and len(rows) > 0, name, rows, "a list of lists of token ids")
        for row in rows:
            ok = len(row) <= MAX_NAMED_TOKENS and all(_is_int(i) and i >= NO_TOKEN for i in row)
            _require(ok, name, row, f"lists of at most {MAX_NAMED_TOKENS} token ids, or -1")
        ok = self.prompt_logprobs in (None, 0)
        _require(ok, "prompt_logprobs", self.prompt_logprobs, f"absent with {name}")
        self.prompt_logprobs = 0  # the prompt token's own logprob, next to the named ones
