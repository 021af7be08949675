"""The loop of a chat: messages, answers, and commands that begin with a slash.

Answers go to standard output, all other text to standard error.
"""

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from quire.base.errors import ConfigError, EngineDead, QuireError
from quire.cli.chat.conversation import Conversation, Image
from quire.cli.chat.display import Statistics, display_for, print_notice
from quire.cli.chat.reader import read_messages
from quire.cli.chat_targets import ChatTarget, Content
from quire.cli.sampling import parse_sampling

COMMANDS = {
    "/help": "show this help",
    "/system TEXT": "set the system message; without TEXT show it",
    "/set NAME X": "set a sampling option, such as temperature 0.2; without NAME show all",
    "/model NAME": "talk with another model of the server; without NAME list them",
    "/image PATH": "attach an image",
    "/regen": "answer the last message again",
    "/save PATH": "write the conversation to a file",
    "/load PATH": "continue the conversation of a file",
    "/reset": "start a new conversation",
    "/exit": "exit (or press Ctrl-D)",
}
KEYS = 'Press Ctrl-C to stop an answer. Begin and end a message of several lines with """.'
HELP = "\n".join([*(f"{name:13}{text}" for name, text in COMMANDS.items()), KEYS])


class Chat:
    """Reads turns and prints answers."""

    def __init__(
        self,
        target: ChatTarget,
        conversation: Conversation,
        max_tokens: int | None,
        images: Sequence[Image] = (),
        sampling: Mapping[str, Any] | None = None,
        is_plain: bool = False,
    ) -> None:
        """Set up the chat. `images` are sent with the first question. sampling: the given sampling
        options. is_plain: whether not to render Markdown."""
        self._target = target
        self._images = list(images)
        self._conversation = conversation
        self._sampling = dict(sampling or {})
        self._max_tokens = max_tokens
        self._is_terminal = sys.stdin.isatty()
        self._display = display_for(is_plain)
        self._commands: dict[str, Callable[[str], bool]] = {
            "/help": self._help,
            "/system": self._system,
            "/set": self._set,
            "/model": self._model,
            "/image": self._image,
            "/regen": self._regen,
            "/save": self._save,
            "/load": self._load,
            "/reset": self._reset,
        }

    def run(self) -> int:
        """Run the chat to the end of the input. Return 1 if a piped turn got no answer, else 0."""
        if self._is_terminal:
            print_notice(
                "Press Ctrl-C to stop an answer and Ctrl-D to exit. Type /help for all commands."
            )
        for image in self._images:
            print_image_notice(image)
        failed = False
        for message in read_messages():
            command = message.strip()
            if command == "/exit":
                break
            if command.startswith("/"):
                failed = not self._command(command) or failed
            elif command:
                failed = not self._turn(message) or failed
        return int(failed and not self._is_terminal)

    def answer_one(self, prompt: str) -> int:
        """Answer one question, and return the exit status."""
        return int(not self._turn(prompt))

    # ---- commands ----------------------------------------------------------------------------

    def _command(self, command: str) -> bool:
        """Run a command; return False if it got no answer from the model."""
        name, _, rest = command.partition(" ")
        run = self._commands.get(name)
        if run is None:
            print_notice(f"unknown command {command}\n{HELP}")
            return True
        try:
            return run(rest.strip())
        except EngineDead:
            raise
        except QuireError as error:
            print_notice(f"quire: {error}")
            return True

    def _help(self, _: str) -> bool:
        print_notice(HELP)
        return True

    def _system(self, text: str) -> bool:
        if text:
            self._conversation.system = text
        print_notice(f"[system message: {self._conversation.system or 'none'}]")
        return True

    def _set(self, text: str) -> bool:
        """Set a sampling option; the value `default` removes it."""
        name, _, value = text.partition(" ")
        if name:
            changed = {key: old for key, old in self._sampling.items() if key != name}
            parsed = parse_sampling(name, value.strip())
            changed |= {} if parsed is None else {name: parsed}
            self._target.use_sampling(changed)
            self._sampling, self._max_tokens = changed, changed.get("max_tokens")
        shown = ", ".join(f"{key} {each}" for key, each in self._sampling.items())
        print_notice(f"[{shown or 'all sampling options have their defaults'}]")
        return True

    def _model(self, name: str) -> bool:
        if name:
            self._target.use_model(name)
            print_notice(f"[model {name}]")
        else:
            print_notice(f"[models: {', '.join(self._target.models())}]")
        return True

    def _image(self, path: str) -> bool:
        if not path:
            raise ConfigError("give the path of an image: /image PATH")
        self._images.append(Image.read(path))
        print_image_notice(self._images[-1])
        return True

    def _regen(self, _: str) -> bool:
        """Answer the last question again. Keep the old answer if there is no new one."""
        turns = self._conversation.turns
        if not turns:
            raise ConfigError("there is no answer yet to write again.")
        question, answer = turns.pop()
        is_answered = self._answer(question)
        if not is_answered:
            if turns and turns[-1][0] is question:
                turns.pop()  # the part before the error
            turns.append((question, answer))
        return is_answered

    def _save(self, path: str) -> bool:
        if not path:
            raise ConfigError("give the path of a file: /save PATH")
        self._conversation.save(path)
        print_notice(f"[saved {len(self._conversation.turns)} turn(s) to {path}]")
        return True

    def _load(self, path: str) -> bool:
        if not path:
            raise ConfigError("give the path of a file: /load PATH")
        self._conversation = Conversation.load(path)
        print_notice(f"[loaded {len(self._conversation.turns)} turn(s) from {path}]")
        return True

    def _reset(self, _: str) -> bool:
        self._conversation.turns.clear()
        self._images.clear()
        print_notice("[new conversation]")
        return True

    # ---- turns -------------------------------------------------------------------------------

    def _turn(self, line: str) -> bool:
        """Answer one question, with the pending images; return whether it worked."""
        question: Content = line
        if self._images:
            question = [*(each.part for each in self._images), {"type": "text", "text": line}]
            self._images.clear()
        return self._answer(question)

    def _answer(self, question: Content) -> bool:
        """Print the answer to a question and add the turn; return whether it worked."""
        text, note, well, statistics = "", "", True, Statistics()
        try:
            dropped = self._conversation.fit(question, self._target, self._max_tokens)
            if dropped:
                print_notice(f"[the context is full: removed the oldest {dropped} turn(s)]")
            messages = self._conversation.messages(question)
            with Interrupts() as interrupts:
                for piece in self._target.answer(messages, lambda: interrupts.is_requested):
                    self._display.add(piece.text)
                    text += piece.text
                    statistics.add(piece.text, piece.num_tokens)
                    if piece.finish_reason == "length":
                        note = "[the answer reached its maximum length]"
            note = "[stopped]" if interrupts.is_requested else note
        except EngineDead:
            raise
        except QuireError as error:
            note, well = f"quire: {error}", False
        finally:
            self._display.end()
        if text:
            self._conversation.turns.append((question, text))
        if note:
            print_notice(note)
        if self._is_terminal and (line := statistics.line()):
            print_notice(line)
        return well


class Interrupts:
    """Within this context the first Ctrl-C only sets `is_requested`; a second one interrupts."""

    def __init__(self) -> None:
        self.is_requested = False
        self._before: Any = None

    def __enter__(self) -> "Interrupts":
        self._before = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True


def print_image_notice(image: Image) -> None:
    print_notice(f"[image {image.name}, {image.num_bytes:,} bytes: sent with the next message]")
