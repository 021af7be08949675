"""Repetition detection: when a repeating answer ends, with vLLM's names."""

import msgspec

from quire.base.errors import RequestError

FIELD = "repetition_detection"
MAX_PATTERN_SIZE = 1024


class RepetitionDetectionParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """End an answer when its last tokens are one pattern `min_count` times in a row.

    The answer's finish_reason is then `repetition`. Raises RequestError for invalid values.
    """

    max_pattern_size: int = 0  # maximum tokens of the pattern; 0 turns detection off
    min_pattern_size: int = 0  # minimum tokens of the pattern; 0 means 1
    min_count: int = 0

    def __post_init__(self) -> None:
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise _wrong(name, value, "an integer of at least 0")
        if self.max_pattern_size > MAX_PATTERN_SIZE:
            raise _wrong("max_pattern_size", self.max_pattern_size, f"at most {MAX_PATTERN_SIZE}")
        if self.min_pattern_size > self.max_pattern_size:
            rule = f"at most max_pattern_size={self.max_pattern_size}"
            raise _wrong("min_pattern_size", self.min_pattern_size, rule)
        if self.is_on and self.min_count < 2:
            raise _wrong("min_count", self.min_count, "at least 2")

    @property
    def is_on(self) -> bool:
        return self.max_pattern_size > 0

    @property
    def effective_min_size(self) -> int:
        return max(1, self.min_pattern_size)


def _wrong(name: str, value: object, rule: str) -> RequestError:
    return RequestError(f"{FIELD}.{name} must be {rule}, got {value!r}.", FIELD)
