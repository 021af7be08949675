"""Find the fenced code blocks of the documents, and say what each one is.

A comment on the line before the fence marks a block:

    <!-- not run: REASON -->     the test does not run the block; REASONS lists the reasons
    <!-- file: NAME -->          the test writes the block into a file that later blocks use

The blocks of a page share one folder and run in the order of the page.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"(?P<before>^[^\n]*\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
MARK = re.compile(r"<!-- (not run|file): (.+?) -->\n")
# A server or a device that a test does not have, a command that installs packages, a piece that
# needs the code around it, or text that a program printed.
REASONS = {"gpu", "cluster", "install", "fragment", "output"}
PACKAGE = re.compile(r"needs [\w-]+")  # a package that the tests do not install
SHELL = {"sh", "bash"}
PARSED = {"yaml", "json", "toml"}
PROGRAMS = {"quire", ".venv/bin/quire", "curl"}
OPERATOR = re.compile(r"[|&;<>()]+")
# Commands that serve until they are stopped, or compute for seconds.
SLOW = {"serve", "bench", "simulate", "verify", "port", "doctor", "fit"}


@dataclass(frozen=True)
class Block:
    """One fenced block. line: of its fence, from 1."""

    page: str
    line: int
    language: str
    text: str
    reason: str = ""  # why no test runs it
    file: str = ""  # the name under which later blocks find its text

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def problem(self) -> str:
        """What keeps the test from running this block; empty if nothing does."""
        if self.reason:
            known = self.reason in REASONS or PACKAGE.fullmatch(self.reason)
            return "" if known else f"{self.reason!r} is no reason; {sorted(REASONS)} are"
        if self.file or self.language in PARSED or self.language == "python":
            return ""
        if self.language not in SHELL:
            return "a block without a language that can run needs a mark"
        other = {command[0] for command in self.commands if command[0] not in PROGRAMS}
        return f"{sorted(other)} cannot run; mark the block" if other else ""

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command of a shell block."""
        found, text = [], ""
        for line in self.text.replace("\\\n", " ").splitlines():
            text += line + "\n"
            if (words := words_of(text)) is not None:
                found += [words] if words else []
                text = ""
        assert not text, f"{self.name}: a quotation does not end"
        return found

    @property
    def is_slow(self) -> bool:
        commands = self.commands if self.language in SHELL else []
        return any(words[0] != "curl" and SLOW & set(words[1:2]) for words in commands)


def words_of(text: str) -> list[str] | None:
    """Return the words of a command; None if a quotation goes on in the next line."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        return None


def has_operator(words: list[str]) -> bool:
    """Return whether a command needs a shell: a pipe, a redirection, a second command."""
    return any(OPERATOR.fullmatch(word) for word in words)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@cache
def blocks_of(page: Path) -> tuple[Block, ...]:
    return tuple(read(page.relative_to(ROOT).as_posix(), page.read_text("utf-8")))


def read(name: str, text: str) -> Iterator[Block]:
    """Yield the blocks of a page's text, in order."""
    for found in FENCE.finditer(text):
        mark = MARK.fullmatch(found["before"] or "")
        kind, value = mark.groups() if mark else ("", "")
        yield Block(
            name,
            text.count("\n", 0, found.start("language")) + 1,
            found["language"],
            found["text"],
            reason=value if kind == "not run" else "",
            file=value if kind == "file" else "",
        )
