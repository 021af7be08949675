"""Repetition ends answers: the watch compared with a plain search, and the user's outputs."""

import random

import pytest

from quire.base.errors import RequestError
from quire.base.messages import Abort
from quire.base.requests.repetition import RepetitionDetectionParams
from quire.engine.client.sample import RepetitionWatch
from tests.engine.client.test_sample import DELTA, DOG, Client, part


def repeats(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    """Return whether the last tokens repeat a pattern min_count times, by the definition."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        pattern, length = tokens[-size:], size * params.min_count
        if len(tokens) >= length and tokens[-length:] == pattern * params.min_count:
            return True
    return False


@pytest.mark.parametrize("sizes", [(1, 1, 2), (4, 0, 3), (6, 3, 2), (5, 5, 4), (2, 2, 2)])
@pytest.mark.parametrize("vocab_size", [1, 2, 3])
def test_repetition_watch_equals_a_plain_search(
    sizes: tuple[int, int, int], vocab_size: int
) -> None:
    params, rng = RepetitionDetectionParams(*sizes), random.Random(f"{sizes} {vocab_size}")
    watch, tokens, found = RepetitionWatch(params), list[int](), list[bool]()
    for _ in range(400):
        tokens.append(rng.randrange(vocab_size))
        found.append(watch.push(tokens[-1]))
        assert found[-1] == repeats(tokens, params), tokens[-40:]
    assert any(found) or vocab_size > 1


def test_repetition_ends_only_the_repeating_sample() -> None:
    watch = RepetitionDetectionParams(max_pattern_size=3, min_count=3)
    client = Client(n=2, max_tokens=50, output_kind=DELTA, repetition_detection=watch)
    one, other = [7, 8], [*DOG, *DOG]
    for _ in range(2):
        client.step(part(0, one), part(1, [9, 10, 11, 12]))
    output = client.step(part(0, [7, 8, 7, 8]), part(1, other))
    assert output is not None
    ended, going = output.outputs
    assert (ended.finish_reason, ended.stop_reason) == ("repetition", "repetition_detected")
    assert ended.token_ids == [7, 8], "later tokens of the step are dropped"
    assert going.finish_reason is None
    assert client.aborts == [Abort("a", "repetition", 0)]


def test_repetition_is_ignored_before_min_tokens_and_at_the_end() -> None:
    watch = RepetitionDetectionParams(max_pattern_size=1, min_count=2)
    client = Client(min_tokens=4, max_tokens=50, output_kind=DELTA, repetition_detection=watch)
    client.step(part(0, [5, 5, 5]))
    output = client.step(part(0, [5], "length"))
    assert output is not None and output.outputs[0].finish_reason == "length"
    assert client.aborts == []
    client = Client(min_tokens=4, max_tokens=50, output_kind=DELTA, repetition_detection=watch)
    client.step(part(0, [5, 5, 5]))
    output = client.step(part(0, [5]))
    assert output is not None and output.outputs[0].finish_reason == "repetition"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size must be an integer of at least 0, got -1"),
        ({"max_pattern_size": 1025, "min_count": 2}, "at most 1024"),
        ({"max_pattern_size": 2, "min_pattern_size": 3}, "at most max_pattern_size=2, got 3"),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count must be at least 2, got 1"),
        ({"max_pattern_size": True}, "an integer"),
    ],
)
def test_invalid_repetition_parameters_are_rejected(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        RepetitionDetectionParams(**sizes)
    assert raised.value.field == "repetition_detection"


def test_max_pattern_size_of_0_detects_nothing() -> None:
    client = Client(output_kind=DELTA, repetition_detection=RepetitionDetectionParams())
    output = client.step(part(0, [5] * 10))
    assert output is not None and output.outputs[0].finish_reason is None
