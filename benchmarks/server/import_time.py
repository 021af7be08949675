"""Time to import quire, and from the start of Python to the demo model's first token.

    python -m benchmarks.server.import_time

Each in fresh interpreters, alternating with bare ones that do nothing, whose time is the limit.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.result_files import options_of, write
from quire.models.checkpoint.source import resolve_model
from quire.tools.report import benchmark_parser, print_head

AIM_MS = 50
NEEDED = ("config.json", "model.safetensors", "tokenizer.json")
FIRST_TOKEN = """
from quire import LLM, SamplingParams
with LLM("demo", disable_log_stats=True) as llm:
    llm.generate("Once upon a time", SamplingParams(max_tokens=1), use_tqdm=False)
"""


def run_ms(code: str) -> float:
    """Return the milliseconds that a fresh interpreter takes for this code."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return (time.perf_counter() - began) * 1e3


def medians_ms(codes: list[str], rounds: int) -> list[float]:
    """Return the median of each code, in alternating rounds. A first round fills the file caches
    and does not count."""
    times = [[run_ms(code) for code in codes] for _ in range(rounds + 1)][1:]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def demo_is_complete() -> bool:
    directory: Path = resolve_model("demo").directory
    return all((directory / name).exists() for name in NEEDED)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    print_head(f"start-up, medians of {options.rounds} fresh interpreters")
    bare, quire, torch = medians_ms(["pass", "import quire", "import torch"], options.rounds)
    print(
        f"import quire: {quire - bare:.1f} ms (aim {AIM_MS}) on top of the bare interpreter's"
        f" {bare:.1f}"
    )
    results = {"bare_ms": bare, "import_quire_ms": quire - bare, "import_torch_ms": torch - bare}
    if demo_is_complete():
        (first,) = medians_ms([FIRST_TOKEN], max(1, options.rounds // 2))
        results["first_token_ms"] = first
        print(
            f"first token of the demo model: {first:,.0f} ms, of which {torch - bare:,.0f} are"
            " import torch"
        )
    else:
        print("first token of the demo model: not measured, its files are not complete")
    write(options.output_json, "server.import_time", [results], options_of(options))


if __name__ == "__main__":
    main()
