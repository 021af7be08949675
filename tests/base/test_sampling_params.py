"""SamplingParams: vLLM's defaults and checks."""

import pytest

from quire import SamplingParams
from quire.base.errors import RequestError
from quire.base.messages import Request
from quire.base.requests.sampling_params import RequestOutputKind
from quire.base.requests.validation import RequestLimits

LIMITS = RequestLimits(vocab_size=100, max_model_len=32, max_logprobs=20, max_num_seqs=4)


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.min_p, params.max_tokens, params.min_tokens) == (0.0, 16, 0)
    assert (params.repetition_penalty, params.seed, params.logprobs) == (1.0, None, None)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n", 0, "n must be"),
        ("n", 16385, "to 16384"),
        ("best_of", 0, "from n=1"),
        ("best_of", 16385, "to 16384"),
        ("best_of", "all", "an integer"),
        ("best_of", True, "an integer"),
        ("temperature", -0.1, "from 0 to 2"),
        ("temperature", float("nan"), "finite"),
        ("temperature", "hot", "finite"),
        ("top_p", 0.0, "(0, 1]"),
        ("top_p", 1.1, "(0, 1]"),
        ("top_k", -2, "-1 (off)"),
        ("top_k", 1.5, "-1 (off)"),
        ("min_p", 1.5, "[0, 1]"),
        ("presence_penalty", 2.1, "[-2, 2]"),
        ("frequency_penalty", -2.1, "[-2, 2]"),
        ("repetition_penalty", 0.0, "from 0.01"),
        ("repetition_penalty", 1e300, "to 100"),
        ("top_k", 2**31, "2**31"),
        ("seed", 1 << 64, "64-bit"),
        ("max_tokens", 0, "at least 1"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", 17, "max_tokens=16"),
        ("logprobs", -2, "at least 0"),
        ("stop", [""], "non-empty"),
        ("stream_interval", 0, "at least 1"),
        ("logprob_token_ids", [], "1 to 128"),
        ("prompt_logprob_token_ids", [], "a list of lists"),
        ("prompt_logprob_token_ids", [1], "a list of lists"),
        ("prompt_logprob_token_ids", [[-2]], "token ids, or -1"),
        ("prompt_logprob_token_ids", [[1] * 129], "at most 128"),
        ("prompt_logprob_start", 3, "together with prompt_logprob_token_ids"),
        ("logprob_token_ids", list(range(129)), "1 to 128"),
        ("logprob_token_ids", ["a"], "integers"),
        ("truncate_prompt_tokens", 0, "at least 1, -1"),
        ("truncation_side", "middle", "left or right"),
        ("repetition_detection", {"max_pattern_size": 3}, "RepetitionDetectionParams"),
        ("bad_words", [""], "non-empty"),
        ("allowed_token_ids", [], "non-empty"),
        ("stop_token_ids", ["a"], "integers"),
        ("stop_token_ids", [[1]], "integers"),
        ("stop_token_ids", 5, "a list"),
        ("allowed_token_ids", 5, "a list"),
        ("stop", 5, "a list"),
        ("bad_words", "dog", "a list"),
        ("logit_bias", [1], "a dictionary"),
        ("logit_bias", {"a": 1}, "token ids"),
        ("logit_bias", {1: None}, "finite"),
        ("logit_bias", {1: float("nan")}, "finite"),
    ],
)
def test_invalid_values_are_rejected_by_name(name: str, value: object, message: str) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert message in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_temperature_zero_is_greedy_and_tiny_temperatures_are_raised() -> None:
    greedy = SamplingParams(temperature=0, top_p=0.5, top_k=7, min_p=0.1)
    assert greedy.is_greedy
    assert (greedy.top_p, greedy.top_k, greedy.min_p) == (1.0, 0, 0.0)
    assert SamplingParams(temperature=0.001).temperature == 0.01
    for name, value in (("top_p", 0), ("top_k", -2), ("min_p", 2)):
        with pytest.raises(RequestError, match=name):
            SamplingParams(temperature=0, **{name: value})


def test_values_are_normalised() -> None:
    params = SamplingParams(stop="end", seed=-1, stop_token_ids=[3, 3, 5], logit_bias={7: 500})
    assert params.stop == ["end"]
    assert params.seed is None
    assert params.stop_token_ids == [3, 5]
    assert params.logit_bias == {7: 100.0}


def test_stop_strings_need_detokenization() -> None:
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_a_clone_is_independent() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 1.0})
    clone = params.clone()
    clone.stop_strings.append("b")
    assert params.stop == ["a"]
    assert clone.logit_bias == {1: 1.0}


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([1], {"n": 5}, "n=5 is more than max_num_seqs=4"),
        ([1], {"n": 2, "best_of": 5}, "best_of=5 is more than max_num_seqs=4"),
        ([], {}, "0 tokens"),
        ([1] * 32, {}, "max_model_len"),
        ([100], {}, "vocabulary"),
        ([-1], {}, "vocabulary"),
        ([1], {"logprobs": 21}, "max_logprobs=20"),
        ([1], {"prompt_logprobs": -1}, "max_logprobs=20"),
        ([1], {"stop_token_ids": [100]}, "stop_token_ids"),
        ([1], {"allowed_token_ids": [100]}, "allowed_token_ids"),
        ([1], {"logit_bias": {100: 1.0}}, "logit_bias"),
    ],
)
def test_requests_beyond_the_limits_are_rejected(
    prompt: list[int], params: dict, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        LIMITS.check(Request("r", prompt, SamplingParams(**params), seed=0))
    assert message in str(caught.value)


def test_requests_at_the_limits_pass() -> None:
    LIMITS.check(Request("r", [99] * 31, SamplingParams(logprobs=20), seed=0))
    LIMITS.check(Request("r", [1], SamplingParams(n=4, best_of=4), seed=0))


def test_n_and_best_of_set_the_number_of_samples() -> None:
    counts = [
        (params.num_samples, params.is_ranked)
        for params in (
            SamplingParams(),
            SamplingParams(n=3),
            SamplingParams(n=3, best_of=3),
            SamplingParams(n=2, best_of=3),
            SamplingParams(temperature=0, best_of=1),
        )
    ]
    assert counts == [(1, False), (3, False), (3, False), (3, True), (1, False)]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 3, "best_of": 2}, "best_of must be None or an integer from n=3"),
        ({"n": 2, "temperature": 0}, "n=2 needs sampling.*Raise temperature, or set n to 1"),
        ({"n": 2, "temperature": 5e-6}, "n=2 needs sampling"),
        ({"best_of": 2, "temperature": 0}, "best_of=2 needs sampling"),
        ({"best_of": 2, "output_kind": RequestOutputKind.DELTA}, "best_of=2 needs.*remove best_of"),
    ],
)
def test_inconsistent_n_and_best_of_are_rejected(params: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**params)


def test_params_changed_after_creation_are_checked_with_the_request() -> None:
    params = SamplingParams(n=1, best_of=2)
    params.output_kind = RequestOutputKind.DELTA
    with pytest.raises(RequestError, match="best_of=2 needs an answer in one piece"):
        LIMITS.check(Request("r", [1], params, seed=0))
    SamplingParams(n=2, best_of=2, output_kind=RequestOutputKind.DELTA)


def test_logprob_token_ids_replace_the_number_of_logprobs() -> None:
    params = SamplingParams(logprob_token_ids=[7, 3, 7], logprobs=2)
    assert (params.logprob_token_ids, params.logprobs) == ([7, 3], 0)
    assert params.clone() == params
    with pytest.raises(RequestError, match="logprobs must be absent.*or 2, which"):
        SamplingParams(logprob_token_ids=[7, 3], logprobs=5)
    with pytest.raises(RequestError, match="beam search"):
        SamplingParams(logprob_token_ids=[7, 3], use_beam_search=True)
    with pytest.raises(RequestError, match="logprob_token_ids must be token ids below 100"):
        SamplingParams(logprob_token_ids=[100]).check_vocab(100)
