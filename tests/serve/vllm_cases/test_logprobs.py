"""Log-probabilities"""

import pytest

from tests.support.serve.vllm_cases import PROMPT, Asked, differs, refused


def test_none(asked: Asked) -> None:
    """a completion has none if it asks for none"""
    assert asked.complete(logprobs=None).choices[0].logprobs is None


def test_zero(asked: Asked) -> None:
    """with 0 each token has its own"""
    found = asked.complete(logprobs=0).choices[0].logprobs
    assert len(found.token_logprobs) == 5 and all(len(each) == 1 for each in found.top_logprobs)


def test_some(asked: Asked) -> None:
    """with 5 the best five, and the chosen one"""
    found = asked.complete(logprobs=5, temperature=1, seed=3).choices[0].logprobs
    assert all(5 <= len(each) <= 6 for each in found.top_logprobs)
    for token, value, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert top[token] == value <= 0


@pytest.mark.parametrize("stream", [False, True])
def test_too_many(asked: Asked, stream: bool) -> None:
    """more than max_logprobs are refused, streamed or not, and the server goes on"""
    assert refused(asked.complete, logprobs=21, stream=stream)["param"] == "logprobs"
    assert asked.complete().choices[0].text


def test_negative(asked: Asked) -> None:
    """all of the vocabulary (-1) are more than max_logprobs"""
    assert refused(asked.complete, logprobs=-1)["param"] == "logprobs"


@pytest.mark.parametrize("num", [0, 1])
def test_echo(asked: Asked, num: int) -> None:
    """with echo those of the prompt come first, and its first token has none"""
    for prompt in (PROMPT, [40, 41, 42, 43]):
        [choice] = asked.complete(prompt, echo=True, logprobs=num).choices
        found = choice.logprobs
        assert len(found.tokens) == len(found.text_offset) > 5
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        assert all(max(num, 1) <= len(each) <= num + 1 for each in found.top_logprobs[1:])


def test_offsets(asked: Asked) -> None:
    """text_offset says where each token's text begins"""
    [choice] = asked.complete(echo=True, logprobs=0).choices
    found = choice.logprobs
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert choice.text[offset : offset + len(token)] == token


def test_streamed(asked: Asked) -> None:
    """a stream's are those of an answer in one piece"""
    parts: list[float] = []
    for chunk in asked.complete(stream=True, logprobs=1):
        if chunk.choices[0].logprobs is not None:
            parts += chunk.choices[0].logprobs.token_logprobs
    assert parts == asked.complete(logprobs=1).choices[0].logprobs.token_logprobs


@pytest.mark.parametrize("num", [0, 1])
def test_prompt_logprobs(asked: Asked, num: int) -> None:
    """prompt_logprobs of each prompt: none of its first token, then those of each"""
    for choice in asked.complete([PROMPT, "The dog"], prompt_logprobs=num).choices:
        first, *rest = choice.prompt_logprobs
        assert first is None and rest
        assert all(max(num, 1) <= len(each) <= num + 1 for each in rest)


def test_more_prompt_logprobs(asked: Asked) -> None:
    """as many of each token as were asked for, or one more"""
    one, two = (asked.chat(prompt_logprobs=num).prompt_logprobs for num in (1, 2))
    assert all(1 <= len(each) <= 2 for each in one[1:])
    assert all(2 <= len(each) <= 3 for each in two[1:])


def test_all_prompt_logprobs(asked: Asked) -> None:
    """-1 is refused where max_logprobs is less than the vocabulary"""
    assert refused(asked.complete, prompt_logprobs=-1)["param"] == "prompt_logprobs"


@differs("the first chunk contains them; vLLM rejects the request")
def test_prompt_logprobs_streamed(asked: Asked) -> None:
    """`prompt_logprobs` in a stream"""
    first, *rest = asked.complete(prompt_logprobs=1, stream=True)
    whole = asked.complete(prompt_logprobs=1).choices[0].prompt_logprobs
    assert first.choices[0].prompt_logprobs == whole
    assert all(chunk.choices[0].model_dump().get("prompt_logprobs") is None for chunk in rest)


def test_names(asked: Asked) -> None:
    """return_tokens_as_token_ids names tokens by their ids"""
    given = {"logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    [choice] = asked.complete(**given).choices
    assert choice.logprobs.tokens == [f"token_id:{each}" for each in choice.token_ids]


def test_names_with_echo(asked: Asked) -> None:
    """so also of the prompt, with echo"""
    given = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    [choice] = asked.complete(echo=True, logprobs=1, prompt_logprobs=1, **given).choices
    ids = [int(name.removeprefix("token_id:")) for name in choice.logprobs.tokens]
    assert ids == choice.prompt_token_ids + choice.token_ids


def test_named_tokens(asked: Asked) -> None:
    """logprob_token_ids are shown at each position, likely or not"""
    more = {"logprobs": 1, "logprob_token_ids": [40, 41], "return_tokens_as_token_ids": True}
    found = asked.complete(**more).choices[0].logprobs
    assert all({"token_id:40", "token_id:41"} <= set(each) for each in found.top_logprobs)


def test_chat_none(asked: Asked) -> None:
    """a chat has none if it asks for none"""
    assert asked.chat(logprobs=False).choices[0].logprobs is None


def test_chat_zero(asked: Asked) -> None:
    """with top_logprobs 0 each token has its own alone"""
    found = asked.chat(logprobs=True, top_logprobs=0).choices[0].logprobs.content
    assert len(found) == 5 and all(each.top_logprobs == [] for each in found)


def test_chat_some(asked: Asked) -> None:
    """with 5 the best five, with the bytes of each"""
    for each in asked.chat(logprobs=True, top_logprobs=5).choices[0].logprobs.content:
        assert len(each.top_logprobs) == 5 and each.top_logprobs[0].logprob >= each.logprob
        assert bytes(each.bytes).decode("utf-8", "replace") == each.token


@pytest.mark.parametrize("stream", [False, True])
def test_chat_too_many(asked: Asked, stream: bool) -> None:
    """more than max_logprobs are refused"""
    error = refused(asked.chat, logprobs=True, top_logprobs=21, stream=stream)
    assert error["param"] == "top_logprobs"


def test_chat_without_logprobs(asked: Asked) -> None:
    """top_logprobs need logprobs"""
    assert "logprobs" in refused(asked.chat, top_logprobs=2)["message"]


def test_chat_prompt(asked: Asked) -> None:
    """prompt_logprobs stand beside a chat's choices"""
    found = asked.chat(prompt_logprobs=1)
    assert found.prompt_logprobs[0] is None and len(found.prompt_logprobs) > 5
    assert asked.chat().prompt_logprobs is None


def test_finite(asked: Asked) -> None:
    """those of tokens that a form rules out are numbers that JSON can write"""
    form = {"choice": ["red", "blue"]}
    found = asked.chat(logprobs=True, top_logprobs=5, structured_outputs=form)
    for each in found.choices[0].logprobs.content[0].top_logprobs:
        assert each.logprob >= -9999.0
