"""The code blocks of README.md and docs run unchanged, with the demo model.

A page's programs and commands run in one folder, in the order of the page. `127.0.0.1:8000` stands
for a server that this module starts, and `path/to/model` for the demo model. Marks say which blocks
do not run (tests/support/code_blocks.py).
"""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.cli.main import _parse
from tests.support.code_blocks import (
    PARSED,
    ROOT,
    SHELL,
    Block,
    blocks_of,
    has_operator,
    pages,
    read,
)
from tests.support.processes.forks import ForkedPopen
from tests.support.processes.servers import Server

ADDRESS = re.compile(r"(127\.0\.0\.1|localhost):8000")
WAIT_S = 120.0
DOES_NOT_FIT = (
    "does not fit this machine"  # a possible answer of `quire fit`, depending on the free memory
)
DEMO = ROOT / "src" / "quire" / "demo"


def values_of_json(text: str) -> list[Any]:
    """Parse one value, or a value in each line."""
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines()]


PARSERS: dict[str, Callable[[str], Any]] = {
    "yaml": yaml.safe_load,
    "json": values_of_json,
    "toml": tomllib.loads,
}


def of_each_page(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("page", pages(), ids=name_of)(test)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


class Address:
    """The address of one server for all pages, which starts when a block first needs it."""

    def __init__(self) -> None:
        self.server: Server | None = None

    def put_into(self, text: str) -> str:
        if not ADDRESS.search(text):
            return text
        self.server = self.server or Server()
        return ADDRESS.sub(f"127.0.0.1:{self.server.port}", text)


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    address = Address()
    yield address
    if address.server is not None:
        address.server.stop()


@of_each_page
def test_each_block_runs_or_has_a_reason(page: Path) -> None:
    assert not {block.name: block.problem for block in blocks_of(page) if block.problem}


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_blocks_are_well_formed(page: Path) -> None:
    """This includes blocks that do not run: programs compile, data parses, and flags exist."""
    for block in blocks_of(page):
        if block.language == "python":
            compile(block.text, block.name, "exec")
        elif block.language in PARSED:
            PARSERS[block.language](block.text)
        elif block.language in SHELL:
            for words in quire_commands(block):
                parse(block, words[1:])


def parse(block: Block, words: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("argparse.ArgumentParser.print_usage", lambda *_: None)
        try:
            _parse(words)
        except SystemExit as end:
            if end.code:
                pytest.fail(f"{block.name}: quire {shlex.join(words)} is refused")


def quire_commands(block: Block) -> Iterator[list[str]]:
    """Yield the complete commands of quire."""
    for words in block.commands:
        is_whole = not has_operator(words) and "..." not in "".join(words)
        if is_whole and words[0] in ("quire", ".venv/bin/quire"):
            yield words


@of_each_page
def test_blocks_of_a_page_run(page: Path, tmp_path: Path, address: Address) -> None:
    run_page(page, tmp_path, address, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in pages() if any(b.is_slow for b in blocks_of(p))], ids=name_of
)
def test_slow_blocks_of_a_page_run(page: Path, tmp_path: Path, address: Address) -> None:
    run_page(page, tmp_path, address, slow=True)


def run_page(page: Path, folder: Path, address: Address, slow: bool) -> None:
    for block in blocks_of(page):
        text = block.text.replace("path/to/model", str(DEMO))
        if block.file:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(text, "utf-8")
        elif block.reason or (block.is_slow and not slow):
            continue
        elif block.language == "python":
            check(block, folder, [sys.executable, "-c", address.put_into(text)])
        elif block.language in SHELL:
            block = Block(block.page, block.line, block.language, address.put_into(text))
            for words in block.commands:
                run_command(block, folder, words)


def run_command(block: Block, folder: Path, words: list[str]) -> None:
    if has_operator(words):
        command = " ".join(w if has_operator([w]) else shlex.quote(w) for w in words)
        check(block, folder, ["bash", "-c", command])
    elif words[0] == "curl":
        check(block, folder, ["curl", "--fail-with-body", *words[1:]])
    elif words[1] == "serve" and "--help" not in words:
        Server(*without_port(words[2:])).stop()
    else:
        check(block, folder, [sys.executable, "-m", "quire.cli.main", *words[1:]])


def without_port(words: list[str]) -> list[str]:
    """Drop `--port NUMBER`, since a test's server picks a free port."""
    at = words.index("--port") if "--port" in words else len(words)
    return words[:at] + words[at + 2 :]


def check(block: Block, folder: Path, command: list[str]) -> None:
    """Run a command to its end; fail with its output unless it succeeds."""
    with ForkedPopen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    is_right = process.returncode == 0 or DOES_NOT_FIT in output
    assert is_right, f"{block.name}: {shlex.join(command)}\n{output}"


def test_marks_and_problems_of_blocks_are_read() -> None:
    text = """
```
output
```
<!-- not run: output -->
```
output
```
<!-- not run: no time -->
```sh
sleep 9
```
<!-- not run: needs anthropic -->
```python
import anthropic
```
```sh
quire doctor   # a comment; with signs
pip install quire
```
<!-- file: a/b.yaml -->
```yaml
model: demo
```
```sh
curl -s http://127.0.0.1:8000/health \\
    -o out.txt
```
"""
    blocks = list(read("page.md", text))
    assert [block.line for block in blocks] == [2, 6, 10, 14, 17, 22, 25]
    assert ["mark" in block.problem for block in blocks] == [
        True, False, False, False, True, False, False
    ]  # fmt: skip
    assert "'no time' is no reason" in blocks[2].problem
    assert [block.file for block in blocks if block.file] == ["a/b.yaml"]
    assert blocks[4].commands == [["quire", "doctor"], ["pip", "install", "quire"]]
    assert blocks[4].is_slow and not blocks[6].is_slow
    assert blocks[6].commands == [["curl", "-s", "http://127.0.0.1:8000/health", "-o", "out.txt"]]


def test_failing_block_is_reported(tmp_path: Path) -> None:
    block = Block("page.md", 1, "sh", "quire generate --nonsense\n")
    with pytest.raises(pytest.fail.Exception, match="page.md:1: quire generate --nonsense is"):
        parse(block, next(quire_commands(block))[1:])
    with pytest.raises(AssertionError, match=r"(?s)page\.md:1.*there is no option --nonsense"):
        run_command(block, tmp_path, block.commands[0])
