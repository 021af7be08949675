"""The benchmark of reuse under sessions of agents: its figures, and a short run with a server.

Covers `benchmarks/server/reuse.py`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.numbers.page import lines_of
from benchmarks.numbers.server import SERVER
from benchmarks.result_files import read, write
from benchmarks.server import reuse
from benchmarks.server.reuse import MODELS, command_of, figures, row_of

FACTS = {"cpu": "x", "cores": 2, "date": "2026-11-30T00:00:00+00:00", "commit": "abc"}


def report(*turns: tuple[int, int]) -> dict[str, Any]:
    """Return a report with turns of these reusable and cached tokens."""
    return {
        "turns": [{"reusable_tokens": able, "cached_tokens": cached} for able, cached in turns],
        "num_subagents": 1,
        "reuse": 0.9,
        "reusable_tokens": sum(able for able, _ in turns),
        "cached_tokens_by_tier": {"device": 30, "store": 10},
        "recomputed_tokens_by_reason": {"evicted": 4},
        "ttft_ms": {"p50": 20.0, "p99": 50.0},
        "duration_s": 3.0,
    }


def test_recomputed_tokens_are_split_at_one_block() -> None:
    found = figures(report((20, 5), (40, 24), (10, 11)))
    assert found["recomputed_tokens"] == 31
    assert found["recomputed.in_block"] == 15 and found["recomputed.more"] == 16
    assert found["turns_with_lost_blocks"] == 1
    assert (found["recomputed.evicted"], found["recomputed.costly"]) == (4, 0)
    places = [found[f"from.{place}"] for place in ("device", "host", "directory")]
    assert places == [0.75, 0.0, 0.25]


def test_page_shows_the_median_round(tmp_path: Path) -> None:
    rounds = [figures(report((20 + num, 15))) for num in (1, 2, 9)]
    rows = [row_of(model, rounds) for model in MODELS]
    write(tmp_path / "reuse.json", "server.reuse", rows, {}, lambda: dict(FACTS))
    [table] = [
        table
        for section in SERVER.sections
        for table in section.tables
        if table.file.endswith("/reuse.json")
    ]
    lines = lines_of(table, read(tmp_path / "reuse.json"))
    assert lines[2].startswith("| demo | 90.00% | 7 tokens | 7 | 4 | 0 | 75% | 0% | 25% | 20 ms |")
    assert len(lines) == 2 + len(MODELS) + 1


def test_hybrid_model_is_written(tmp_path: Path) -> None:
    command = command_of(MODELS[1], 1, tmp_path)
    assert json.loads((tmp_path / "hybrid" / "config.json").read_text("utf-8")) == reuse.HYBRID
    assert str(tmp_path / "hybrid") in command and "dummy" in command


@pytest.mark.slow
def test_short_run_reuses_most_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "reuse.json"
    line = "reuse --rounds 1 --models demo --sessions 2 --scale 0.001 --speed inf --output-json"
    monkeypatch.setattr(sys, "argv", [*line.split(), str(path)])
    reuse.main()
    [row] = read(path).rows
    assert row["model"] == "demo" and row["reuse"][0] > 0.9
