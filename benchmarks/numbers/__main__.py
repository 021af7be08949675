"""Write the pages of numbers in docs/results from the files of benchmarks/results.

python -m benchmarks.numbers
"""

from pathlib import Path

from benchmarks.numbers.catalogue import HIGHLIGHTS, PAGES
from benchmarks.numbers.page import pages_of
from benchmarks.result_files import read_all

FOLDER = Path(__file__).parents[2] / "docs" / "results"


def main() -> None:
    for name, text in pages_of(PAGES, HIGHLIGHTS, read_all()).items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
