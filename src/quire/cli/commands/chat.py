"""`quire chat [MODEL]`: a conversation in the terminal, with a local model or a server's.

Ctrl-C ends an answer, not the chat. Each line of piped input is one turn. Answers go to standard
output, all other text to standard error.
"""

import argparse
import base64
import mimetypes
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from quire.base.errors import ConfigError, EngineDead, QuireError
from quire.cli.chat_targets import ChatTarget, Content, Messages, ModelTarget, ServerTarget
from quire.cli.model_files import check_input
from quire.cli.options.help_parser import Commands
from quire.cli.sampling import add_sampling, given_sampling, sampling_params
from quire.cli.settings import FLAG, add_settings, given_settings
from quire.ops.host.torch_import import declare_own_process
from quire.render.templates.template_pool import prestart

PROMPT = "> "
ANSWER_TOKENS = 256  # room for an answer; at most a quarter of the context
MAX_IMAGE_BYTES = 32 << 20
HELP = """/help        show this help
/image PATH  attach an image
/reset       start a new conversation
/exit        exit (or press Ctrl-D)
Press Ctrl-C to stop an answer."""


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "chat",
        usage="quire chat [MODEL] [option ...]",
        help="chat with a model in the terminal",
        description="Chat with MODEL (by default the demo model), or with the model of a server.",
    )
    parser.set_defaults(run=run)
    add_sampling(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    parser.add_argument(
        "--image", action="append", default=[], metavar="PATH",
        help="image that is sent with the first message; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--url", help="server to chat with, such as http://127.0.0.1:8000, instead of a local model"
    )
    parser.add_argument(
        "--api-key", dest="server_key", metavar="TEXT",
        help="API key for the server (default: OPENAI_API_KEY of the environment)",
    )  # fmt: skip
    add_settings(parser, model_first=True)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status: 1 if a piped turn got no answer."""
    if arguments.server_key and not arguments.url:
        raise ConfigError("--api-key is for a server; add --url with the address of the server.")
    images = [Image.read(path) for path in arguments.image]
    target = _target(arguments)
    try:
        return Chat(target, Conversation(arguments.system), arguments.max_tokens, images).run()
    finally:
        target.close()


def _target(arguments: argparse.Namespace) -> ChatTarget:
    settings = given_settings(arguments)
    if arguments.url:
        key = arguments.server_key or os.environ.get("OPENAI_API_KEY")
        model = settings.pop("model", None)
        flags = [name for name in settings if arguments.settings[name].origin == FLAG]
        if flags:
            raise ConfigError(
                f"{_listed(flags)} cannot be used with --url: the server has its own engine; remove"
                f" {'it' if len(flags) == 1 else 'them'}."
            )
        return ServerTarget(arguments.url, key, model, given_sampling(arguments))
    declare_own_process()
    check_input(arguments, is_chat=True)
    prestart()
    from quire.serve.python.llm import LLM

    llm = LLM(**({"max_num_seqs": 1} | settings))
    try:
        return ModelTarget(llm, sampling_params(arguments, llm.get_default_sampling_params()))
    except BaseException:
        llm.close()
        raise


def _listed(names: list[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


@dataclass(frozen=True)
class Image:
    """An image file. `url` is its content as a data: URL."""

    name: str
    num_bytes: int
    url: str

    @classmethod
    def read(cls, path: str) -> "Image":
        """Read a file. Raises ConfigError."""
        try:
            with open(Path(path).expanduser(), "rb") as file:
                data = file.read(MAX_IMAGE_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"the image {path!r} cannot be read: {reason}.") from None
        if len(data) > MAX_IMAGE_BYTES:
            raise ConfigError(
                f"the image {path!r} has more than {MAX_IMAGE_BYTES:,} bytes; scale it down."
            )
        kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
        if not kind.startswith(("image/", "application/octet-stream")):
            raise ConfigError(f"the file {path!r} is no image by its name, but {kind}.")
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        return cls(Path(path).name, len(data), url)

    @property
    def part(self) -> dict[str, object]:
        return {"type": "image_url", "image_url": {"url": self.url}}


@dataclass
class Conversation:
    """The messages so far: an optional system message, then turns of question and answer."""

    system: str | None = None
    turns: list[tuple[Content, str]] = field(default_factory=list)

    def messages(self, question: Content) -> Messages:
        found: Messages = [{"role": "system", "content": self.system}] if self.system else []
        for earlier, answer in self.turns:
            found.append({"role": "user", "content": earlier})
            found.append({"role": "assistant", "content": answer})
        return [*found, {"role": "user", "content": question}]

    def fit(self, question: Content, target: ChatTarget, max_tokens: int | None) -> int:
        """Drop the oldest turns until there is room for an answer; return the number dropped."""
        dropped = 0
        while self.turns and (size := target.size(self.messages(question))) is not None:
            num_tokens, limit = size
            if num_tokens + min(max_tokens or ANSWER_TOKENS, limit // 4) < limit:
                break
            del self.turns[0]
            dropped += 1
        return dropped


class Chat:
    """Reads turns and prints answers."""

    def __init__(
        self,
        target: ChatTarget,
        conversation: Conversation,
        max_tokens: int | None,
        images: Sequence[Image] = (),
    ) -> None:
        """Set up the chat. `images` are sent with the first question."""
        self._target = target
        self._images = list(images)
        self._conversation = conversation
        self._max_tokens = max_tokens
        self._is_terminal = sys.stdin.isatty()

    def run(self) -> int:
        if self._is_terminal:
            print_notice(
                "Press Ctrl-C to stop an answer and Ctrl-D to exit. Type /help for all commands."
            )
        for image in self._images:
            print_image_notice(image)
        failed = False
        for line in self._lines():
            command = line.strip()
            if command == "/exit":
                break
            if command.startswith("/"):
                self._command(command)
            elif command:
                failed = not self._turn(line) or failed
        return int(failed and not self._is_terminal)

    def _lines(self) -> Iterator[str]:
        if not self._is_terminal:
            yield from (line.rstrip("\n") for line in sys.stdin)
            return
        import readline  # noqa: F401  (input() edits lines with it)

        while True:
            try:
                yield input(PROMPT)
            except KeyboardInterrupt:
                print_notice("\n[press Ctrl-D or type /exit to exit]")
            except EOFError:
                print_notice("")
                return

    def _command(self, command: str) -> None:
        name, _, path = command.partition(" ")
        if name == "/image":
            self._add_image(path.strip())
        elif command == "/reset":
            self._conversation.turns.clear()
            self._images.clear()
            print_notice("[new conversation]")
        elif command == "/help":
            print_notice(HELP)
        else:
            print_notice(f"unknown command {command}\n{HELP}")

    def _add_image(self, path: str) -> None:
        if not path:
            print_notice("give the path of an image: /image PATH")
            return
        try:
            self._images.append(Image.read(path))
        except ConfigError as error:
            print_notice(f"quire: {error}")
        else:
            print_image_notice(self._images[-1])

    def _turn(self, line: str) -> bool:
        """Answer one question, with the pending images; return whether it worked."""
        text, note, well = "", "", True
        question: Content = line
        if self._images:
            question = [*(each.part for each in self._images), {"type": "text", "text": line}]
            self._images.clear()
        try:
            dropped = self._conversation.fit(question, self._target, self._max_tokens)
            if dropped:
                print_notice(f"[the context is full: removed the oldest {dropped} turn(s)]")
            messages = self._conversation.messages(question)
            with Interrupts() as interrupts:
                for piece in self._target.answer(messages, lambda: interrupts.is_requested):
                    print(piece.text, end="", flush=True)
                    text += piece.text
                    if piece.finish_reason == "length":
                        note = "[the answer reached its maximum length]"
            note = "[stopped]" if interrupts.is_requested else note
        except EngineDead:
            raise
        except QuireError as error:
            note, well = f"quire: {error}", False
        if text:
            print(flush=True)
            self._conversation.turns.append((question, text))
        if note:
            print_notice(note)
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


def print_notice(text: str) -> None:
    """Print a notice for the user, outside of the answer."""
    print(text, file=sys.stderr, flush=True)
