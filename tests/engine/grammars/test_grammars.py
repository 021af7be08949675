"""Each output of a request with a grammar is one that a separate matcher allows, whatever the
engine does.

The fake device chooses among the allowed tokens by all earlier tokens. So a wrong mask, or one of
another position or row, changes the output.
"""

import dataclasses
import gc
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import llguidance
import msgspec
import numpy as np
import pytest

from quire.base.errors import GRAMMAR_FAILED, ConfigError, RequestError
from quire.base.events import Event, Preempted
from quire.base.masks import MaskPromise
from quire.base.messages import Abort, GrammarReady
from quire.base.plan import Plan
from quire.base.requests.sampling_params import SamplingParams, StructuredOutputsParams
from quire.base.settings.config import config_from_flat
from quire.engine.attachments.recorder import Recorder
from quire.engine.grammars import compiler as grammar_compiler
from quire.engine.grammars.matchers import Follower, Guided
from quire.engine.observability.timeline import Timelines
from quire.engine.recording.files import read_recording
from quire.engine.start.build import build_engine
from quire.render.grammars.structured import grammar_of
from quire.tools.replay import replay_all
from tests.support.engine.guided_engine import END, TEXTS, GuidedBench, lark, text_of, vocabulary
from tests.support.engine.recorded_runs import begin_segment
from tests.support.engine.updates import code_of, error_of, reason_of
from tests.support.scheduler.fake_device import Curse, make_request

JSON = lark('%json {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}')
WORDS = lark("/[a-d]{3,20}/")
NUMBERS = lark("/[0-9]+(,[0-9]+)*/")
BUDGET = "%llguidance {}\nstart: thought /[0-9]{2,9}/\nthought[max_tokens=5]: /[a-f]*/\n"
PIPELINES = [
    (1, False),
    *(pytest.param(depth, True, marks=pytest.mark.slow) for depth in (1, 2)),
    (3, True),
]
SWAP = {"preemption_mode": "swap"}
RECOMPUTE = {"preemption_mode": "recompute"}


@pytest.mark.parametrize(("depth", "is_threaded"), PIPELINES)
def test_outputs_follow_their_grammars(depth: int, is_threaded: bool) -> None:
    """This includes parallel samples, beams, token budgets, and batches with requests without a
    grammar."""
    bench = GuidedBench(depth, is_threaded)
    for i, grammar in enumerate([JSON, WORDS, "", JSON, BUDGET, WORDS, ""]):
        bench.add(str(i), grammar, 5 + i, max_tokens=25)
    bench.add("three", NUMBERS, n=3, max_tokens=12)
    for i, grammar in enumerate([WORDS, BUDGET, JSON]):
        bench.add(f"beams {i}", grammar, n=3, max_tokens=12, use_beam_search=True)
    bench.finish()
    bench.assert_exact()
    assert bench.num_made == 1
    assert json.loads(text_of(bench.tokens["0", 0])).keys() >= {"a"}
    bench.core.close()


@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
@pytest.mark.parametrize(("depth", "is_threaded"), PIPELINES)
def test_preemption_does_not_change_outputs(
    depth: int, is_threaded: bool, mode: dict[str, Any]
) -> None:
    bench = GuidedBench(depth, is_threaded, num_blocks=14, **mode)
    events: list[Event] = []
    bench.core.subscribe(events.append)
    for i, grammar in enumerate([WORDS, NUMBERS, WORDS, "", NUMBERS]):
        bench.add(str(i), grammar, 9, max_tokens=20)
    bench.add("two", WORDS, 9, n=2, max_tokens=15)
    bench.add("beams", WORDS, 9, n=3, max_tokens=15, use_beam_search=True)
    bench.finish()
    bench.assert_exact()
    assert any(isinstance(event, Preempted) for event in events)
    bench.core.close()


@pytest.mark.parametrize(("depth", "is_threaded"), PIPELINES)
def test_failing_step_fails_only_the_guilty_request(depth: int, is_threaded: bool) -> None:
    bench = GuidedBench(depth, is_threaded)
    for i, grammar in enumerate([WORDS, NUMBERS, WORDS, "", WORDS]):
        bench.add(str(i), grammar, 6, max_tokens=20)
    bench.device.curses[1] = Curse(9, raises=True)
    bench.finish()
    assert reason_of(bench.ends["1", 0]) == "error"
    del bench.requests["1"]
    bench.assert_exact()
    bench.core.close()


@pytest.mark.parametrize(("depth", "is_threaded"), PIPELINES)
def test_engine_can_close_while_steps_wait_for_masks(depth: int, is_threaded: bool) -> None:
    bench = GuidedBench(depth, is_threaded)
    for i in range(4):
        bench.add(str(i), WORDS, max_tokens=20)
    for _ in range(5):
        bench.step()
    while bench.core.plan() is not None and bench.core.num_in_flight < depth:
        pass
    time.sleep(0.1)  # the second step waits for masks that need the first one's result
    begun = time.monotonic()
    bench.core.close()
    assert time.monotonic() - begun < 4.0
    for thread in (bench.grammars._filling, bench.grammars._compiling):
        assert thread is not None and not thread._thread.is_alive()


def test_invalid_grammar_fails_only_its_request() -> None:
    bench = GuidedBench(2, is_threaded=True)
    bench.add("bad", lark("((("))
    bench.add("good", WORDS, max_tokens=9)
    bench.finish()
    assert reason_of(bench.ends["bad", 0]) == "error"
    assert "grammar" in error_of(bench.ends["bad", 0])
    del bench.requests["bad"]
    bench.assert_exact()
    bench.core.close()


def test_grammar_that_reaches_a_limit_fails_only_its_request(monkeypatch: Any) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_LEXER_STATES", 40)
    bench = GuidedBench()
    bench.add("long", lark("/[a-d]{60}/"), max_tokens=30)
    bench.add("good", NUMBERS, max_tokens=9)
    bench.finish()
    assert reason_of(bench.ends["long", 0]) == "error"
    assert "limit max_lexer_states (" in error_of(bench.ends["long", 0])
    assert "too many states" in error_of(bench.ends["long", 0])
    assert "verbose" not in error_of(bench.ends["long", 0])
    assert 0 < len(bench.tokens["long", 0]) < 30
    assert bench.tokens["long", 0] and bench.tokens["good", 0]
    del bench.requests["long"]
    del bench.tokens["long", 0]
    bench.assert_exact()


def limit_matchers(monkeypatch: Any, limits: dict[str, int]) -> None:
    """Give all matchers these additional limits of llguidance."""
    make = llguidance.LLParserLimits
    monkeypatch.setattr(llguidance, "LLParserLimits", lambda **rest: make(**rest, **limits))


@pytest.mark.parametrize(
    ("limit", "max_value", "start"),
    [
        ("max_items_in_row", 90, 's\ns: s s s | s s | "a" | "b"'),
        ("step_max_items", 60, 's\ns: s s | "a" | "b" | "c"'),
    ],
)
def test_text_that_reaches_a_limit_is_not_matched_again(
    limit: str, max_value: int, start: str, monkeypatch: Any
) -> None:
    """Each new matcher would reach the same limit, after a time for which the step waits."""
    limit_matchers(monkeypatch, {limit: max_value})
    compiled, compile_it = [], grammar_compiler.compiled
    monkeypatch.setattr(
        grammar_compiler, "compiled", lambda *args: compiled.append(1) or compile_it(*args)
    )
    made, make = [], Guided._fresh
    monkeypatch.setattr(Guided, "_fresh", lambda guided: made.append(1) or make(guided))
    bench = GuidedBench()
    bench.add("long", lark(start), max_tokens=60, ignore_eos=True, stops=())
    bench.add("plain", "", max_tokens=9)
    bench.finish()
    assert code_of(bench.ends["long", 0]) == GRAMMAR_FAILED
    assert f"llguidance's limit {limit} (" in error_of(bench.ends["long", 0])
    assert (len(compiled), len(made)) == (1, 1)
    del bench.requests["long"]
    bench.tokens.pop(("long", 0), None)
    bench.assert_exact()


def test_limit_reached_in_a_draft_does_not_break_the_text_before_it(monkeypatch: Any) -> None:
    limit_matchers(monkeypatch, {"max_items_in_row": 30})
    request = make_request("r", [1], grammar=lark('s\ns: s s | "a"'))
    guided = Guided(request, grammar_compiler.compiled(vocabulary(), request.grammar))
    letter = TEXTS.index("a")
    follower = guided.follow(0, np.full(3, letter, np.int32))
    while follower.take(letter):
        assert len(follower.token_ids) < 60
    assert "max is 30" in follower.matcher.get_error()
    follower = guided.follow(0, np.full(4, letter, np.int32))
    assert not follower.matcher.is_error() and follower.matcher.compute_bitmask()


def test_shared_matcher_states_fail_no_request(monkeypatch: Any) -> None:
    """Copies of a matcher share its states, whose number is limited."""
    compiled, compile_it = [], grammar_compiler.compiled
    monkeypatch.setattr(grammar_compiler, "MAX_LEXER_STATES", 120)
    monkeypatch.setattr(
        grammar_compiler, "compiled", lambda *args: compiled.append(1) or compile_it(*args)
    )
    bench = GuidedBench()
    for i in range(6):
        bench.add(str(i), lark("/(a|b)*a(a|b){12}/"), max_tokens=24)
    bench.finish()
    assert len(compiled) > 1, "no request reached the limit"
    assert all(reason_of(end) != "error" for end in bench.ends.values())
    monkeypatch.undo()
    bench.assert_exact()


def test_ignore_eos_still_ends_where_nothing_else_is_allowed() -> None:
    bench = GuidedBench()
    bench.add("0", lark("/[ab]{1,7}/"), ignore_eos=True, max_tokens=20)
    bench.finish()
    assert len(text_of(bench.tokens["0", 0])) == 7
    assert bench.tokens["0", 0][-1] == END
    assert reason_of(bench.ends["0", 0]) == "stop"


def test_other_requests_run_while_a_grammar_compiles() -> None:
    """Meanwhile a request may also be aborted and its id reused, or time out."""
    bench = GuidedBench(2, is_threaded=True)
    gate = threading.Event()
    make = bench._make

    def made_late():
        assert gate.wait(60.0)
        return make()

    bench.grammars._compiler._make_vocabulary = made_late
    bench.add("waits", WORDS, max_tokens=9)
    bench.add("aborted", WORDS, max_tokens=9)
    bench.add("late", WORDS, max_tokens=9, timeout_s=5.0)
    bench.add("plain", "", max_tokens=9)
    while ("plain", 0) not in bench.ends:
        bench.step()
    assert bench.scheduler.num_running == 0
    bench.core.control(Abort("aborted"))
    bench.add("aborted", NUMBERS, max_tokens=9)
    bench.core._clock.advance(6.0)  # type: ignore[attr-defined]
    bench.step()
    assert reason_of(bench.ends["late", 0]) == "timeout"
    gate.set()
    bench.finish()
    del bench.requests["late"]
    bench.tokens.pop(("late", 0))
    bench.assert_exact()
    bench.core.close()


def test_no_matcher_is_kept_for_ended_requests() -> None:
    bench = GuidedBench()
    for i in range(40):
        bench.add(str(i), lark(f"/[a-d]{{{1 + i}}}/"), max_tokens=3)
    bench.finish()
    assert len(bench.grammars._compiler._cache) == grammar_compiler.MAX_CACHED_GRAMMARS
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) in (Guided, Follower)]


def test_panic_in_grammar_compilation_fails_only_its_request(monkeypatch: Any) -> None:
    """A Rust panic reaches Python as a BaseException. The compiling thread survives it."""

    class Panic(BaseException):
        pass

    compile_it = grammar_compiler.compiled

    def panics(vocabulary: Any, grammar: str) -> Any:
        if grammar == JSON:
            raise Panic("index out of bounds")
        return compile_it(vocabulary, grammar)

    monkeypatch.setattr(grammar_compiler, "compiled", panics)
    bench = GuidedBench(2, is_threaded=True)
    bench.add("bad", JSON)
    bench.add("good", WORDS, max_tokens=9)
    for _ in range(200):
        bench.step()
        if len(bench.ends) == 2:
            break
    assert "Panic: index out of bounds" in error_of(bench.ends["bad", 0])
    del bench.requests["bad"]
    bench.assert_exact()
    bench.core.close()


def test_model_without_grammar_support_reports_the_reason() -> None:
    bench = GuidedBench()

    def cannot():
        raise ConfigError("needs a tokenizer, which this model does not have")

    bench.grammars._compiler._make_vocabulary = cannot
    bench.add("0", WORDS)
    bench.finish()
    assert error_of(bench.ends["0", 0]) == "needs a tokenizer, which this model does not have"
    bench.core.limits = dataclasses.replace(bench.core.limits, takes_grammars=False)
    with pytest.raises(RequestError, match="structured output is disabled"):
        bench.add("1", WORDS)
    assert not bench.core.has_work


@pytest.mark.parametrize("keeps_tokens", [False, True])
def test_replay_does_not_need_llguidance(
    tmp_path: Path, keeps_tokens: bool, monkeypatch: Any
) -> None:
    """Replay starts at the beginning, and at a snapshot taken while a request waits for its
    grammar."""
    bench = GuidedBench(2, is_threaded=True)
    recorder = Recorder(bench.scheduler, tmp_path, 1 << 20, keeps_tokens)
    bench.core.attach(recorder)
    bench.add("early", WORDS, max_tokens=12)
    bench.add("bad", lark("((("))
    for _ in range(4):
        bench.step()
    bench.add("late", NUMBERS, max_tokens=12, n=2)
    begin_segment(recorder)
    bench.finish()
    bench.core.close()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    outcome = replay_all(read_recording(tmp_path))
    assert outcome.num_segments == 2
    assert outcome.difference is None and outcome.num_steps > 10


class PlanLog:
    """Collects the submitted plans with their masks."""

    def __init__(self, bench: GuidedBench) -> None:
        self.plans: list[tuple[Plan, MaskPromise | None]] = []
        submit = bench.core.executor.submit

        def seen(plan: Plan, masks: MaskPromise | None = None) -> None:
            self.plans.append((plan, masks))
            submit(plan, masks)

        bench.core.executor.submit = seen  # type: ignore[method-assign]


def test_masks_exclude_padding_and_exist_only_for_grammars() -> None:
    bench = GuidedBench()
    seen = PlanLog(bench)
    bench.add("plain", "", max_tokens=3)
    bench.finish()
    assert all(masks is None and not len(plan.masked_rows) for plan, masks in seen.plans)
    seen.plans.clear()
    bench.add("0", lark("<[*]>"), max_tokens=2)
    bench.add("plain too", "", max_tokens=5)
    bench.finish()
    masked = [(plan, masks) for plan, masks in seen.plans if masks is not None]
    assert masked and all(len(plan.masked_rows) == 1 for plan, _ in masked)
    words = masked[0][1].wait().words  # type: ignore[union-attr]
    assert words.shape == (1, 1, 2)
    assert int(words[0, 0, 1]) & ~((1 << (len(TEXTS) + 1 - 32)) - 1) == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_real_model_outputs_follow_the_schema(depth: int) -> None:
    """Run by the real executor and runner, at a high temperature, as samples and as beams. Beams
    write white space until max_tokens where the schema sets no bound."""
    engine = build_engine(config_from_flat(model="demo", pipeline_depth=depth, max_model_len=256))
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "age": {"type": "integer", "minimum": 0, "maximum": 30},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = StructuredOutputsParams(grammar="start: %json " + json.dumps(schema))
    grammar = grammar_of(form)
    ways = [
        SamplingParams(temperature=1.5, max_tokens=150, n=3, seed=1),
        SamplingParams(temperature=0.0, max_tokens=150),
        SamplingParams(temperature=0.0, max_tokens=150, n=2, use_beam_search=True),
        SamplingParams(temperature=1.5, max_tokens=150, seed=2, logprobs=2),
    ]
    prompt = engine.renderer.render("Tell me of a cat.")
    for params in ways:
        request = engine.requests.make(prompt, params)
        engine.client.add(msgspec.structs.replace(request, grammar=grammar))
    answers = []
    while engine.client.num_unfinished:
        answers += [output for output in engine.client.step() if output.finished]
    found = [each.text for output in answers for each in output.outputs]
    assert len(found) == 7
    for text in found:
        assert json.loads(text).keys() == {"name", "age"}, text
    engine.client.close()


def test_timeline_reports_the_wait_for_a_grammar() -> None:
    bench = GuidedBench()
    lines = Timelines.of(bench.core.view(), bench.core.requests())
    bench.core.subscribe(lines)
    bench.add("0", WORDS, max_tokens=3)
    bench.core.publish()
    assert "is still waiting for its grammar" in lines.text("0")
    bench.finish()
    timeline = json.loads(lines.text("0"))
    assert timeline["grammar_ms"] is not None
    assert "the first 0.0 ms for its grammar" in " ".join(timeline["in_words"])


def test_late_or_unexpected_grammar_ready_messages_are_ignored() -> None:
    bench = GuidedBench()
    bench.core.control(GrammarReady("nobody"))
    bench.core.control(GrammarReady("nobody", "bad"))
    bench.add("plain", "", max_tokens=3)
    bench.core.control(GrammarReady("plain", "not its own"))
    bench.finish()
    bench.assert_exact()
    assert vocabulary().num_tokens == END + 1
