"""`quire chat`: turns from a pipe and a terminal, a full context, Ctrl-C, a server's errors."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from quire.base.errors import ConfigError, EngineDead, EngineError, RequestError
from quire.cli.chat_targets import Messages, Piece, _pieces
from quire.cli.commands.chat import Chat, Conversation
from tests.support.commands import run


class Parrot:
    """A target that counts a token per character and answers with the question in pieces."""

    def __init__(self, limit: int = 1000, error: Exception | None = None) -> None:
        self.limit = limit
        self.error = error
        self.fails_at = 2  # letter of the answer
        self.heard: list[Messages] = []
        self.interrupt_after: int | None = None
        self.used: list[object] = []  # models and sampling options that were set

    def answer(self, messages: Messages, is_enough: Callable[[], bool]) -> Iterator[Piece]:
        self.heard.append(messages)
        question = messages[-1]["content"]
        if isinstance(question, list):
            question = question[-1]["text"]
        for number, letter in enumerate(question):
            if self.error is not None and number == self.fails_at:
                raise self.error
            yield Piece(letter)
            if self.interrupt_after == number:
                os.kill(os.getpid(), signal.SIGINT)
            if is_enough():
                return
        yield Piece("", "length" if question == "long" else "stop")

    def size(self, messages: Messages) -> tuple[int, int]:
        return sum(len(message["content"]) for message in messages), self.limit

    def models(self) -> list[str]:
        return ["parrot", "macaw"]

    def use_model(self, name: str) -> None:
        if name not in self.models():
            raise ConfigError(f"no model {name}.")
        self.used.append(name)

    def use_sampling(self, fields: Mapping[str, object]) -> None:
        if fields.get("temperature") == 9.0:
            raise RequestError("too hot.")
        self.used.append(dict(fields))

    def close(self) -> None:
        pass


def chat(monkeypatch: pytest.MonkeyPatch, target: Parrot, text: str, **kwargs: object) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return Chat(target, Conversation(**kwargs), None).run()  # type: ignore[arg-type]


def picture(path: Path) -> Path:
    path.write_bytes(b"picture")
    return path


def contents(messages: Messages) -> list[str]:
    return [message["content"] for message in messages]


def test_the_demo_model_chats_through_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two turns; the second one sees the first; the same again gives the same."""
    outs = []
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hello!\n\nTell me a story.\n"))
        options = ("--temperature", "0", "--max-tokens", "12")
        status, out, err = run(capsys, "chat", "demo", *options, "--system", "Be kind.")
        assert status == 0
        assert "> " not in out and "> " not in err
        outs.append(out.splitlines())
    assert outs[0] == outs[1]
    assert len(outs[0]) == 2 and all(outs[0])


def test_turns_are_remembered_and_forgotten(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Parrot()
    text = "one\n  \ntwo\n/help\n/reset\n/nothing\nthree\n/exit\nfour\n"
    assert chat(monkeypatch, target, text, system="be") == 0
    captured = capsys.readouterr()
    assert captured.out == "one\ntwo\nthree\n"
    assert [contents(heard) for heard in target.heard] == [
        ["be", "one"],
        ["be", "one", "one", "two"],
        ["be", "three"],
    ]
    roles = [message["role"] for message in target.heard[1]]
    assert roles == ["system", "user", "assistant", "user"]
    assert "/reset       start" in captured.err and "unknown command /nothing" in captured.err


def test_images_are_sent_with_the_next_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target, path = Parrot(), picture(tmp_path / "a b.png")
    text = f"/image {path}\n/image\n/image {tmp_path}/none.png\n/image {__file__}\n"
    text += "see\nnext\n/reset\nnew\n"
    assert chat(monkeypatch, target, text) == 0
    captured = capsys.readouterr()
    assert captured.out == "see\nnext\nnew\n"
    assert "[image a b.png, 7 bytes: sent with the next message]" in captured.err
    assert "give the path of an image" in captured.err
    assert "none.png' cannot be read: No such file or directory." in captured.err
    assert "test_chat.py' is no image by its name, but text/x-python." in captured.err
    url = "data:image/png;base64,cGljdHVyZQ=="
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "see"}]
    assert [contents(heard) for heard in target.heard] == [[parts], [parts, "see", "next"], ["new"]]


def test_an_image_of_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The demo model takes none; a file that is missing ends the command."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is it?\n"))
    path = picture(tmp_path / "a.png")
    status, _, err = run(capsys, "chat", "demo", "--image", str(path))
    assert status == 1
    assert "[image a.png, 7 bytes" in err and "does not accept images" in err
    status, _, err = run(capsys, "chat", "demo", "--image", str(tmp_path / "b.png"))
    assert status == 1
    assert "b.png' cannot be read" in err


def test_the_oldest_turns_go_when_the_context_is_full(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 tokens, of which 10 are kept for the answer."""
    target = Parrot(limit=40)
    assert chat(monkeypatch, target, "aaaaaaaa\nbbbb\ncccccc\n") == 0
    assert contents(target.heard[1]) == ["aaaaaaaa", "aaaaaaaa", "bbbb"]
    assert contents(target.heard[2]) == ["bbbb", "bbbb", "cccccc"]
    assert "removed the oldest 1 turn(s)" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_but_not_the_chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Parrot()
    target.interrupt_after = 3
    before = signal.getsignal(signal.SIGINT)
    assert chat(monkeypatch, target, "abcdefgh\nxy\n") == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("abcd\nxy\n", "[stopped]\n")
    assert contents(target.heard[1]) == ["abcdefgh", "abcd", "xy"]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_answer_that_was_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat(monkeypatch, Parrot(), "long\n") == 0
    assert "reached its maximum length" in capsys.readouterr().err


def test_an_error_ends_a_turn_and_is_in_the_exit_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Parrot(error=EngineError("it hurts."))
    assert chat(monkeypatch, target, "abcdef\nx\n") == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("ab\nx\n", "quire: it hurts.\n")
    with pytest.raises(EngineDead):
        chat(monkeypatch, Parrot(error=EngineDead("gone.")), "abcdef\nx\n")


def test_pieces_of_a_servers_stream() -> None:
    both = '{"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}'
    assert [*_pieces(both)] == [Piece("a", "stop")]
    assert [*_pieces('{"choices": [{"delta": {"role": "assistant"}}]}')] == [Piece("")]
    assert [*_pieces('{"choices": [], "usage": {}}')] == []
    with pytest.raises(EngineError, match="it died"):
        [*_pieces('{"error": {"message": "it died"}}')]


def test_a_prompt_that_never_fits_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("many words " * 50 + "\nHello!\n"))
    options = ("--max-model-len", "64", "--max-tokens", "5", "--temperature", "0")
    status, out, err = run(capsys, "chat", *options)
    assert status == 1
    assert len(out.splitlines()) == 1
    assert "the range is 1 to max_model_len - 1 = 63" in err


class Terminal:
    """What a person at a terminal sees, up to where they have read."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._seen = b""

    def read_until(self, wanted: bytes, limit_s: float = 60.0) -> None:
        assert self.sees(wanted, limit_s), self._seen

    def sees(self, wanted: bytes, limit_s: float) -> bool:
        """Whether it comes in time; then what comes next is read from behind it."""
        end = time.monotonic() + limit_s
        while wanted not in self._seen:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return False
            self._seen += os.read(self._fd, 4096)
        self._seen = self._seen.partition(wanted)[2]
        return True

    def write(self, text: bytes) -> None:
        os.write(self._fd, text)


def test_in_a_terminal() -> None:
    """A prompt, an answer, Ctrl-C in it and at the next prompt, another answer, Ctrl-D."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "quire.cli.main", "chat", "--temperature", "0"]
    options = ["--ignore-eos", "--log-level", "error", "--max-tokens", "2000"]
    process = subprocess.Popen(
        command + options, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    terminal = Terminal(ours)
    try:
        terminal.read_until(b"/help for all commands.")
        for _ in range(2):
            terminal.read_until(b"> ")
            terminal.write(b"Hello!\n")
            terminal.read_until(b"model")  # "I am the demo model": the answer has begun
            process.send_signal(signal.SIGINT)
            terminal.read_until(b"[stopped]")
            terminal.read_until(b"> ")
            # Between the prompt and its wait for a key, Python's readline is deaf to signals.
            for _ in range(30):
                process.send_signal(signal.SIGINT)
                if terminal.sees(b"[press Ctrl-D or type /exit to exit]", 2.0):
                    break
            else:
                pytest.fail("Ctrl-C at the prompt says nothing")
        terminal.read_until(b"> ")
        terminal.write(b"\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
