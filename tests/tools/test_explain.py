"""`quire explain` of a beam search agrees with the client's view. It compares the end of the best
result, the number of results, their total length, and their arrival."""

from pathlib import Path

import pytest

from quire.base.messages import Abort
from quire.engine.observability.timeline import Timeline, as_data, in_words
from quire.engine.recording.files import read_recording
from quire.tools.explain import timelines_of
from tests.support.cases import in_turn
from tests.support.engine.failing_core import prompt
from tests.support.engine.recorded_runs import Run
from tests.support.engine.updates import reason_of


def line_of(directory: Path, request_id: str) -> Timeline:
    timelines, outcome = timelines_of(read_recording(directory))
    assert not outcome.notes
    [line] = timelines.find(request_id)
    return line


@pytest.mark.parametrize(
    ("stops", "more"),
    in_turn(
        [(), tuple(range(3, 9)), tuple(range(0, 60, 2))],
        [{}, {"n": 1, "beam_width": 3}, {"early_stopping": True}],
    ),
)
def test_beam_search_agrees_with_the_client(
    tmp_path: Path, stops: tuple[int, ...], more: dict[str, object]
) -> None:
    run = Run(tmp_path, pipeline_depth=2)
    params = {"use_beam_search": True, "n": 3, "temperature": 0} | more
    run.ask("beams", prompt(3, 7), 9, stops, **params)
    run.ask("other", prompt(4, 7), 30)
    best = None
    while best is None:
        run.clock.advance(0.001)
        for output in run.core.step().details:
            best = output if output.request_id == "beams" and output.beams else best
    finished_s = run.clock.now()
    run.finish()
    assert best.beams is not None
    line = line_of(tmp_path, "beams")
    lengths = [len(beam.token_ids) for beam in best.beams]
    reason = reason_of(best)
    assert line.reason == reason == best.beams[0].finish.reason
    assert (line.num_output_tokens, line.num_sequences) == (sum(lengths), len(best.beams))
    assert len(best.beams) == params["n"]
    assert line.first_token_s == line.finished_s == pytest.approx(finished_s)
    assert as_data(line, 4)["output_tokens"] == sum(lengths)
    assert f"({reason}) with {sum(lengths)} output token" in in_words(line, 4)[-1]
    if not stops:
        assert (line.reason, lengths) == ("length", [9] * params["n"])
    if len(stops) == 30:
        assert line.reason == "stop" and min(lengths) < 9


def test_aborted_beam_search_has_no_tokens(tmp_path: Path) -> None:
    """Its client received no token."""
    run = Run(tmp_path)
    run.ask("beams", prompt(3, 7), 20, use_beam_search=True, n=3, temperature=0)
    run.step(6)
    run.core.control(Abort("beams"))
    run.finish()
    line = line_of(tmp_path, "beams")
    assert (line.reason, line.num_output_tokens) == ("abort", 0)
    assert not any("first token" in words for words in in_words(line, 4))


def test_sampled_requests_report_all_tokens(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.ask("three", prompt(3, 7), 6, n=3)
    run.finish()
    line = line_of(tmp_path, "three")
    assert (line.reason, line.num_output_tokens, line.num_sequences) == ("length", 18, 3)
    assert line.first_token_s < line.finished_s
