"""The benchmark of a turn's start: its parts, its figures, and its measurement of a server.

Covers `benchmarks/server/turns.py` and `benchmarks/server/turn_parts.py`.
"""

import asyncio
import json
import time
from pathlib import Path

import pytest

from benchmarks.numbers.page import lines_of
from benchmarks.numbers.server import SERVER
from benchmarks.result_files import read, write
from benchmarks.server import turn_parts, turns
from benchmarks.server.turn_parts import BLOCK_SIZE, PARTS, body_of, turn_of
from benchmarks.server.turns import StepTimes, Turn, read_bandwidth, row_of
from quire.tools.http_client import HttpClient, HttpError


def turn(place: str, first_ms: float, steps_ms: float, num_moved: int = 0) -> Turn:
    return Turn(place, first_ms, steps_ms, 1000, 990, num_moved)


def test_each_part_of_a_known_conversation_is_measured() -> None:
    times, sizes = turn_parts.measure("demo", 1200, 60, 2)
    assert {part: len(each) for part, each in times.parts.items()} == dict.fromkeys(PARTS, 2)
    assert times.medians().keys() == set(PARTS)
    num_prompt, num_cached = sizes["prompt_tokens"], sizes["cached_tokens"]
    text = turn_parts.text_of("demo")
    *_, messages = turn_parts.turns_of(text, 1200, 60, 3)
    assert text.tokenizer is not None
    num_new = len(text.tokenizer.encode(messages[-1]["content"], False))
    limit = num_cached + num_new + 2 * BLOCK_SIZE
    assert 900 < num_cached < num_prompt < limit, "only the new message is computed"


def test_turn_resends_the_conversation() -> None:
    known = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    body = json.loads(body_of(turn_of(known, "c"), "demo"))
    assert [each["content"] for each in body["messages"]] == ["a", "b", "c"]
    assert len(known) == 2


def test_device_turns_are_compared_with_their_own_steps() -> None:
    mine = [turn("device", 110.0, 100.0), turn("device", 209.0, 200.0)]
    row = row_of("demo", mine, 150.0, float("inf"))
    assert row["later_ms"] == [10.0, 9.0]
    assert row["limit_ms"] == turns.AIM_MS


def test_moved_blocks_raise_the_limit_only() -> None:
    row = row_of("wide", [turn("host", 260.0, 255.0, 1_000_000)], 150.0, 10e6)
    assert row["later_ms"] == [110.0]
    assert row["limit_ms"] == pytest.approx(turns.AIM_MS + 130.0)


def test_each_step_of_the_live_view_counts_once() -> None:
    steps = StepTimes(HttpClient("http://127.0.0.1:1"))
    three, four = ({"step": number, "duration_ms": 1.5} for number in (3, 4))
    steps.take({"at_s": 1.0, "steps": [three]})
    steps.take({"at_s": time.monotonic() + 60, "steps": [three, four]})
    assert steps.num_steps == 2
    assert asyncio.run(steps.since(1)) == 1.5


def test_turn_without_prefix_hit_is_an_error() -> None:
    found = {"device": [turn("device", 1.0, 1.0)], "host": [turn("host", 1.0, 1.0, 0)]}
    with pytest.raises(HttpError, match="host: 990 of 1000 tokens were cached, and 0 bytes"):
        turns._check(found, 10)
    with pytest.raises(HttpError, match="device: 990 of 1000"):
        turns._check(found, 4)


def test_bandwidth_is_measured_on_the_blocks(tmp_path: Path) -> None:
    (tmp_path / "a.kv").write_bytes(bytes(1000))
    assert read_bandwidth(tmp_path) > 0


def test_page_shows_the_rows(tmp_path: Path) -> None:
    rates = {"device": float("inf"), "host": 1e9, "directory": 1e9}
    rows = [row_of("demo", [turn(each, 110.0, 100.0)], 100.0, rates[each]) for each in rates]
    rows += [{"part": part, "cpu_ms": 0.5} for part in PARTS]
    facts = {"cpu": "x", "cores": 2, "commit": "abc1234", "date": "2026-11-30"}
    write(tmp_path / "turns.json", "server.turns", rows, {}, lambda: dict(facts))
    found = read(tmp_path / "turns.json")
    assert found.rows[0]["bytes_per_s"] is None, "the device has no bandwidth"
    tables = [table for each in SERVER.sections for table in each.tables if "turns" in table.file]
    turns_of_places, parts = (lines_of(table, found) for table in tables)
    assert turns_of_places[2] == "| demo | device | 0 | 110 ms | 100 ms | 10.0 ms | 10.0 ms |"
    assert parts[2] == "| body | 0.50 ms |" and len(parts) == len(PARTS) + 3
