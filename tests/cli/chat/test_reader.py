"""Messages typed on a terminal: several lines, history, Ctrl-C and Ctrl-D."""

import readline
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from quire.cli.chat.reader import read_messages


class Keyboard:
    """Standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> "list[object]":
    """The lines to type, or the errors that keys raise."""
    lines: list[object] = []

    def read(prompt: str) -> str:
        line = lines.pop(0) if lines else EOFError()
        if isinstance(line, BaseException):
            raise line
        prompts.append(prompt)
        return str(line)

    prompts: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", Keyboard())
    monkeypatch.setattr("builtins.input", read)
    return lines


def messages(typed: list[object], lines: Iterable[object]) -> list[str]:
    typed.extend(lines)
    return [*read_messages()]


def test_messages_may_have_several_lines(typed: list[object]) -> None:
    assert messages(typed, ["one", '"""', "a", "", "b", '"""', "end"]) == ["one", "a\n\nb", "end"]
    assert messages(typed, ['"""a', 'b"""', '"""c"""']) == ["a\nb", "c"]
    assert messages(typed, ["a \\", "b\\", "c", "d"]) == ["a \nb\nc", "d"]


def test_ctrl_c_drops_the_message_and_ctrl_d_ends_the_chat(
    typed: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert messages(typed, ['"""', "a", KeyboardInterrupt(), "b"]) == ["b"]
    assert "[press Ctrl-D or type /exit to exit]" in capsys.readouterr().err


def test_history_is_saved_privately_and_read_again(typed: list[object], tmp_path: Path) -> None:
    readline.clear_history()
    readline.add_history("an earlier message")
    messages(typed, ["one"])
    path = tmp_path / "quire" / "chat" / "history"
    assert "an earlier message" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    readline.clear_history()
    messages(typed, [])
    assert readline.get_history_item(1) == "an earlier message"
    readline.clear_history()


def test_unwritable_history_does_not_end_the_chat(
    typed: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert messages(typed, ["one"]) == ["one"]
