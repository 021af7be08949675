"""Traces follow the Chrome trace event format, and show each step and each row's sequences."""

import json
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.engine.recording.files import read_recording
from quire.tools.replay import replay_all
from quire.tools.replay_model import replay_with_model
from quire.tools.trace import ROWS, STEPS, WAITING, write_trace
from tests.support.engine.recorded_runs import Run, begin_segment

NEEDED = {
    "M": {"name", "pid", "args"},
    "X": {"name", "pid", "tid", "ts", "dur"},
    "C": {"name", "pid", "ts", "args"},
    "b": {"name", "cat", "id", "pid", "tid", "ts"},
    "e": {"name", "cat", "id", "pid", "tid", "ts"},
    "i": {"name", "pid", "tid", "ts", "s"},
}


@pytest.mark.parametrize("cut", [pytest.param(False, marks=pytest.mark.slow), True])
def test_trace_shows_steps_rows_and_requests(tmp_path: Path, cut: bool) -> None:
    """A trace may cover several segments, the second of which begins within requests."""
    run = Run(tmp_path / "run", preemption_mode="swap", pipeline_depth=2)
    run.ask("early", list(range(20)), 40)
    if cut:
        run.step(5)
        begin_segment(run.recorder)
    run.everything()
    num = write_trace(tmp_path / "run", tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(events) == num
    for event in events:
        assert NEEDED[event["ph"]] <= event.keys(), event
        assert isinstance(event["ts"], int) and event["ts"] >= 0
        assert event.get("dur", 0) >= 0
        assert event["pid"] in (STEPS, ROWS, WAITING) and isinstance(event["tid"], int)
    steps = [e for e in events if e["ph"] == "X" and e["pid"] == STEPS]
    assert len(steps) == replay_all(read_recording(tmp_path / "run")).num_steps
    assert [e["args"]["step"] for e in steps] == list(range(len(steps)))
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in steps]
    assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False))
    assert sum(e["name"] in ("running", "waiting", "free blocks") for e in events) == 3 * len(steps)
    begun = {e["name"] for e in events if e["ph"] == "b"}
    assert begun == {request.request_id for request in run.requests}
    assert sum(e["ph"] == "b" for e in events) == sum(e["ph"] == "e" for e in events)
    holders = {e["name"] for e in events if e["ph"] == "X" and e["pid"] == ROWS}
    assert begun - holders <= {"too late", "aborted"}  # ended while they waited
    assert any("swap_out of" in e["name"] for e in events if e["ph"] == "i")


def test_steps_with_drafts_are_not_shown_as_chunks(tmp_path: Path) -> None:
    """A replay with the model compares the accepted draft tokens as well."""
    drafts = {"method": "ngram", "prompt_lookup_max": 1}
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, allowed_token_ids=[40])
    with LLM(
        "demo", max_model_len=96, dtype="float32", disable_log_stats=True,
        kv_cache_memory_bytes=8 << 20, record=str(tmp_path / "run"), record_tokens=True,
        speculative_config=drafts,
    ) as llm:  # fmt: skip
        llm.generate(["one two, one two"], params, use_tqdm=False)
    write_trace(tmp_path / "run", tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = [event["name"] for event in events if event["ph"] == "X" and event["pid"] == ROWS]
    assert sum(name.startswith("chunk of") for name in rows) == 1
    assert "decode with 4 guesses" in rows
    outcome = replay_with_model(read_recording(tmp_path / "run"), {})
    assert outcome.difference is None
    assert outcome.notes == ["30 sampled tokens are identical"]
