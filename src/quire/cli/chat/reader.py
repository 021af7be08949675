"""The user's messages: each line of a pipe, or lines of a terminal with editing and history.

In a terminal a message may have several lines: between two lines of three quotes, or where lines
end with a backslash. The history is a private file in quire's cache.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from quire.base.files import user_cache
from quire.cli.chat.display import print_notice

PROMPT, MORE = "> ", ". "
QUOTES = '"""'
MAX_HISTORY = 1000


def read_messages() -> Iterator[str]:
    """Yield messages until the input ends."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    history = _open_history()
    try:
        while True:
            try:
                yield _read_message()
            except KeyboardInterrupt:
                print_notice("\n[press Ctrl-D or type /exit to exit]")
            except EOFError:
                print_notice("")
                return
    finally:
        _save_history(history)


def _read_message() -> str:
    """Read one message of one line or several. Raises EOFError at the end of the input."""
    line = input(PROMPT)
    if line.strip().startswith(QUOTES):
        lines = [line.strip().removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(input(MORE))
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        return "\n".join(lines).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(input(MORE))
    return "\n".join(lines)


def _open_history() -> Path:
    import readline  # input() edits lines with it

    path = user_cache("chat") / "history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(MAX_HISTORY)
    return path


def _save_history(path: Path) -> None:
    import readline

    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        readline.write_history_file(path)
