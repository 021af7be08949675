"""The benchmark of draft tokens: a small run with quire, valid runs, and the fastest engine."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.cpu.draft_report import Answered, fastest, summary, table
from benchmarks.cpu.drivers import draft_quire
from benchmarks.cpu.drivers.drafting import PLAIN, Job, race
from benchmarks.cpu.engines import FLOAT16, LLAMA, Engine
from benchmarks.cpu.repeating import PERIOD, cycle, write_repeating
from benchmarks.cpu.requests import TASKS, requests_of
from benchmarks.cpu.workloads import Shape
from quire.engine.drafting.draft_pace import StepTimes

SMALL = Shape("small", "qwen3", 128, 2, 4, 2, 32, 256, 1500)
REPEATED = next(task for task in TASKS if task.name == "repeated")
OURS = Engine("ours", "16-bit", "", FLOAT16)
PEER = Engine("peer", "16-bit", "", FLOAT16, LLAMA)


def test_repeating_text_is_drafted_and_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)  # drafts do not depend on times
    model = write_repeating(SMALL, tmp_path / "small")
    requests = requests_of(REPEATED, 1, num_tokens=2 * PERIOD)
    options = {"dtype": "bfloat16"}
    with draft_quire.answerers(Job(model, requests, [4], 1, 0, options)) as answerers:
        lines: list[Any] = list(race(Job(Path(), requests, [4], 1, 0, {}), answerers))
    found = {line["variant"]: line for line in lines}
    start = cycle(1).index(requests[1].prompt[-1]) + 1
    for line in found.values():
        assert line["token_ids"] == (cycle(1) * 4)[start : start + 2 * PERIOD]
    assert list(found) == [PLAIN, "ngram 4", "ngram of 2-4, 4", "suffix 24"]
    assert found[PLAIN]["metrics"]["num_tried"] == 0
    for name in list(found)[1:]:
        assert found[name]["metrics"]["num_right"] > PERIOD


def answered(engine: str, variant: str, seconds: float, token: int = 1) -> Answered:
    metrics = {"num_timed": 10, "seconds": seconds, "num_tried": 8, "num_right": 6}
    return Answered(engine, "copying", 0, variant, 0, metrics, [token], 0.0)


def test_drafts_that_change_an_answer_do_not_count() -> None:
    runs = [answered("peer", PLAIN, 1.0), answered("peer", "lookup 4", 0.1, token=2)]
    runs += [answered("ours", PLAIN, 1.0), answered("ours", "ngram 4", 0.5)]
    summaries = summary(runs, [OURS, PEER], TASKS)
    assert summaries["copying"]["peer"]["lookup 4"]["num_same"] == 0
    assert fastest(summaries["copying"]["peer"]) == (PLAIN, 10.0)
    lines = table(summaries, [OURS, PEER], TASKS)
    assert "  ours (ngram 4) / best peer (peer, plain): 2.00x" in lines
    assert [line for line in lines if line.endswith("aim 2.0: met")]
