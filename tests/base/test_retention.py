"""Rules for requests whose blocks outlive a step. Forks of media: tests/scheduler/media."""

from array import array
from typing import Any

import msgspec
import pytest

from quire.base.errors import RequestError
from quire.base.messages import Fork, Request, RetainedRequest
from quire.base.requests.retention import (
    MAX_KEEP_S,
    check_fork,
    check_open,
    check_pin,
    check_retainable,
)
from quire.base.requests.sampling_params import SamplingParams

ONE = SamplingParams(max_tokens=2)


def request(params: SamplingParams = ONE, **fields: Any) -> Request:
    return Request("r", [1, 2, 3, 4], params, 0, **fields)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ],
)
def test_open_prompts_must_have_one_output(params: dict[str, Any], field: str) -> None:
    check_open(ONE)
    with pytest.raises(RequestError) as refused:
        check_open(SamplingParams(**params))
    assert refused.value.field == field


@pytest.mark.parametrize(
    "wrong",
    [
        {"pin_s": float("nan")},
        {"pin_s": -1.0},
        {"pin_share": 0.0},
        {"pin_share": 1.5},
        {"is_open": True},
        {"grammar": "start: /a/"},
        {"params": SamplingParams(n=2)},
        {"params": SamplingParams(prompt_logprobs=1)},
    ],
)
def test_pins_must_have_one_complete_prompt_and_valid_limits(wrong: dict[str, Any]) -> None:
    pin = request(pin_s=5.0, pin_share=0.5)
    check_pin(pin)
    with pytest.raises(RequestError):
        check_pin(msgspec.structs.replace(pin, **wrong))


def test_only_single_generated_sequences_can_be_retained() -> None:
    check_retainable(request(), float(MAX_KEEP_S))
    for keep_s in (-1.0, MAX_KEEP_S + 1.0, float("nan")):
        with pytest.raises(RequestError, match="keep_s must be"):
            check_retainable(request(), keep_s)
    with pytest.raises(RequestError, match="beam search"):
        check_retainable(request(SamplingParams(best_of=2)), 1.0)
    with pytest.raises(RequestError, match="only generated"):
        check_retainable(request(pin_s=1.0), 1.0)
    for num_tokens in (0, 5):
        with pytest.raises(RequestError, match="cannot begin a prompt"):
            check_retainable(request(fork=Fork("a", 0, num_tokens)), 0.0)


def test_fork_must_begin_with_the_tokens_of_its_source() -> None:
    source = RetainedRequest("a", 0, 2, 3, 1, 9.0, "", "", tokens=array("i", [1, 2, 3]).tobytes())
    fork = request(fork=Fork("a", 0, 3))
    assert check_fork(fork, [source]) == 3
    assert check_fork(fork, []) == 0  # the source has expired, so every token is computed
    assert check_fork(request(), [source]) == 0
    rewound = msgspec.structs.replace(source, num_tokens=2)
    other = msgspec.structs.replace(source, tokens=array("i", [1, 9, 3]).tobytes())
    for wrong in (rewound, other):
        with pytest.raises(RequestError, match="does not begin"):
            check_fork(fork, [wrong])
    salted = msgspec.structs.replace(source, cache_salt="s")
    with pytest.raises(RequestError, match="cache_salt"):
        check_fork(fork, [salted])
