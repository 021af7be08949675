"""A conversation with images: its messages, its length, its file."""

import base64
import json
import mimetypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.cli.chat_targets import ChatTarget, Content, Messages

ANSWER_TOKENS = 256  # room for an answer; at most a quarter of the context
MAX_IMAGE_BYTES = 32 << 20
MAX_FILE_BYTES = 256 << 20
SYSTEM, USER, ASSISTANT = "system", "user", "assistant"


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

    def messages(self, question: Content | None = None) -> Messages:
        """Return all messages, with a question as the last one if it is given."""
        found: Messages = [{"role": SYSTEM, "content": self.system}] if self.system else []
        for earlier, answer in self.turns:
            found.append({"role": USER, "content": earlier})
            found.append({"role": ASSISTANT, "content": answer})
        return found if question is None else [*found, {"role": USER, "content": question}]

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

    def save(self, path: str) -> None:
        """Write the messages to a JSON file that only the user can read. Raises ConfigError."""
        text = json.dumps({"messages": self.messages()}, ensure_ascii=False, indent=1)
        target = Path(path).expanduser()
        try:
            target.touch(mode=0o600)
            target.write_text(text + "\n", "utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{path!r} cannot be written: {reason}.") from None

    @classmethod
    def load(cls, path: str) -> "Conversation":
        """Read a file of `save`, or the body of an OpenAI request. Raises ConfigError."""
        try:
            with open(Path(path).expanduser(), "rb") as file:
                messages = json.loads(file.read(MAX_FILE_BYTES))["messages"]
            return cls._of(messages)
        except OSError as error:
            raise ConfigError(f"{path!r} cannot be read: {error.strerror}.") from None
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ConfigError(
                f"{path!r} is not a conversation: a JSON object with `messages`, an optional system"
                " message and then user and assistant messages in turn."
            ) from None

    @classmethod
    def _of(cls, messages: list[dict[str, Any]]) -> "Conversation":
        """Return the conversation of messages. Raises ValueError unless roles alternate."""
        found = cls()
        rest = list(messages)
        if rest and rest[0]["role"] == SYSTEM:
            found.system = str(rest.pop(0)["content"])
        for first, second in zip(rest[::2], rest[1::2], strict=True):
            roles, content = (first["role"], second["role"]), first["content"]
            if roles != (USER, ASSISTANT) or not isinstance(second["content"], str):
                raise ValueError("no turn")
            if not isinstance(content, str | list):
                raise ValueError("no question")
            found.turns.append((content, second["content"]))
        return found
