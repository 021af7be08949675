"""Compare DRY with the algorithms of text-generation-webui and llama.cpp, in float64 loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.ops.sampling.dry import Dry, dry_penalties


def expected(tokens: list[int], dry: Dry) -> dict[int, float]:
    """Walk back from each earlier occurrence of the last token (text-generation-webui)."""
    if dry.last_n >= 0:
        tokens = tokens[len(tokens) - dry.last_n :] if dry.last_n < len(tokens) else tokens
    found: dict[int, int] = {}
    breakers = set(dry.breakers.tolist())
    if not tokens or tokens[-1] in breakers:
        return {}
    for i in range(len(tokens) - 1):
        if tokens[i] != tokens[-1] or tokens[i + 1] in breakers:
            continue
        length = 1
        while i - length >= 0:
            token = tokens[-(length + 1)]
            if tokens[i - length] != token or token in breakers:
                break
            length += 1
        found[tokens[i + 1]] = max(length, found.get(tokens[i + 1], 0))
    largest = int(88.7228391 / np.log(dry.base)) if dry.base > 1.000001 else 0
    return {
        token: dry.multiplier * dry.base ** float(min(length - dry.allowed_length, largest))
        for token, length in found.items()
        if length >= dry.allowed_length
    }


def longest_by_suffixes(tokens: list[int], breakers: set[int]) -> dict[int, int]:
    """Return for each token the longest suffix of the text that an earlier occurrence follows.

    The number of tokens after the last breaker limits the length (llama.cpp).
    """
    last = max((i for i, token in enumerate(tokens) if token in breakers), default=-1)
    limit, found = len(tokens) - 1 - last, dict[int, int]()
    for length in range(1, limit + 1):
        suffix = tokens[-length:]
        for end in range(length, len(tokens)):
            if tokens[end - length : end] == suffix and tokens[end] not in breakers:
                found[tokens[end]] = length
    return found


def make(breakers: list[int] | None = None, **more) -> Dry:
    settings = {"multiplier": 0.8, "base": 1.75, "allowed_length": 2, "last_n": -1} | more
    return Dry(**settings, breakers=np.array(breakers or [], np.int32))


def penalties(tokens: list[int], dry: Dry) -> dict[int, float]:
    ids, values = dry_penalties(np.array(tokens, np.int32), dry)
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


def test_example_of_llama_cpp_gives_its_penalties() -> None:
    """a b c c b c y a b c: `c` would make a repetition of 4, `y` one of 3, `b` one of 2."""
    a, b, c, y = range(4)
    tokens = [a, b, c, c, b, c, y, a, b, c]
    found = penalties(tokens, make(allowed_length=1, multiplier=1.0, base=2.0))
    assert found == {c: 4.0, b: 1.0, y: 2.0}


@given(
    st.lists(st.integers(0, 4), max_size=40),
    st.lists(st.integers(0, 4), max_size=2),
    st.integers(1, 4),
    st.sampled_from([-1, 0, 1, 7, 100]),
    st.sampled_from([1.0, 1.2, 1.75, 90.0]),
)
def test_penalties_of_any_text_equal_the_references(
    tokens: list[int], breakers: list[int], allowed: int, last_n: int, base: float
) -> None:
    dry = make(breakers, allowed_length=allowed, last_n=last_n, base=base)
    found = penalties(tokens, dry)
    assert found == pytest.approx(expected(tokens, dry), rel=1e-6)
    if last_n == -1 and base != 90.0:
        by_suffix = longest_by_suffixes(tokens, set(breakers))
        assert found.keys() == {t for t, length in by_suffix.items() if length >= allowed}


def test_penalty_of_a_long_repetition_is_finite() -> None:
    tokens = list(range(500)) * 2
    ((token, value),) = penalties(tokens, make(multiplier=0.5)).items()
    assert token == 0 and 1e37 < value < np.inf
    assert penalties([5] * 400, make(base=1.0)) == {5: pytest.approx(0.8)}
