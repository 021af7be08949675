"""Run `quire bench throughput` and write its figures in the form of all results.

python -m benchmarks.server.throughput --rounds 3 --output-json throughput.json
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.result_files import columns, options_of, write
from quire.tools.report import benchmark_parser


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="shape:qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "throughput.json"
        command = [
            sys.executable,
            "-m",
            "quire.cli.main",
            "bench",
            "throughput",
            "--model",
            options.model,
        ]
        command += ["--rounds", str(options.rounds), "--output-json", str(path)]
        subprocess.run(command, check=True)
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    facts = found.pop("machine")
    row = {**found, "steps": columns(found["steps"])}
    write(options.output_json, "server.throughput", [row], options_of(options), lambda: facts)


if __name__ == "__main__":
    main()
