"""/v1/completions through HTTP with the official client, compared with the engine alone.

Covers `serve/pipeline/answer.py`.
"""

import openai
import pytest

from tests.support.serve.direct_engine import direct, text_of, twin

PROMPT = "Once upon a time"
IDS = [100, 200, 300, 400]


def pieces(stream: openai.Stream[openai.types.Completion]) -> list[openai.types.Completion]:
    with stream:
        return list(stream)


def joined(chunks: list[openai.types.Completion], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return "".join(choice.text for choice in choices if choice.index == index)


@pytest.mark.parametrize("prompt", [PROMPT, IDS])
def test_text_and_usage_equal_the_engines(openai_client: openai.OpenAI, prompt: object) -> None:
    expected = direct(prompt, max_tokens=24)
    answer = openai_client.completions.create(
        model="demo", prompt=prompt, max_tokens=24, temperature=0
    )
    choice, usage = answer.choices[0], answer.usage
    assert choice.text == expected.outputs[0].text
    assert choice.finish_reason == expected.outputs[0].finish_reason
    assert choice.logprobs is None
    assert usage.prompt_tokens == len(expected.prompt_token_ids)
    assert usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens is not None
    assert (answer.object, answer.model) == ("text_completion", "demo")
    assert answer.id.startswith("cmpl-")


def test_default_max_tokens_is_sixteen(openai_client: openai.OpenAI) -> None:
    answer = openai_client.completions.create(
        model="demo", prompt=PROMPT, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_default_max_tokens_shrinks_to_fit_the_context(openai_client: openai.OpenAI) -> None:
    answer = openai_client.completions.create(
        model="demo", prompt=[50] * 506, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 6


def test_stream_chunks_add_up_to_the_whole_text(
    openai_client: openai.OpenAI,
) -> None:
    chunks = pieces(
        openai_client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=30, temperature=0, stream=True
        )
    )
    assert joined(chunks) == text_of(PROMPT, max_tokens=30)
    assert len(chunks) > 5
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_many_prompts_give_choices_in_order(openai_client: openai.OpenAI) -> None:
    prompts = ["The cat", "A small boat", "Hello", "One two three", "Once upon a time", "Why"]
    expected = [direct(prompt, max_tokens=12) for prompt in prompts]
    arguments = {"model": "demo", "prompt": prompts, "max_tokens": 12, "temperature": 0}
    whole = openai_client.completions.create(**arguments)
    assert [c.index for c in whole.choices] == list(range(len(prompts)))
    assert [c.text for c in whole.choices] == [e.outputs[0].text for e in expected]
    assert whole.usage.prompt_tokens == sum(len(e.prompt_token_ids) for e in expected)
    assert whole.usage.completion_tokens == sum(len(e.outputs[0].token_ids) for e in expected)
    options = {"include_usage": True}
    chunks = pieces(
        openai_client.completions.create(**arguments, stream=True, stream_options=options)
    )
    for index, output in enumerate(expected):
        assert joined(chunks, index) == output.outputs[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_prompt_accepts_lists_of_token_ids(openai_client: openai.OpenAI) -> None:
    prompts = [[100, 200], [300, 400, 500], [7]]
    answer = openai_client.completions.create(
        model="demo", prompt=prompts, max_tokens=5, temperature=0
    )
    expected = [text_of(prompt, max_tokens=5) for prompt in prompts]
    assert [choice.text for choice in answer.choices] == expected


def test_last_chunk_has_usage_and_no_choices(openai_client: openai.OpenAI) -> None:
    chunks = pieces(
        openai_client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=8, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )
    )  # fmt: skip
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_continuous_usage_is_in_every_chunk(openai_client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = pieces(
        openai_client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=8, temperature=0, stream=True,
            stream_options=options, extra_body={"ignore_eos": True},
        )
    )  # fmt: skip
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 8
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {chunks[0].usage.prompt_tokens}


def test_continuous_usage_needs_include_usage(openai_client: openai.OpenAI) -> None:
    chunks = pieces(
        openai_client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=4, temperature=0, stream=True,
            stream_options={"continuous_usage_stats": True},
        )
    )  # fmt: skip
    assert chunks and all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_text(openai_client: openai.OpenAI, stream: bool) -> None:
    whole = text_of(PROMPT, max_tokens=40)
    stop = whole[10:13]
    expected = whole[: whole.index(stop)]
    for include in (False, True):
        answer = openai_client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=40, temperature=0, stop=["@@@", stop],
            stream=stream, extra_body={"include_stop_str_in_output": include},
        )  # fmt: skip
        chunks = pieces(answer) if stream else [answer]
        assert joined(chunks) == expected + (stop if include else "")
        last = chunks[-1].choices[0]
        assert last.finish_reason == "stop"
        assert last.model_extra["stop_reason"] == stop


def test_stop_token_ends_the_text_and_is_the_stop_reason(openai_client: openai.OpenAI) -> None:
    token_ids = direct(PROMPT, max_tokens=20).outputs[0].token_ids
    answer = openai_client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=20, temperature=0, stop="@@@",
        extra_body={"stop_token_ids": [token_ids[4]]},
    )  # fmt: skip
    position = token_ids.index(token_ids[4])
    assert answer.usage.completion_tokens == position + 1
    assert answer.choices[0].model_extra["stop_reason"] == token_ids[4]


def test_same_seed_gives_the_same_text(openai_client: openai.OpenAI) -> None:
    def text(seed: int | None) -> str:
        answer = openai_client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=30, temperature=1.5, top_p=1, seed=seed
        )
        return answer.choices[0].text

    assert text(11) == text(11)
    assert len({text(11), text(12), text(None), text(None)}) == 4


def test_omitted_fields_use_the_models_defaults(
    openai_client: openai.OpenAI,
) -> None:
    """The demo model's generation_config.json sets temperature 0.6 and top_p 0.95."""
    assert twin().requests.defaults.sampling["temperature"] == 0.6
    ours = {"temperature": 0.6, "top_p": 0.95}
    answer = openai_client.completions.create(model="demo", prompt=PROMPT, max_tokens=30, seed=3)
    assert answer.choices[0].text == text_of(PROMPT, max_tokens=30, seed=3, **ours)
    other = openai_client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=30, seed=3, temperature=1.8, top_p=1
    )
    assert other.choices[0].text != answer.choices[0].text


def test_extra_sampling_fields_reach_the_engine(
    openai_client: openai.OpenAI,
) -> None:
    extra = {
        "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.3, "min_tokens": 5,
        "bad_words": ["the"], "skip_special_tokens": False, "allowed_token_ids": list(range(900)),
    }  # fmt: skip
    fields = {
        "max_tokens": 20, "temperature": 0.9, "top_p": 0.9, "seed": 5, "presence_penalty": 0.5,
        "frequency_penalty": 0.5, "logit_bias": {"300": 2.5},
    }  # fmt: skip
    answer = openai_client.completions.create(
        model="demo", prompt=PROMPT, extra_body=extra, **fields
    )
    expected = direct(PROMPT, **(fields | extra | {"logit_bias": {300: 2.5}}))
    assert answer.choices[0].text == expected.outputs[0].text


def test_token_ids_of_prompt_and_answer_are_returned(openai_client: openai.OpenAI) -> None:
    expected = direct(PROMPT, max_tokens=6)
    arguments = {
        "model": "demo", "prompt": PROMPT, "max_tokens": 6, "temperature": 0,
        "extra_body": {"return_token_ids": True},
    }  # fmt: skip
    whole = openai_client.completions.create(**arguments).choices[0]
    assert whole.model_extra["token_ids"] == expected.outputs[0].token_ids
    assert whole.model_extra["prompt_token_ids"] == expected.prompt_token_ids
    chunks = pieces(openai_client.completions.create(**arguments, stream=True))
    ids = [i for chunk in chunks for i in chunk.choices[0].model_extra["token_ids"]]
    assert ids == expected.outputs[0].token_ids
    assert chunks[0].choices[0].model_extra["prompt_token_ids"] == expected.prompt_token_ids
    assert "prompt_token_ids" not in chunks[-1].choices[0].model_extra


@pytest.mark.parametrize(("side", "kept"), [("left", [300, 400]), ("right", [100, 200])])
def test_prompt_is_truncated_on_the_requested_side(
    openai_client: openai.OpenAI, side: str, kept: list[int]
) -> None:
    extra = {"truncate_prompt_tokens": 2, "truncation_side": side, "return_token_ids": True}
    answer = openai_client.completions.create(
        model="demo", prompt=IDS, max_tokens=2, echo=True, extra_body=extra
    )
    assert answer.choices[0].model_extra["prompt_token_ids"] == kept
    assert answer.usage.prompt_tokens == 2


def test_prompt_is_truncated_to_fit_the_context(openai_client: openai.OpenAI) -> None:
    answer = openai_client.completions.create(
        model="demo", prompt=[50] * 2000, max_tokens=12,
        extra_body={"truncate_prompt_tokens": -1, "ignore_eos": True},
    )  # fmt: skip
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (500, 12)


def test_cached_tokens_are_counted_for_each_cache_salt(openai_client: openai.OpenAI) -> None:
    def cached(salt: str) -> int:
        answer = openai_client.completions.create(
            model="demo", prompt=[*range(700, 740)], max_tokens=1, extra_body={"cache_salt": salt}
        )
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached("a"), cached("a"), cached("b")] == [0, 32, 0]


def test_usage_reports_cache_tiers_and_misses_of_the_same_user(
    openai_client: openai.OpenAI,
) -> None:
    """A miss is reported only by comparison with prompts of the same user."""

    def details(end: int, user: str | None) -> dict[str, object]:
        answer = openai_client.completions.create(
            model="demo",
            prompt=[*range(600, 620), *[end] * 20],
            max_tokens=1,
            user=user,  # type: ignore[arg-type]
            extra_body={"cache_salt": "where it was"},
        )
        return answer.usage.prompt_tokens_details.model_extra

    assert details(1, "u") == {"cached_tokens_by_tier": {}}
    assert details(1, "u") == {"cached_tokens_by_tier": {"device": 32}}
    apart = {"reason": "diverged", "at_token": 20}
    assert details(2, "u") == {"cached_tokens_by_tier": {"device": 16}, "cache_miss": apart}
    assert details(3, "v") == {"cached_tokens_by_tier": {"device": 16}}
    assert details(4, None) == {"cached_tokens_by_tier": {"device": 16}}
    stream = openai_client.completions.create(
        model="demo", prompt=[*range(600, 620), *[1] * 20], max_tokens=1, stream=True, user="u",
        stream_options={"include_usage": True}, extra_body={"cache_salt": "where it was"},
    )  # fmt: skip
    usage = [chunk.usage for chunk in stream if chunk.usage][-1]
    assert usage.prompt_tokens_details.model_extra == {"cached_tokens_by_tier": {"device": 32}}
