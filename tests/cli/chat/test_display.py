"""Answers on a terminal: blocks of Markdown, control characters, statistics."""

import io
import time

import pytest
from rich.console import Console

from quire.cli.chat import display
from quire.cli.chat.display import MarkdownDisplay, PlainDisplay, Statistics, split_blocks

ANSWER = """# Title

Some **bold** text and `code`.

- one
- two

```python
x = 1

y = 2
```

The end"""


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("a", ""),
        ("a\n\n", "a\n\n"),
        ("a\n\nb\n\nc", "a\n\nb\n\n"),
        ("a\n\n```\nx\n\ny", "a\n\n"),
        ("```\nx\n\ny\n```\n\nz", "```\nx\n\ny\n```\n\n"),
        ("", ""),
    ],
)
def test_split_blocks_returns_the_complete_blocks(text: str, whole: str) -> None:
    assert split_blocks(text) == (whole, text[len(whole) :])


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_streamed_markdown_is_shown_once(size: int) -> None:
    """The size of the chunks does not matter, and code keeps its empty line."""
    file = io.StringIO()
    shown = MarkdownDisplay(Console(file=file, width=40, force_terminal=False))
    for _ in range(2):
        for start in range(0, len(ANSWER), size):
            shown.add(ANSWER[start : start + size])
        shown.end()
    lines = [line.strip() for line in file.getvalue().splitlines()]
    assert "Some bold text and code." in lines and "• one" in lines
    assert [lines.count(word) for word in ("x = 1", "y = 2", "The end")] == [2, 2, 2]
    assert lines[lines.index("x = 1") + 1] == ""


def test_growing_block_is_drawn_and_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "REFRESH_S", -1.0)
    file = io.StringIO()
    console = Console(file=file, width=40, height=10, force_terminal=True, color_system=None)
    shown = MarkdownDisplay(console)
    shown.add("Hello **wor")
    assert "Hello **wor" in file.getvalue()
    shown.add("ld**")
    shown.end()
    assert "Hello world" in file.getvalue()
    assert "\x1b[2K" in file.getvalue()  # lines are erased


def test_last_lines_of_a_long_block_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "REFRESH_S", -1.0)
    file = io.StringIO()
    console = Console(file=file, width=10, height=5, force_terminal=True, color_system=None)
    shown = MarkdownDisplay(console)
    shown.add(" ".join(f"word{number:02}" for number in range(40)))
    assert "word39" in file.getvalue() and "word01" not in file.getvalue()
    shown.end()
    assert "word01" in file.getvalue()


HOSTILE = "a\x1b]0;title\x07b\x9b31m\rc\x00\td"


def test_control_characters_never_reach_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    file = io.StringIO()
    shown = MarkdownDisplay(Console(file=file, width=40, force_terminal=False))
    shown.add(HOSTILE)
    shown.end()
    assert not set("\x1b\x07\x9b\r\x00") & set(file.getvalue())
    for is_terminal, expected in ((True, "a]0;titleb31mc\td\n"), (False, HOSTILE + "\n")):
        plain = PlainDisplay(is_terminal)
        plain.add(HOSTILE)
        plain.end()
        assert capsys.readouterr().out == expected


def test_links_do_not_hide_their_address() -> None:
    file = io.StringIO()
    shown = MarkdownDisplay(Console(file=file, width=80, force_terminal=False))
    shown.add("[bank](http://evil.example)")
    shown.end()
    assert "http://evil.example" in file.getvalue()


def test_statistics_show_tokens_rate_and_first_token_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.5, 12.5])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    each = Statistics(10.0)
    each.add("", None)
    each.add("a", 1)
    each.add("b", 21)
    assert each.line() == "[21 tokens, 10.0 tokens/s, first after 0.50 s]"


def test_statistics_omit_missing_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1.0)
    each = Statistics(1.0)
    assert each.line() == ""
    each.add("a", None)
    assert each.line() == "[first after 0.00 s]"
