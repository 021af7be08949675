"""Requests with structured outputs: their grammar, and the tokens that end them."""

import pytest

from quire.base.errors import RequestError
from quire.base.requests.sampling_params import SamplingParams
from quire.base.requests.structured_outputs import StructuredOutputsParams
from quire.engine.client.request_maker import RequestMaker
from quire.render.generation import GenerationDefaults
from quire.render.grammars.structured import grammar_of
from quire.render.renderer import RenderedPrompt
from tests.support.render.tiny_tokenizers import tokenizer

TOK = tokenizer("byte_level")
DEFAULTS = GenerationDefaults(eos_token_ids=(2, 3))
PROMPT = RenderedPrompt([5, 6])
CHOICE = StructuredOutputsParams(choice=["a", "b"])


def test_structured_outputs_require_their_grammar() -> None:
    maker = RequestMaker(TOK, DEFAULTS, 0)
    params = SamplingParams(structured_outputs=CHOICE)
    with pytest.raises(AssertionError, match="checked_grammar"):
        maker.make(PROMPT, params)
    request = maker.make(PROMPT, params, grammar=grammar_of(CHOICE, TOK.added_ids))
    assert request.grammar == grammar_of(CHOICE, TOK.added_ids)
    assert request.params.structured_outputs is None  # the core needs only the grammar
    assert params.structured_outputs is CHOICE
    assert maker.make(PROMPT, params, grammar="start: /x/").grammar == "start: /x/"
    assert maker.make(PROMPT, SamplingParams()).grammar == ""


@pytest.mark.parametrize("grammar", ["", "start: /x/"])
def test_end_tokens_end_an_answer_with_a_grammar_despite_ignore_eos(grammar: str) -> None:
    maker = RequestMaker(TOK, DEFAULTS, 0)
    request = maker.make(PROMPT, SamplingParams(ignore_eos=True), grammar=grammar)
    expected = (2, 3) if grammar else ()
    assert request.stop_token_ids == request.eos_token_ids == expected


def test_structured_outputs_require_a_tokenizer() -> None:
    maker = RequestMaker(None, DEFAULTS, 0)
    with pytest.raises(RequestError, match="needs a tokenizer") as raised:
        maker.make(PROMPT, SamplingParams(structured_outputs=CHOICE))
    assert raised.value.field == "structured_outputs"


def test_structured_outputs_have_exactly_one_constraint() -> None:
    for fields, message in (
        ({}, "got none of them"),
        ({"json": {}, "regex": "a"}, "got json and regex"),
        ({"json_object": False}, "got none"),
        ({"choice": []}, "choice must be a list"),
        ({"choice": ["a", ""]}, "choice must be a list"),
        ({"json": 5}, "json must be a schema"),
        ({"regex": 5}, "regex must be a text"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "remove one"),
    ):
        with pytest.raises(RequestError, match=message) as raised:
            StructuredOutputsParams(**fields)  # type: ignore[arg-type]
        assert raised.value.field == "structured_outputs"
    with pytest.raises(RequestError, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
