"""Write docs/results/numbers.md from the files of benchmarks/results.

python -m benchmarks.numbers
"""

from pathlib import Path

from benchmarks.numbers.catalogue import PARTS
from benchmarks.numbers.page import generated, updated
from benchmarks.result_files import read_all

PAGE = Path(__file__).parents[2] / "docs" / "results" / "numbers.md"


def main() -> None:
    text = updated(PAGE.read_text(encoding="utf-8"), generated(PARTS, read_all()))
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
