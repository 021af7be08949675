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
    """A target that counts one token per character and streams the question as its answer."""

    def __init__(self, limit: int = 1000, error: Exception | None = None) -> None:
        self.limit = limit
        self.error = error
        self.fails_at = 2  # letter of the answer
        self.received: list[Messages] = []
        self.interrupt_after: int | None = None
        self.used: list[object] = []  # models and sampling options that were set

    def answer(self, messages: Messages, is_enough: Callable[[], bool]) -> Iterator[Piece]:
        self.received.append(messages)
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


def test_demo_model_chats_through_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of the same two turns give equal answers."""
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


def test_turns_are_resent_until_a_reset(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Parrot()
    text = "one\n  \ntwo\n/help\n/reset\n/nothing\nthree\n/exit\nfour\n"
    assert chat(monkeypatch, target, text, system="be") == 0
    captured = capsys.readouterr()
    assert captured.out == "one\ntwo\nthree\n"
    assert [contents(received) for received in target.received] == [
        ["be", "one"],
        ["be", "one", "one", "two"],
        ["be", "three"],
    ]
    roles = [message["role"] for message in target.received[1]]
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
    assert [contents(received) for received in target.received] == [
        [parts],
        [parts, "see", "next"],
        ["new"],
    ]


def test_image_option_attaches_an_image(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The demo model does not accept images, and a missing file ends the command."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is it?\n"))
    path = picture(tmp_path / "a.png")
    status, _, err = run(capsys, "chat", "demo", "--image", str(path))
    assert status == 1
    assert "[image a.png, 7 bytes" in err and "does not accept images" in err
    status, _, err = run(capsys, "chat", "demo", "--image", str(tmp_path / "b.png"))
    assert status == 1
    assert "b.png' cannot be read" in err


def test_oldest_turns_are_removed_when_the_context_is_full(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context has 40 tokens, 10 of them reserved for the answer."""
    target = Parrot(limit=40)
    assert chat(monkeypatch, target, "aaaaaaaa\nbbbb\ncccccc\n") == 0
    assert contents(target.received[1]) == ["aaaaaaaa", "aaaaaaaa", "bbbb"]
    assert contents(target.received[2]) == ["bbbb", "bbbb", "cccccc"]
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
    assert contents(target.received[1]) == ["abcdefgh", "abcd", "xy"]
    assert signal.getsignal(signal.SIGINT) is before


def test_truncated_answer_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat(monkeypatch, Parrot(), "long\n") == 0
    assert "reached its maximum length" in capsys.readouterr().err


def test_error_ends_the_turn_and_sets_the_exit_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Parrot(error=EngineError("it hurts."))
    assert chat(monkeypatch, target, "abcdef\nx\n") == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("ab\nx\n", "quire: it hurts.\n")
    with pytest.raises(EngineDead):
        chat(monkeypatch, Parrot(error=EngineDead("gone.")), "abcdef\nx\n")


def test_stream_chunks_become_pieces() -> None:
    both = '{"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}'
    assert [*_pieces(both)] == [Piece("a", "stop")]
    assert [*_pieces('{"choices": [{"delta": {"role": "assistant"}}]}')] == [Piece("")]
    assert [*_pieces('{"choices": [], "usage": {}}')] == []
    with pytest.raises(EngineError, match="it died"):
        [*_pieces('{"error": {"message": "it died"}}')]


def test_prompt_that_never_fits_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("many words " * 50 + "\nHello!\n"))
    options = ("--max-model-len", "64", "--max-tokens", "5", "--temperature", "0")
    status, out, err = run(capsys, "chat", *options)
    assert status == 1
    assert len(out.splitlines()) == 1
    assert "the range is 1 to max_model_len - 1 = 63" in err


class Terminal:
    """The output of a terminal that the test has not consumed yet."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._seen = b""

    def read_until(self, expected: bytes, limit_s: float = 60.0) -> None:
        assert self.sees(expected, limit_s), self._seen

    def sees(self, expected: bytes, limit_s: float) -> bool:
        """Return whether the text arrives in time, and consume the output up to its end."""
        end = time.monotonic() + limit_s
        while expected not in self._seen:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return False
            self._seen += os.read(self._fd, 4096)
        self._seen = self._seen.partition(expected)[2]
        return True

    def write(self, text: bytes) -> None:
        os.write(self._fd, text)


def test_chat_in_a_terminal_handles_ctrl_c_and_ctrl_d() -> None:
    """Ctrl-C is sent within an answer and at the next prompt; Ctrl-D ends the chat."""
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
            # Between the prompt and its wait for a key, Python's readline ignores signals.
            for _ in range(30):
                process.send_signal(signal.SIGINT)
                if terminal.sees(b"[press Ctrl-D or type /exit to exit]", 2.0):
                    break
            else:
                pytest.fail("Ctrl-C at the prompt shows no message")
        terminal.read_until(b"> ")
        terminal.write(b"\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
