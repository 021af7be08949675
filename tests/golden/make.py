"""Records the golden runs again: python -m tests.golden.make [NAME ...]

Only for a change that is meant to change plans; the commit says which, and why. The runs use a tiny
model and every field of a plan, without tokens (tests/support/engine/recorded_runs.py).
"""

import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from quire.engine.recording.files import read_segment, segment_paths
from tests.support.engine.recorded_runs import Run

HERE = Path(__file__).parent
CONTENTS = HERE / "contents.txt"
FORM = ("format", "previous")  # of a header: they say how a file is made, not what it holds
RUNS: dict[str, dict[str, Any]] = {
    "fifo-recompute-1": {"preemption_mode": "recompute", "pipeline_depth": 1},
    "fifo-swap-1": {"preemption_mode": "swap", "pipeline_depth": 1},
    "fifo-recompute-2": {"preemption_mode": "recompute", "pipeline_depth": 2},
    "fifo-swap-2": {"preemption_mode": "swap", "pipeline_depth": 2},
    "fifo-uncached-3": {"enable_prefix_caching": False, "pipeline_depth": 3},
    "srtf-recompute-2": {"scheduling_policy": "srtf", "pipeline_depth": 2},
    "srtf-swap-1": {"scheduling_policy": "srtf", "preemption_mode": "swap"},
    "two-level-recompute-1": {"scheduling_policy": "two-level"},
    "two-level-swap-2": {
        "scheduling_policy": "two-level",
        "preemption_mode": "swap",
        "pipeline_depth": 2,
    },
}


def golden_paths() -> list[Path]:
    return sorted(HERE.glob("*.rec"))


def contents(path: Path) -> str:
    """Return a digest of the contents of a golden run: header, snapshot, and calls with results and
    plans. It does not depend on the format of the file."""
    segment = read_segment(path)
    header = {key: value for key, value in segment.header.items() if key not in FORM}
    data = hashlib.sha256()
    data.update(msgspec.msgpack.encode([header, segment.snapshot, segment.items]))
    return data.hexdigest()


def make(name: str) -> Path:
    """Record one run. Return the path of its file."""
    with tempfile.TemporaryDirectory() as directory:
        run = Run(Path(directory), **({"scheduling_policy": "fifo"} | RUNS[name]))
        run.everything()
        [segment] = segment_paths(Path(directory))
        path = HERE / f"{name}.rec"
        path.write_bytes(segment.read_bytes())
    return path


def main() -> None:
    for name in sys.argv[1:] or RUNS:
        path = make(name)
        print(f"{path.name}: {path.stat().st_size:,} bytes")
    lines = [f"{contents(path)} {path.stem}\n" for path in golden_paths()]
    CONTENTS.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
