"""Bodies of the largest permitted size cost little more than docs/operate/load.md says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_worst_bodies_have_bounded_costs(tmp_path: Path) -> None:
    """The limits are generous, since the machine may be busy. Unbounded work took 28 s and 800
    times the memory."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks.server.worst_bodies", "--output-json", str(report)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1200, stdout=subprocess.DEVNULL)
    rows = json.loads(report.read_text())["rows"]
    assert len(rows) > 60
    for row in rows:
        assert row["cpu_s"] < 2 and row["memory"] < 7, row
        assert row["status"] in (400, 413, 1000, 1008), row
