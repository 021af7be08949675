"""The README's programs run as they stand there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = [text for text in BLOCK.findall(README.read_text("utf-8")) if "from quire " in text]


def test_there_is_one_of_each_engine() -> None:
    assert ["AsyncLLM" in program for program in PROGRAMS] == [False, True]


@pytest.mark.parametrize("program", PROGRAMS, ids=["LLM", "AsyncLLM"])
def test_it_runs(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
