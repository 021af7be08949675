"""Grammars are checked in a separate process, which reports errors and has limits.

The processes and their limits are real: this covers `render/grammars/grammar_worker.py`.
"""

import asyncio
import json
import os
import select
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from quire.base.errors import EngineBusy, RequestError
from quire.base.requests.structured_outputs import StructuredOutputsParams
from quire.render.grammars.grammars import CHECKS, Grammars
from quire.render.grammars.structured import grammar_of
from quire.render.jobs.job_pool import JobPool
from tests.support.cases import slow_but
from tests.support.render.grammar_matching import takes


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    yield Grammars()


def grammar(strict: bool = False, **form: Any) -> str:
    return grammar_of(StructuredOutputsParams(**form), {}, strict=strict)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json": {"not": {}}}, r'Unimplemented keys: \["not"\]'),
        ({"json": {"oneOf": [{"type": "string"}, {"minLength": 2}]}}, "oneOf"),
        ({"json": {"type": "string", "format": "cron"}}, "Unknown format: cron"),
        ({"json": {"type": "text"}}, "Invalid type: text"),
        ({"json": {"$ref": "http://example.com/x"}}, "http://example.com/x"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no answer"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": r"a(?=b)"}, "look-ahead"),
        ({"grammar": "begin: /a/"}, "no start rule"),
        ({"grammar": "start: thing"}, "thing"),
        ({"grammar": "start: <|nothing|>"}, r"unknown special token"),
        ({"grammar": "root ::= thing"}, "'thing' not found"),
        ({"grammar": "root ::= " + "(" * 5000}, "too deep"),
    ],
)
def test_errors_in_a_grammar_are_reported(
    grammars: Grammars, form: dict[str, Any], message: str
) -> None:
    for check in (grammars.check, lambda *args: asyncio.run(grammars.check_async(*args))):
        with pytest.raises(RequestError, match=message) as raised:
            check(grammar(strict=True, **form), "response_format")
        assert raised.value.field == "response_format"
        assert "%llguidance" not in str(raised.value)


def test_schema_keywords_that_are_not_enforced_give_warnings(
    grammars: Grammars, caplog: pytest.LogCaptureFixture
) -> None:
    found = grammars.check(grammar(json={"type": "array", "uniqueItems": True, "contains": {}}))
    assert "uniqueItems" in found.warnings[0] and "contains" in found.warnings[0]
    assert "uniqueItems" in caplog.text
    coerced = grammars.check(grammar(json={"oneOf": [{"type": "string"}, {"minLength": 2}]}))
    assert "oneOf" in coerced.warnings[0]
    assert not grammars.check(grammar(json={"type": "array"})).warnings


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('root ::= "a" [b-d]+ ("x" | "y")? # end\n', ["ab", "abcx"], ["a", "abxy"]),
        (r'root ::= "\u0041" [\u00e9-\u00ea] "\U0001F642" "\\u"', ["Aé🙂\\u"], ["é"]),
        ('root ::= a-b{2,3}\na-b ::= [^"\\\\\\n] | "\\n"', ["xx", "\n\n\n"], ["x", '""']),
        ('root ::= e\ne ::= t ("+" t)*\nt ::= [0-9]+ | "(" e ")"', ["1+(2+3)"], ["1+"]),
    ],
)
def test_gbnf_grammars_accept_only_their_texts(
    grammars: Grammars, text: str, good: list[str], bad: list[str]
) -> None:
    found = grammars.check(grammar(grammar=text)).text
    assert all(takes(found, one) for one in good)
    assert not any(takes(found, one) for one in bad)


def test_large_token_ids_are_accepted_and_impossible_ones_rejected(grammars: Grammars) -> None:
    params = StructuredOutputsParams(choice=["a<|x|>"])
    assert grammars.check(grammar_of(params, {"<|x|>": 151_667})).text
    with pytest.raises(RequestError, match="no token"):
        grammars.check("start: <[99999999]>")


EXPLODING = {
    "multiples": {"json": {"type": "integer", "multipleOf": 999_983}},
    "properties": {"json": {"properties": {f"p{i}": {} for i in range(20_000)}}},
    "required": {"json": {"type": "object", "required": [f"p{i}" for i in range(29_000)]}},
    "chain": {"grammar": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(9000))
              + 'r9000 ::= "a"'},
}  # fmt: skip
# Grammars that only look as if they exploded.
HARMLESS = {
    "bounds": {"regex": "((a{0,1000}b?){0,1000}c?){0,1000}d"},
    "states": {"regex": "(.*a.{30}b.{30}|.*c.{100}d)+x"},
    "length": {"json": {"type": "string", "maxLength": 10**7}},
    "enumeration": {"json": {"enum": [f"word number {i}" for i in range(11_000)]}},
    "choices": {"choice": [f"word number {i}" for i in range(11_000)]},
    "ambiguous": {"grammar": 'start: a\na: a a a | a a | "x" | ""'},
    "items": {"json": {"type": "array", "minItems": 200_000, "items": {}}},
    "repeated rules": {"grammar": 'start: a{0,99999}\na: b{0,99999}\nb: c{0,9999}\nc: "x" | "y"'},
}


@pytest.mark.parametrize("name", list(HARMLESS))
def test_large_harmless_grammars_pass(grammars: Grammars, name: str) -> None:
    assert grammars.check(grammar(**HARMLESS[name])).text


@pytest.mark.parametrize("name", slow_but(EXPLODING, "multiples", "chain"))
def test_exploding_grammar_is_stopped_and_other_checks_continue(name: str) -> None:
    grammars = Grammars(replace(CHECKS, cpu_s=0.4))
    grammars.check(grammar(regex="warm"))

    async def both() -> None:
        endless = asyncio.create_task(grammars.check_async(grammar(**EXPLODING[name])))
        await asyncio.sleep(0)
        await grammars.check_async(grammar(regex=name))
        with pytest.raises(RequestError, match=r"processor time|memory|nested too deep") as raised:
            await endless
        assert not isinstance(raised.value, EngineBusy)

    asyncio.run(both())


def test_results_of_checks_are_cached(grammars: Grammars) -> None:
    text = grammar(json={"enum": [f"value {i}" for i in range(1000)]})
    first = grammars.check(text)
    assert grammars.check(text) is first
    assert json.loads(json.dumps(first.text)) == text


def test_result_of_a_cancelled_check_is_not_given_to_another() -> None:
    grammars = Grammars()

    async def go() -> None:
        for turns in range(4):
            task = asyncio.create_task(grammars.check_async(grammar(regex="mine" * 100 + "[")))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert not (await grammars.check_async(grammar(regex=f"yours {turns}"))).warnings

    asyncio.run(go())


@pytest.mark.parametrize("is_started", [True, False])
def test_starved_process_is_reported_as_busy_not_as_a_grammar_error(is_started: bool) -> None:
    """The process gets no CPU time, before or after it is ready; the next one does the work."""
    grammars = Grammars(replace(CHECKS, answer_s=0.05, start_s=30.0 if is_started else 0.05))
    grammars.prepare()
    [process] = grammars._jobs._idle
    if is_started:
        select.select([process._socket], [], [])
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(EngineBusy, match="too little processor time"):
        grammars.check(grammar(choice=["yes", "no"]))
    patient = Grammars()
    patient._jobs._idle = grammars._jobs._idle
    with pytest.raises(RequestError, match="unclosed group") as raised:
        patient.check(grammar(regex="(a"))
    assert not isinstance(raised.value, EngineBusy)


def test_time_limit_starts_when_the_process_is_ready() -> None:
    """A slow start takes no time from the first check."""
    grammars = Grammars(replace(CHECKS, answer_s=30.0, cpu_s=0.5))
    grammars.prepare()
    [process] = grammars._jobs._idle
    os.kill(process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(grammars.check, grammar(choice=["yes", "no"]))
        assert not process._is_ready and process.is_at_rest  # nothing was sent to it
        os.kill(process.pid, signal.SIGCONT)
        assert found.result(60).text
    assert grammars._jobs._idle == [process]


def test_checks_that_wait_too_long_for_a_process_are_rejected() -> None:
    pool = JobPool(replace(CHECKS, wait_s=0.1), max_processes=1)
    pool.run(json.dumps("start: /warm/").encode())
    job = json.dumps(grammar(**EXPLODING["required"])).encode()

    async def go() -> None:
        endless = asyncio.create_task(pool.run_async(job))
        await asyncio.sleep(0)
        with pytest.raises(EngineBusy, match="too many grammars are waiting"):
            await pool.run_async(b'"start: /a/"')
        with pytest.raises(EngineBusy):
            await asyncio.to_thread(pool.run, b'"start: /a/"')
        endless.cancel()
        await asyncio.gather(endless, return_exceptions=True)

    asyncio.run(go())
    assert json.loads(pool.run(b'"start: /a/"')) == ["start: /a/", []]


def test_error_states_the_memory_limit() -> None:
    """Python raises an error and the library aborts; the message is the same for both."""
    grammars = Grammars(replace(CHECKS, memory_bytes=4 << 20))
    assert grammars.check(grammar(choice=["yes", "no"])).text
    for name in ("multiples", "properties"):
        with pytest.raises(RequestError, match="more than 4 MiB of memory") as raised:
            grammars.check(grammar(**EXPLODING[name]))
        assert not isinstance(raised.value, EngineBusy)
