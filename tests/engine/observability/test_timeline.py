"""Timelines are built from events alone, described in plain words, and bounded.

Covers `base/events.py`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.events import Admitted, Finished, Planned, Preempted, Queued, Stepped
from quire.base.plan import Plan
from quire.engine.observability.timeline import MAX_ITEMS, Timelines, as_data, in_words
from tests.support.engine.failing_core import prompt
from tests.support.engine.recorded_runs import Run

BLOCK = 4


class Story:
    """Feeds events made by hand. Each step computes a given number of tokens per row."""

    def __init__(self, **options: Any) -> None:
        self.lines = Timelines(8, BLOCK, **options)
        self.step_id = 0

    def send(self, *events: Any) -> None:
        for event in events:
            self.lines(event)

    def step(self, at_s: float, tokens: dict[int, int], samples: tuple[int, ...] = ()) -> None:
        rows = np.array(list(tokens), np.int32)
        num_tokens = np.array(list(tokens.values()), np.int32)
        sample_rows = np.array(samples, np.int32)
        plan = Plan(self.step_id, rows, num_tokens, np.zeros_like(rows), sample_rows)
        total = int(num_tokens.sum())
        self.send(Planned(at_s, self.step_id, len(rows), total, plan))
        self.send(Stepped(at_s + 0.01, self.step_id, sample_rows, total, 0.01))
        self.step_id += 1


def test_timeline_of_a_request_describes_each_phase() -> None:
    """The example of the documents: queueing, a prefix hit, chunks, preemptions, the end."""
    story = Story()
    story.send(Queued(0.0, "long", 3000), Admitted(0.0, "long", 0, 0))
    story.send(Queued(1.0, "mine", 100, 30, 0.995), Queued(1.0, "other", 5))
    story.step(1.01, {0: 2000})
    story.step(1.05, {0: 1000}, (0,))
    story.send(Admitted(1.12, "mine", 1, 60))
    story.step(1.12, {0: 1, 1: 24}, (0,))
    story.step(1.15, {0: 1, 1: 16}, (0, 1))
    story.step(1.18, {0: 1, 1: 1}, (0, 1))
    story.send(Preempted(1.2, "mine", "long", 0, swapped=True))
    story.send(Admitted(1.3, "mine", 2, 101))
    story.step(1.3, {2: 1}, (2,))
    story.send(Preempted(1.4, "mine", "other", 102))
    story.send(Admitted(1.5, "mine", 1, 60))
    story.step(1.5, {1: 42}, (1,))
    story.send(Finished(2.0, "mine", "stop", 20))
    [line] = story.lines.find("mine")
    assert in_words(line, BLOCK) == [
        "100 prompt tokens, at most 30 out",
        "waited 120 ms behind 1 long prompt (3,000 tokens of them were computed in the meantime)",
        "prefix hit 60 %, diverged at token 60",
        "the prompt was computed in 2 chunks (40 tokens within 30 ms)",
        "first token after 165 ms",
        "preempted at 205 ms, by long, swapped; back after 100 ms (the first of 2)",
        "preempted at 405 ms, by other, 102 tokens dropped; back after 100 ms; computed again in 1"
        " chunk (42 tokens)",
        "ended after 1,005 ms (stop) with 20 output tokens",
    ]
    data = as_data(line, BLOCK)
    assert data["behind"]["prompts"] == [{"id": "long", "prompt_tokens": 3000, "tokens": 3000}]
    assert [preemption["way"] for preemption in data["preemptions"]] == ["swapped", "recomputed"]
    assert data["first_token_ms"] == 165.0 and data["finish_reason"] == "stop"
    json.dumps(data, allow_nan=False)


def test_timeline_state_follows_the_events() -> None:
    story = Story()
    story.send(Queued(0.0, "r", 9))
    [line] = story.lines.find("r")
    assert (line.state, in_words(line, BLOCK)[-1]) == ("waiting", "is still waiting")
    story.send(Admitted(0.1, "r", 0, 8))
    assert line.state == "running"
    assert "prefix hit 89 %: all whole blocks of the prompt" in in_words(line, BLOCK)
    story.send(Preempted(0.2, "r", "x", 8))
    assert line.state == "preempted"
    assert in_words(line, BLOCK)[-1] == "is preempted"
    story.send(Finished(0.3, "r", "abort", 0))
    assert line.state == "finished"
    assert "never back" in in_words(line, BLOCK)[-2]
    story.send(Queued(0.0, "gone", 9), Finished(0.5, "gone", "timeout", 0))
    [gone] = story.lines.find("gone")
    assert "never left the queue" in in_words(gone, BLOCK)
    assert story.lines.find("nobody") == [] == story.lines.find("")


def test_timelines_are_bounded() -> None:
    story = Story(max_ended=10)
    for i in range(50):
        story.send(Queued(i, f"r{i}", 9), Admitted(i, f"r{i}", i % 8, 0))
        story.step(i + 0.1, {i % 8: 9}, (i % 8,))
        story.send(Finished(i + 0.5, f"r{i}", "stop", 1))
    assert list(story.lines.ended) == [f"r{i}" for i in range(40, 50)]
    assert not story.lines.open and not story.lines._filling and not story.lines._due
    story.send(Queued(99, "r", 10_000), Admitted(99, "r", 0, 0))
    for i in range(500):
        story.step(100 + i, {0: 10})
    for i in range(100):
        story.send(Preempted(700 + i, "r", "x", 5), Admitted(700.5 + i, "r", 1, 0))
    [line] = story.lines.find("r")
    assert (line.chunks.num, len(line.chunks.each)) == (500, MAX_ITEMS)
    assert (line.num_preemptions, len(line.preemptions)) == (100, MAX_ITEMS)
    assert line.preemptions[-1].at_s == 799


def test_request_id_finds_all_prompts_of_one_response() -> None:
    story = Story()
    story.send(Queued(0.0, "cmpl-1-0", 9), Queued(0.0, "cmpl-1-1", 9), Queued(0.0, "cmpl-11-0", 9))
    assert [line.request_id for line in story.lines.find("cmpl-1")] == ["cmpl-1-0", "cmpl-1-1"]


def test_timeline_text_hides_other_requests_and_tenants() -> None:
    story = Story()
    story.send(Queued(0.0, "secret-id", 3000), Admitted(0.0, "secret-id", 0, 0))
    story.send(Queued(0.0, "mine", 9, tenant="key 1"))
    story.step(0.1, {0: 3000}, (0,))
    story.send(Admitted(0.2, "mine", 1, 0), Preempted(0.3, "mine", "secret-id", 9))
    text = story.lines.text("mine")
    assert "secret-id" not in text and "by another request" in text
    assert "key 1" not in text
    assert story.lines.text("mine", "key 1") == text
    assert story.lines.text("mine", "key 2") == ""
    assert story.lines.text("secret-id", "key 1") == ""
    assert story.lines.text("nobody") == ""


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_timelines_match_a_real_run(tmp_path: Path, mode: str) -> None:
    """Chunks, hits and preemptions match the core's plans, and every request has an end."""
    run = Run(tmp_path, preemption_mode=mode)
    lines = Timelines.of(run.core.view(), run.core.requests())
    run.core.subscribe(lines)
    run.ask("chunked", prompt(60, 50), 2)
    run.everything()
    assert len(lines.ended) == len(run.requests) and not lines.open
    chunked = lines.ended["chunked"]
    assert (chunked.chunks.num, chunked.chunks.num_tokens) == (3, 50)
    hits = [line for line in lines.ended.values() if line.num_cached_tokens]
    for line in hits:
        rest = line.num_prompt_tokens - line.num_cached_tokens
        if not line.num_preemptions:
            assert line.chunks.num_tokens == rest
    assert len(hits) > 2
    preempted = [preemption for line in lines.ended.values() for preemption in line.preemptions]
    assert preempted and all(preemption.is_swapped == (mode == "swap") for preemption in preempted)
    assert lines.ended["three"].num_sequences == 3
    assert not lines._filling and not lines._due
