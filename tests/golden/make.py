"""Records the golden runs anew: python -m tests.golden.make [NAME ...]

Only where a change of the plans is meant: the commit says which, and why. The runs are those of a
tiny model with everything in them that a plan can say (tests/engine/recordings.py), without tokens.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from quire.engine.recording import segment_paths
from tests.engine.recordings import Run

HERE = Path(__file__).parent
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


def make(name: str) -> Path:
    """Record one run; the file."""
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


if __name__ == "__main__":
    main()
