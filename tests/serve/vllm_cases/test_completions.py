"""Completions"""

import pytest

from tests.support.serve.vllm_cases import PROMPT, Asked, differs, refused, text_of


def test_one(asked: Asked) -> None:
    """a text has an id, one choice, and a usage that adds up"""
    found = asked.complete()
    [choice] = found.choices
    assert found.id.startswith("cmpl-") and found.object == "text_completion"
    assert choice.text and choice.finish_reason == "length"
    usage = found.usage
    assert usage.prompt_tokens == len(asked.tokens(PROMPT)) and usage.completion_tokens == 5
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_ids(asked: Asked) -> None:
    """token ids as a prompt are that text"""
    as_text, as_ids = asked.complete(), asked.complete(asked.tokens(PROMPT))
    assert as_ids.choices[0].text == as_text.choices[0].text
    assert as_ids.choices[0].prompt_logprobs is None


def test_batch_of_texts(asked: Asked) -> None:
    """equal texts in one request have equal answers, in their order"""
    found = asked.complete([PROMPT, "The dog", PROMPT]).choices
    assert [choice.index for choice in found] == [0, 1, 2]
    assert found[0].text == found[2].text != found[1].text


def test_batch_of_ids(asked: Asked) -> None:
    """so have equal lists of token ids"""
    ids = asked.tokens(PROMPT)
    first, second = asked.complete([ids, ids]).choices
    assert first.text == second.text


def test_batch_streams(asked: Asked) -> None:
    """a stream of several prompts tells by index whose each piece is"""
    texts = ["", ""]
    for chunk in asked.complete([PROMPT, PROMPT], stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
    assert texts[0] == texts[1] == asked.complete().choices[0].text


def test_batch_of_beams(asked: Asked) -> None:
    """beams of a prompt differ, those of two equal prompts are the same"""
    found = asked.complete([PROMPT, PROMPT], n=2, use_beam_search=True).choices
    texts = [choice.text for choice in found]
    assert texts[0] != texts[1] and texts[:2] == texts[2:]


def test_beams_are_not_streamed(asked: Asked) -> None:
    """beams cannot be streamed"""
    error = refused(asked.complete, stream=True, n=2, use_beam_search=True)
    assert error["param"] == "use_beam_search"


def test_n(asked: Asked) -> None:
    """n choices, each with its index, an end and its own text"""
    found = asked.complete(n=3, temperature=1, seed=42, max_tokens=30, logprobs=0).choices
    assert [choice.index for choice in found] == [0, 1, 2]
    assert len({choice.text for choice in found}) == 3
    assert all(choice.finish_reason for choice in found)


def test_n_streamed(asked: Asked) -> None:
    """n streamed choices each end once, and are those of an answer in one piece"""
    given = {"n": 3, "temperature": 1, "seed": 42, "max_tokens": 30}
    texts, ends = ["", "", ""], [0, 0, 0]
    for chunk in asked.complete(stream=True, **given):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] += choice.finish_reason is not None
    assert ends == [1, 1, 1]
    assert texts == [choice.text for choice in asked.complete(**given).choices]


def test_stream(asked: Asked) -> None:
    """a stream joins to the answer in one piece; its last chunk alone says why it ended"""
    chunks = list(asked.complete(stream=True))
    assert text_of(chunks) == asked.complete().choices[0].text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == "length" and set(reasons[:-1]) <= {None}


def test_echo(asked: Asked) -> None:
    """echo puts the prompt before the text"""
    assert asked.complete(echo=True).choices[0].text == PROMPT + asked.complete().choices[0].text


def test_echo_streamed(asked: Asked) -> None:
    """also in a stream"""
    assert text_of(asked.complete(echo=True, stream=True)).startswith(PROMPT)


def test_echo_alone(asked: Asked) -> None:
    """with max_tokens 0 the prompt is all that comes back"""
    [choice] = asked.complete(echo=True, max_tokens=0).choices
    assert choice.text == PROMPT and choice.finish_reason == "length"


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation(asked: Asked, side: str) -> None:
    """truncate_prompt_tokens keeps as many, of the side that truncation_side says"""
    ids = list(range(8))
    more = {"truncate_prompt_tokens": 4, "truncation_side": side, "return_token_ids": True}
    [choice] = asked.complete(ids, **more).choices
    assert choice.prompt_token_ids == (ids[-4:] if side == "left" else ids[:4])


def test_stop_string(asked: Asked) -> None:
    """a stop string ends the text and is not shown"""
    whole = asked.complete(max_tokens=20).choices[0].text
    word = whole.split()[3]
    [choice] = asked.complete(max_tokens=20, stop=[word]).choices
    assert choice.text == whole[: whole.index(word)]
    assert choice.finish_reason == "stop" and choice.stop_reason == word


def test_stop_string_shown(asked: Asked) -> None:
    """include_stop_str_in_output shows it"""
    whole = asked.complete(max_tokens=20).choices[0].text
    word = whole.split()[3]
    [choice] = asked.complete(max_tokens=20, stop=word, include_stop_str_in_output=True).choices
    assert choice.text == whole[: whole.index(word) + len(word)]


def test_stop_token(asked: Asked) -> None:
    """stop_token_ids end the text, and the token is the reason"""
    ids = asked.complete(return_token_ids=True).choices[0].token_ids
    [choice] = asked.complete(stop_token_ids=[ids[2]]).choices
    assert choice.finish_reason == "stop" and choice.stop_reason == ids[2]


def test_min_tokens(asked: Asked) -> None:
    """min_tokens keeps an end away until then"""
    stop = asked.complete(return_token_ids=True).choices[0].token_ids[0]
    found = asked.complete(stop_token_ids=[stop], min_tokens=4)
    assert found.usage.completion_tokens >= 4


def test_min_tokens_above_max(asked: Asked) -> None:
    """more than max_tokens cannot be asked for"""
    assert refused(asked.complete, min_tokens=9, max_tokens=5)["param"] == "min_tokens"


def test_ignore_eos(asked: Asked) -> None:
    """ignore_eos goes on to max_tokens"""
    assert asked.complete(ignore_eos=True, max_tokens=40).usage.completion_tokens == 40


def test_seed(asked: Asked) -> None:
    """the same seed gives the same text, another one another"""
    given = {"temperature": 1, "max_tokens": 20}
    first, again, other = (asked.complete(seed=seed, **given).choices[0].text for seed in (1, 1, 2))
    assert first == again != other


def test_logit_bias(asked: Asked) -> None:
    """a bias of 100 makes a token the only one"""
    [token] = asked.tokens(" fox", add_special_tokens=False)[:1]
    found = asked.complete(logit_bias={str(token): 100}, return_token_ids=True).choices[0]
    assert found.token_ids == [token] * 5


def test_logit_bias_out_of_vocabulary(asked: Asked) -> None:
    """a bias of a token that does not exist is refused"""
    assert refused(asked.complete, logit_bias={"10000000": 1})["param"].startswith("logit_bias")


def test_allowed_tokens(asked: Asked) -> None:
    """allowed_token_ids leave nothing else"""
    found = asked.complete(allowed_token_ids=[40, 41], return_token_ids=True).choices[0]
    assert set(found.token_ids) <= {40, 41}


def test_no_allowed_tokens(asked: Asked) -> None:
    """an empty list of them is refused"""
    assert refused(asked.complete, allowed_token_ids=[])["param"] == "allowed_token_ids"


def test_bad_words(asked: Asked) -> None:
    """bad_words do not come"""
    whole = asked.complete(max_tokens=12).choices[0].text
    word = whole.split()[1]
    assert word not in asked.complete(max_tokens=12, bad_words=[word]).choices[0].text


def test_no_prompt(asked: Asked) -> None:
    """a completion without a prompt is refused"""
    assert refused(asked.complete, None)["param"] == "prompt"


@pytest.mark.parametrize("prompt", [[], [[]], ""])
def test_empty_prompt(asked: Asked, prompt: object) -> None:
    """so is one of nothing"""
    assert refused(asked.complete, prompt)["param"] == "prompt"


def test_prompt_of_neither(asked: Asked) -> None:
    """and one that is neither text nor ids"""
    assert refused(asked.complete, {"a": 1})["param"] == "prompt"


def test_unknown_tokens(asked: Asked) -> None:
    """token ids must be of the vocabulary"""
    assert "vocabulary" in refused(asked.complete, [999_999])["message"]


def test_prompt_embeds(asked: Asked) -> None:
    """prompt_embeds are refused where the server does not take them"""
    assert refused(asked.complete, prompt_embeds=["AAAA"])["param"] == "prompt_embeds"


def test_prompt_too_long(asked: Asked) -> None:
    """a prompt that is longer than the context is refused with both lengths"""
    error = refused(asked.complete, [40] * 3000)
    assert "3000" in error["message"] and "2048" in error["message"]


def test_max_tokens_too_large(asked: Asked) -> None:
    """so are more tokens than the context has left"""
    assert refused(asked.complete, max_tokens=5000)["param"] == "max_tokens"


BAD = {
    "temperature": -1, "top_p": 2, "top_k": -5, "min_p": 1.5, "presence_penalty": 3,
    "frequency_penalty": -3, "repetition_penalty": 0, "n": 0, "max_tokens": -1, "min_tokens": -1,
}  # fmt: skip


@pytest.mark.parametrize("field", BAD)
def test_out_of_range(asked: Asked, field: str) -> None:
    """numbers outside their range are refused by the field's name"""
    assert refused(asked.complete, **{field: BAD[field]})["param"] == field


@differs("`suffix` works with models that have tokens for infilling; vLLM always rejects it")
def test_suffix(asked: Asked) -> None:
    """`suffix` in a completion"""
    assert refused(asked.complete, suffix=" the end.")["param"] == "suffix"


def test_token_ids(asked: Asked) -> None:
    """return_token_ids shows those of prompt and text"""
    [choice] = asked.complete(return_token_ids=True).choices
    assert choice.prompt_token_ids == asked.tokens(PROMPT) and len(choice.token_ids) == 5
    shown = asked.post("/detokenize", tokens=choice.token_ids)["prompt"]
    assert shown.startswith(choice.text)


def test_no_token_ids(asked: Asked) -> None:
    """without it there are none"""
    choice = asked.complete(return_token_ids=False).choices[0].model_dump()
    assert choice.get("token_ids") is None and choice.get("prompt_token_ids") is None


def test_token_ids_streamed(asked: Asked) -> None:
    """a stream tells the prompt's ids once, first, and the text's as they come"""
    chunks = list(asked.complete(stream=True, return_token_ids=True))
    assert chunks[0].choices[0].prompt_token_ids == asked.tokens(PROMPT)
    for chunk in chunks[1:]:
        assert chunk.choices[0].model_dump().get("prompt_token_ids") is None
    ids = [token for chunk in chunks for token in chunk.choices[0].token_ids or ()]
    assert ids == asked.complete(return_token_ids=True).choices[0].token_ids


def test_special_tokens_shown(asked: Asked) -> None:
    """skip_special_tokens false shows what a text ended with"""
    given = {"temperature": 0, "max_tokens": 1, "skip_special_tokens": False, "ignore_eos": True}
    special = 2
    [choice] = asked.complete(allowed_token_ids=[special], **given).choices
    assert choice.text == asked.post("/detokenize", tokens=[special])["prompt"]


def test_usage_label(asked: Asked) -> None:
    """`user` and other labels of clients are taken"""
    assert asked.complete(user="somebody", metadata={"a": "b"}).choices[0].text
