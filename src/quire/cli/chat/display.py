"""Answers in the terminal: as Markdown where rich is installed, otherwise as plain text.

Input: pieces of text. Output: standard output. Control characters of an answer never reach a
terminal, since they could change its state. Output that is not a terminal stays as it is.
"""

import importlib.util
import os
import re
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
REFRESH_S = 0.08
FENCE = re.compile(r"^ {0,3}(```|~~~)", re.MULTILINE)


class Display(Protocol):
    """Shows one answer after another."""

    def add(self, text: str) -> None: ...

    def end(self) -> None:
        """Finish an answer, so that the next output begins on a new line."""
        ...


class PlainDisplay:
    """Prints pieces as they arrive."""

    def __init__(self, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self._has_text = False

    def add(self, text: str) -> None:
        self._has_text = self._has_text or bool(text)
        print(CONTROLS.sub("", text) if self._is_terminal else text, end="", flush=True)

    def end(self) -> None:
        if self._has_text:
            print(flush=True)
        self._has_text = False


class MarkdownDisplay:
    """Prints each block of Markdown (paragraph, list, code) once it is complete.

    The block that is still being written is drawn below, and drawn again as it grows."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console

        self._console = console or Console()
        self._live: Any = None
        self._rest = ""
        self._drawn_s = 0.0

    def add(self, text: str) -> None:
        self._rest += CONTROLS.sub("", text)
        whole, self._rest = split_blocks(self._rest)
        if whole.strip():
            self._erase()
            self._print(whole)
        now = time.monotonic()
        if self._rest.strip() and now - self._drawn_s > REFRESH_S:
            self._drawn_s = now
            self._draw()

    def end(self) -> None:
        self._erase()
        if self._rest.strip():
            self._print(self._rest)
        self._rest = ""

    def _print(self, text: str) -> None:
        from rich.markdown import Markdown

        self._console.print(Markdown(text, hyperlinks=False))

    def _draw(self) -> None:
        """Draw the last lines of the incomplete block, as many as the terminal has."""
        from rich.live import Live
        from rich.text import Text

        lines = Text(self._rest).wrap(self._console, self._console.width)
        last = lines[-max(1, self._console.height - 2) :]
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(Text("\n").join(last), refresh=True)

    def _erase(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def split_blocks(text: str) -> tuple[str, str]:
    """Split Markdown after its last complete block: an empty line outside of a code block."""
    end = text.rfind("\n\n")
    while end >= 0:
        if len(FENCE.findall(text[: end + 2])) % 2 == 0:
            return text[: end + 2], text[end + 2 :]
        end = text.rfind("\n\n", 0, end)
    return "", text


def display_for(is_plain: bool) -> Display:
    """Return the display for this process's standard output."""
    is_terminal = sys.stdout.isatty()
    is_simple = is_plain or os.environ.get("TERM", "dumb") == "dumb"
    if not is_terminal or is_simple or importlib.util.find_spec("rich") is None:
        return PlainDisplay(is_terminal)
    return MarkdownDisplay()


@dataclass
class Statistics:
    """Times and tokens of one answer."""

    began_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    num_tokens: int = 0

    def add(self, text: str, num_tokens: int | None) -> None:
        """Count a piece. num_tokens: tokens of the answer so far, if known."""
        if text and self.first_s is None:
            self.first_s = time.monotonic()
        self.num_tokens = num_tokens or self.num_tokens

    def line(self) -> str:
        """Return a line for the user; empty without an answer."""
        if self.first_s is None:
            return ""
        first = f"first after {self.first_s - self.began_s:.2f} s"
        if not self.num_tokens:
            return f"[{first}]"
        seconds, later = time.monotonic() - self.first_s, self.num_tokens - 1
        speed = f", {later / seconds:.1f} tokens/s" if later > 0 and seconds > 0 else ""
        return f"[{self.num_tokens} tokens{speed}, {first}]"


def print_notice(text: str) -> None:
    """Print a notice for the user, outside of the answer."""
    print(text, file=sys.stderr, flush=True)
