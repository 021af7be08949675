"""Structured output in the whole engine: a model of random weights at temperature 1.5 obeys its
grammar."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from quire.base.errors import RequestError
from quire.serve.python.async_llm import AsyncLLM
from tests.support.models.reference_checkpoints import checkpoint, text_checkpoint

SETTINGS: dict[str, Any] = {"max_model_len": 128, "disable_log_stats": True, "block_size": 4}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"enum": [7, 8]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(model=str(text_checkpoint()), **SETTINGS) as shared:
        yield shared


def params(**constraint: Any) -> SamplingParams:
    wanted = StructuredOutputsParams(**constraint)
    return SamplingParams(temperature=1.5, max_tokens=100, seed=7, structured_outputs=wanted)


def scalars() -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.integers(-20, 20).map(lambda low: {"type": "integer", "minimum": low,
                                              "maximum": low + 30}),
        st.integers(0, 4).map(lambda max_length: {"type": "string", "maxLength": max_length}),
        st.sampled_from(["[a-c]{2}", "^x[0-9]$", "(ab|cd)e?"]).map(
            lambda pattern: {"type": "string", "pattern": f"^({pattern.strip('^$')})$"}),
        st.lists(st.sampled_from(["a", "b c", 1, None, True, [1], {"k": 2}]), min_size=1,
                 max_size=3).map(lambda values: {"enum": values}),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": "c"},
                         {"type": "string", "format": "date"}]),
    )  # fmt: skip


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Return small schemas, whose answers are short."""

    def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        names = st.lists(st.sampled_from(["a", "b", "c d", 'q"']), unique=True, max_size=3)
        return st.one_of(
            st.tuples(inner, st.integers(0, 2)).map(
                lambda two: {"type": "array", "items": two[0], "maxItems": two[1]}),
            st.lists(inner, min_size=1, max_size=2).map(lambda found: {"anyOf": found}),
            names.flatmap(lambda known: st.tuples(st.just(known),
                                                  st.lists(inner, min_size=3, max_size=3))).map(
                lambda two: {
                    "type": "object",
                    "properties": dict(zip(*two, strict=False)),
                    "required": two[0][:2],
                    "additionalProperties": False,
                }),
        )  # fmt: skip

    return st.recursive(scalars(), grown, max_leaves=4)


few = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))


@few
@given(schema=schemas(), seed=st.integers(0, 99))
def test_every_answer_matches_its_schema(llm: LLM, schema: dict[str, Any], seed: int) -> None:
    assert_answers_validate(llm, schema, seed)


@pytest.mark.slow
@settings(few, max_examples=200)
@given(schema=schemas(), seed=st.integers(0, 99))
def test_every_answer_matches_its_schema_in_many_examples(
    llm: LLM, schema: dict[str, Any], seed: int
) -> None:
    assert_answers_validate(llm, schema, seed)


def assert_answers_validate(llm: LLM, schema: dict[str, Any], seed: int) -> None:
    wanted = params(json=schema)
    wanted.seed, wanted.n = seed, 3
    [output] = llm.generate([[1, 2, 3]], wanted, use_tqdm=False)
    num_finished = 0
    for answer in output.outputs:
        assert answer.error is None
        if answer.finish_reason == "stop":
            num_finished += 1
            jsonschema.validate(json.loads(answer.text), schema)
    assert num_finished or len(output.outputs[0].token_ids) == 100


def test_every_kind_of_constraint_is_obeyed(llm: LLM) -> None:
    tag = json.dumps({"type": "structural_tag", "format": {
        "type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "[a-z]{3}"},
        "end": ">"}})  # fmt: skip
    for constraint, pattern in (
        ({"regex": "[0-9]{3}-[0-9]{2}"}, "[0-9]{3}-[0-9]{2}"),
        ({"choice": ["yes", "yes, please", "no"]}, "yes|yes, please|no"),
        ({"grammar": 'start: A ("," A)~1..2\nA: /[0-9]{1,2}/'}, r"\d{1,2}(,\d{1,2}){1,2}"),
        ({"grammar": 'root ::= "a" [b-d]{2,3} "."'}, r"a[b-d]{2,3}\."),
        ({"structural_tag": tag}, "<[a-z]{3}>"),
    ):  # fmt: skip
        [output] = llm.generate(["Hi"], params(**constraint), use_tqdm=False)
        assert output.outputs[0].finish_reason == "stop"
        assert re.fullmatch(pattern, output.outputs[0].text)


def test_beams_and_streams_obey_constraints_and_end(llm: LLM) -> None:
    constraint = StructuredOutputsParams(json=PERSON, disable_any_whitespace=True)
    [found] = llm.beam_search(["Hi"], BeamSearchParams(3, 60, structured_outputs=constraint))
    assert len({beam.text for beam in found.sequences}) == 3
    for beam in found.sequences:
        jsonschema.validate(json.loads(beam.text), PERSON)
    pieces = [output.outputs[0].text for output in llm.stream("Hi", params(choice=["yes", "no"]))]
    assert "".join(pieces) in ("yes", "no")
    endless = params(choice=["yes", "no"])
    endless.ignore_eos = True
    [output] = llm.generate(["Hi"], endless, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"


def test_invalid_constraint_is_rejected_before_any_prompt_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match="unclosed") as raised:
        llm.generate(["Hi"], [params(regex="(")], use_tqdm=False)
    assert raised.value.field == "structured_outputs"
    assert llm.engine.client.num_unfinished == 0
    textless = LLM(model=str(checkpoint("llama")), **SETTINGS)
    with textless, pytest.raises(RequestError, match="needs a tokenizer"):
        textless.generate([[1, 2]], params(regex="a"), use_tqdm=False)


def test_grammar_that_exceeds_a_limit_fails_only_its_request(llm: LLM) -> None:
    """The grammar is small, but each further token has many more parses."""
    ways = " | ".join(" ".join(["s"] * num) for num in range(2, 18))
    constraints = params(grammar=f'root ::= s\ns ::= {ways} | "a"'), params(regex="[a-c]{90}")
    constraints[0].ignore_eos = True
    guilty, other = llm.generate(["Hi", "Hi"], list(constraints), use_tqdm=False)
    [failed], [whole] = guilty.outputs, other.outputs
    assert failed.finish_reason == "error" and len(failed.token_ids) > 10
    assert failed.error is not None and failed.error.code == "grammar_failed"
    assert "limit max_items_in_row (" in failed.error.message
    assert re.fullmatch("[a-c]{90}", whole.text)


def test_async_llm_obeys_constraints() -> None:
    async def go() -> None:
        async with await AsyncLLM.create(str(text_checkpoint()), **SETTINGS) as engine:
            async for output in engine.generate("Hi", params(json=PERSON)):
                text = output.outputs[0].text
            jsonschema.validate(json.loads(text), PERSON)
            with pytest.raises(RequestError, match="unclosed"):
                async for _ in engine.generate("Hi", params(regex="(")):
                    pass

    asyncio.run(go())
