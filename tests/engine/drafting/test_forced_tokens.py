"""Drafts of tokens that a grammar forces: identical answers in fewer steps."""

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from quire import SamplingParams, StructuredOutputsParams
from quire.base.events import Preempted, Stepped
from quire.base.messages import Request
from quire.base.settings.config import config_from_flat
from quire.engine.client.admission import checked_grammar
from quire.engine.drafting import drafting as drafting_module
from quire.engine.drafting.draft_pace import StepTimes
from quire.engine.start.build import Engine, build_engine
from quire.render.answers.calls import Tool
from quire.render.answers.format import NamedTool, RequestedAnswer
from quire.render.answers.grammar import answer_grammar
from quire.render.answers.parts import CallArguments, CallBegun
from quire.render.templates.chat_template import ChatOptions
from tests.support.engine.attachments import drafter_of

PLACE = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}},
         "required": ["city"], "additionalProperties": False}  # fmt: skip
ZONE = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}},
        "required": ["zone"], "additionalProperties": False}  # fmt: skip
SHOWN = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in [("get_weather", PLACE), ("get_time", ZONE)]
]
TOOLS = Tool("get_weather", PLACE), Tool("get_time", ZONE)
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 8},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 120},
        "favourite_colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["first_name", "age_in_years", "favourite_colour"],
    "additionalProperties": False,
}
TAGS = (
    '{"type": "structural_tag", "structures": [{"begin": "e <call>", "schema": {"type": "object",'
    ' "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]}, "end": "</call>"}],'
    ' "triggers": ["e"]}'
)
CONSTRAINTS: dict[str, StructuredOutputsParams] = {
    "json": StructuredOutputsParams(json=PERSON),
    "regex": StructuredOutputsParams(regex=r"The answer is [0-9]{1,3} of [0-9]{1,3}\."),
    "choice": StructuredOutputsParams(choice=["a long answer", "a longer one"]),
    "grammar": StructuredOutputsParams(
        grammar='start: "f(" /[a-z]{1,5}/ ", key=" /[0-9]{1,4}/ ")"'
    ),
    "tags": StructuredOutputsParams(structural_tag=TAGS),
}
CALLS: dict[str, Any] = {
    "named": NamedTool("get_time"), "named weather": NamedTool("get_weather"),
    "required": "required",
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "hot": {"temperature": 1.5, "seed": 3, "logprobs": 0},
    "three": {"temperature": 1.5, "seed": 4, "n": 3},
    "penalties": {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.2, "dry_multiplier": 0.8},
    "stop": {"temperature": 1.0, "seed": 6, "stop": ['"a', "is ", "l", "call"]},
    "no end": {"temperature": 1.5, "seed": 7, "ignore_eos": True, "max_tokens": 30},
}
QUESTION = [{"role": "user", "content": "Hello, how are you?"}]


@pytest.fixture(autouse=True)
def no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure no steps, so that drafts do not depend on the speed of the machine."""
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)


def engine(**settings: Any) -> Engine:
    return build_engine(
        config_from_flat(
            model="demo", max_model_len=256, dtype="float32", disable_log_stats=True, **settings
        )
    )


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    made = engine(speculative_config={"method": "none"}, kv_cache_memory_bytes=8 << 20)
    yield made
    made.client.close()


def request_of(engine: Engine, constraint: str, **params: Any) -> Request:
    prompt = engine.renderer.render(QUESTION, ChatOptions(tools=SHOWN))
    params = {"max_tokens": 80} | params
    if constraint in CONSTRAINTS:
        given = SamplingParams(structured_outputs=CONSTRAINTS[constraint], **params)
        grammar = checked_grammar(engine.renderer, given, prompt)
        return engine.requests.make(prompt, given, grammar=grammar)
    requested = RequestedAnswer(engine.renderer.answer_format(None, True), TOOLS, CALLS[constraint])
    assert engine.renderer.tokenizer is not None
    grammar = answer_grammar(requested, engine.renderer.tokenizer.added_ids)
    return engine.requests.make(prompt, SamplingParams(**params), grammar=grammar)


def answers(engine: Engine, *requests: Request) -> list[Any]:
    """Return everything that clients get, with exact log-probabilities."""
    for i, request in enumerate(requests):
        engine.client.add(msgspec.structs.replace(request, request_id=f"{i}"))
    found = {}
    while engine.client.num_unfinished:
        for output in engine.client.step():
            if output.finished:
                found[output.request_id] = [
                    (c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs)
                    for c in output.outputs
                ]
    return [found[str(i)] for i in range(len(requests))]


def steps_of(engine: Engine) -> list[Stepped]:
    steps: list[Stepped] = []
    core = engine.client.core
    core.subscribe(lambda event: steps.append(event) if isinstance(event, Stepped) else None)
    return steps


@pytest.fixture(scope="module")
def forcing() -> Iterator[Engine]:
    """An engine with the default drafts and one plan in flight."""
    made = engine(kv_cache_memory_bytes=8 << 20)
    yield made
    made.client.close()


@pytest.mark.parametrize("place", ["const", "enum", "name", "pattern", "choice"])
def test_names_of_added_tokens_are_written_as_text(
    plain: Engine, forcing: Engine, place: str
) -> None:
    """With drafts and without, the answer has the name as text and not as the added token."""
    tokenizer = plain.renderer.tokenizer
    assert tokenizer is not None
    marks = list(tokenizer.added_ids)
    assert "<|im_end|>" in marks and "<tool_call>" in marks
    requests, wanted = [], []
    for mark in marks:
        constraint, value = _constraint_with(mark, place)
        params = SamplingParams(
            structured_outputs=constraint, max_tokens=100, temperature=0.0, logprobs=0
        )
        prompt = plain.renderer.render(QUESTION, ChatOptions())
        grammar = checked_grammar(plain.renderer, params, prompt)
        requests.append(plain.requests.make(prompt, params, grammar=grammar))
        wanted.append(value)
    found = answers(forcing, *requests)
    assert found == answers(plain, *requests)
    for [(token_ids, text, finish_reason, _, _)], value in zip(found, wanted, strict=True):
        assert finish_reason == "stop"
        assert (text if place == "choice" else json.loads(text)) == value
        assert not set(token_ids[:-1]) & set(tokenizer.added_ids.values())


def test_tool_calls_write_names_of_added_tokens_as_text(plain: Engine, forcing: Engine) -> None:
    """In the names of a tool and its argument, and in the argument's value."""
    tokenizer = plain.renderer.tokenizer
    assert tokenizer is not None
    for mark in tokenizer.added_ids:
        schema = {"type": "object", "properties": {mark: {"const": mark}}, "required": [mark]}
        name = f"get{mark}"
        answer_format = plain.renderer.answer_format(None, True)
        requested = RequestedAnswer(answer_format, (Tool(name, schema),), NamedTool(name))
        request = plain.requests.make(
            plain.renderer.render(QUESTION, ChatOptions(tools=SHOWN)),
            SamplingParams(max_tokens=120, temperature=0.0, logprobs=0),
            grammar=answer_grammar(requested, tokenizer.added_ids),
        )
        found = answers(forcing, request)
        assert found == answers(plain, request)
        [(token_ids, _, finish_reason, _, _)] = found[0]
        assert finish_reason == "stop"
        parser = requested.parser()
        text = tokenizer.decode(token_ids[:-1], skip_special_tokens=False)
        parts = parser.push(text) + parser.flush()
        assert [part.name for part in parts if isinstance(part, CallBegun)] == [name]
        arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
        assert json.loads(arguments) == {mark: mark}


def _constraint_with(mark: str, place: str) -> tuple[StructuredOutputsParams, Any]:
    """Return a constraint with a single possible answer, which has this text, and the answer."""
    if place == "choice":
        return StructuredOutputsParams(choice=[f"a {mark} b"]), f"a {mark} b"
    key, value = (mark, "v") if place == "name" else ("k", mark)
    pattern = {"type": "string", "pattern": f"^{re.escape(mark)}$"}
    schemas: dict[str, Any] = {"enum": {"enum": [mark]}, "pattern": pattern}
    schema = {"type": "object", "properties": {key: schemas.get(place, {"const": value})},
              "required": [key], "additionalProperties": False}  # fmt: skip
    constraint = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    return constraint, {key: value}


@pytest.fixture(scope="module")
def plain_answers(plain: Engine) -> dict[str, list[Any]]:
    return {
        constraint: answers(plain, *all_ways(plain, constraint))
        for constraint in (*CONSTRAINTS, *CALLS)
    }


def all_ways(engine: Engine, constraint: str) -> list[Request]:
    return [request_of(engine, constraint, **way) for way in WAYS.values()]


@pytest.mark.parametrize("constraint", [*CONSTRAINTS, *CALLS])
def test_forced_tokens_do_not_change_answers(
    plain_answers: dict[str, list[Any]], forcing: Engine, constraint: str
) -> None:
    steps = steps_of(forcing)
    assert answers(forcing, *all_ways(forcing, constraint)) == plain_answers[constraint]
    assert sum(step.num_draft_tokens for step in steps) > len(WAYS)


def test_ngram_drafts_do_not_change_constrained_answers(
    plain_answers: dict[str, list[Any]],
) -> None:
    """The drafts are often wrong, memory is short, and prompts are computed in chunks."""
    settings = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}
    made = engine(
        speculative_config=settings, max_num_seqs=6, kv_cache_memory_bytes=24 * 98_304,
        max_num_batched_tokens=32, enable_prefix_caching=False,
    )  # fmt: skip
    preempted: list[Preempted] = []
    core = made.client.core
    core.subscribe(lambda event: preempted.append(event) if isinstance(event, Preempted) else None)
    steps = steps_of(made)
    for constraint in [*plain_answers][::2]:
        assert answers(made, *all_ways(made, constraint)) == plain_answers[constraint], constraint
    drafted, accepted = sum(s.num_draft_tokens for s in steps), sum(s.num_accepted for s in steps)
    assert preempted and drafted > accepted > 0
    made.client.close()


def test_method_drafts_between_forced_tokens(
    plain: Engine, plain_answers: dict[str, list[Any]]
) -> None:
    """Answers are the same. A repeated answer takes fewer steps than with forced tokens alone."""
    suffix = {"method": "suffix", "num_speculative_tokens": 8}
    made = engine(speculative_config=suffix, kv_cache_memory_bytes=8 << 20)
    steps = steps_of(made)
    for constraint, expected in plain_answers.items():
        assert answers(made, *all_ways(made, constraint)) == expected, constraint
    steps.clear()
    [[answer]] = answers(made, request_of(made, "named weather", temperature=0.0))
    assert len(steps) < len(answer[0]) / 4
    made.client.close()


SHARES = {"named": 0.6, "named weather": 0.6, "required": 0.6, "json": 0.75}


@pytest.mark.parametrize(
    ("constraint", "way"),
    [
        *((constraint, "greedy") for constraint in SHARES),
        ("named", "hot"),
        *(pytest.param(constraint, "hot", marks=pytest.mark.slow) for constraint in [*SHARES][1:]),
    ],
)
def test_forced_answers_take_fewer_steps(
    plain: Engine, forcing: Engine, constraint: str, way: str
) -> None:
    """Every forced token is accepted. In JSON, the model decides about white space."""
    counts, steps = [], list[Stepped]()
    for made in (plain, forcing):
        steps = steps_of(made)
        answers(made, request_of(made, constraint, **WAYS[way]))
        counts.append(len(steps))
    assert sum(s.num_draft_tokens for s in steps) == sum(s.num_accepted for s in steps)
    assert counts[1] <= SHARES[constraint] * counts[0]


def test_forced_drafts_stay_within_max_tokens(plain: Engine, forcing: Engine) -> None:
    for num in (1, 2, 5, 9):
        requests = [request_of(made, "named", max_tokens=num) for made in (plain, forcing)]
        one, other = answers(plain, requests[0]), answers(forcing, requests[1])
        assert one == other and len(one[0][0][0]) == num


def test_rows_without_a_grammar_skip_drafting(forcing: Engine, monkeypatch: Any) -> None:
    """The scheduler does not even list candidates for drafts."""
    core = forcing.client.core
    drafts = type(core.scheduler.drafts)
    monkeypatch.setattr(drafts, "candidates", lambda _: pytest.fail("candidates were listed"))
    prompt = forcing.renderer.render(QUESTION)
    answers(forcing, forcing.requests.make(prompt, SamplingParams(max_tokens=4)))


def test_unprofitable_forced_tokens_are_rarely_looked_up(
    plain: Engine, forcing: Engine, monkeypatch: Any
) -> None:
    look_ups: list[bool] = []
    drafting: Any = drafter_of(forcing.client.core)
    look = drafting._grammars.draft
    monkeypatch.setattr(
        drafting._grammars, "draft", lambda *given: look_ups.append(True) or look(*given)
    )
    monkeypatch.setattr(drafting_module, "lengths", lambda most, *_, **__: [0] * len(most))
    steps = steps_of(forcing)
    expected = answers(plain, request_of(plain, "named", temperature=0.0))
    assert answers(forcing, request_of(forcing, "named", temperature=0.0)) == expected
    assert sum(step.num_draft_tokens for step in steps) == 0
    assert 0 < len(look_ups) < len(steps) / 2
    monkeypatch.undo()
    answers(forcing, request_of(forcing, "named", temperature=0.0), request_of(forcing, "json"))
    assert sum(step.num_draft_tokens for step in steps) > 0


def test_settings_turn_forced_drafts_on_and_off() -> None:
    few = {"max_num_seqs": 2, "kv_cache_memory_bytes": 2 << 20}
    ways: list[tuple[dict[str, Any], int, bool]] = [
        ({}, 1, True),
        ({"pipeline_depth": 2}, 2, False),
        ({"speculative_config": {"method": "none"}, "pipeline_depth": 2}, 2, False),
        ({"speculative_config": {"method": "none"}}, 1, False),
        ({"speculative_config": {"method": "forced", "num_speculative_tokens": 2}}, 1, True),
        ({"speculative_config": {"method": "forced"}, "pipeline_depth": 2}, 2, True),
    ]
    for settings, depth, drafts in ways:
        made = engine(**few, **settings)
        assert made.config.scheduler.pipeline_depth == depth
        assert (drafter_of(made.client.core) is not None) == drafts
        made.client.close()


@pytest.mark.parametrize("depth", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_masks_and_drafts_work_with_several_plans_in_flight(plain: Engine, depth: int) -> None:
    """A step with masks waits for the host anyway, so it verifies forced tokens as well."""
    constraints = ["named", "required", "json"] if "json" in CONSTRAINTS else ["named", "required"]
    requests = [
        request_of(plain, constraint, seed=i, temperature=0.8)
        for i, constraint in enumerate(constraints)
    ]
    repetitive = plain.renderer.render("one two three one two three one two", ChatOptions())
    requests.append(
        plain.requests.make(repetitive, SamplingParams(max_tokens=30, logprobs=1, seed=3))
    )
    method = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    made = engine(speculative_config=method, pipeline_depth=depth, kv_cache_memory_bytes=8 << 20)
    try:
        steps = steps_of(made)
        assert answers(made, *requests) == answers(plain, *requests)
        assert sum(step.num_accepted for step in steps) > 20
    finally:
        made.client.close()
