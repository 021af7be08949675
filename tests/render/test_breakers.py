"""Sequence breakers of the DRY penalty: the token ids of their texts."""

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import RequestError
from quire.render.tokens.bad_words import breaker_ids
from tests.support.models.reference_checkpoints import checkpoint
from tests.support.render.tiny_tokenizers import tokenizer

TOK = tokenizer("byte_level")


def test_breakers_are_the_last_tokens_of_texts_alone_or_after_a_letter() -> None:
    params = SamplingParams(dry_sequence_breakers=["\n", "no:"], dry_breaker_token_ids=[3])
    found = breaker_ids(params, TOK)
    for text in ("\n", "a\n", "no:", "ano:"):
        assert TOK.encode(text, add_special_tokens=False)[-1] in found
    assert 3 in found and len(found) <= 5 and len(set(found)) == len(found)
    defaults = breaker_ids(SamplingParams(), TOK)
    assert {TOK.encode(text, add_special_tokens=False)[-1] for text in '\n:"*'} <= set(defaults)
    assert breaker_ids(SamplingParams(dry_sequence_breakers=[]), TOK) == []


def test_breakers_change_the_output_but_not_the_params_of_the_caller() -> None:
    with LLM("demo", disable_log_stats=True) as llm:
        texts = []
        for breakers in (None, [" one", " two", "one", "t"]):
            params = SamplingParams(
                temperature=0.0, max_tokens=40, ignore_eos=True, dry_multiplier=20.0,
                dry_allowed_length=1, dry_sequence_breakers=breakers,
            )  # fmt: skip
            [output] = llm.generate("one two one two one two", params, use_tqdm=False)
            texts.append(output.outputs[0].text)
            assert params.dry_breaker_token_ids is None
        assert texts[0] != texts[1]


def test_breaker_texts_need_a_tokenizer() -> None:
    with LLM(str(checkpoint("llama")), disable_log_stats=True) as llm:
        params = SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=["x"])
        with pytest.raises(RequestError, match="dry_sequence_breakers=.*needs a tokenizer"):
            llm.generate({"prompt_token_ids": [1]}, params, use_tqdm=False)
