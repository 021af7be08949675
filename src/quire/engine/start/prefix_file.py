"""`--pin-prefix FILE`: prefixes that an engine computes and pins at its start.

A file that ends in .json holds an object, or a list of objects, of these fields:

    prompt | messages        a text or token ids; or messages of a conversation, with tools if any
    tools, chat_template_kwargs
    cache_salt, ttl_s        ttl_s 0: without expiry

Any other file is one text; a line end at the end of the file is removed.
"""

import logging
from pathlib import Path
from typing import Any

import msgspec

from quire.base.errors import ConfigError, RequestError
from quire.base.messages import Request
from quire.base.settings.cache_config import CacheConfig
from quire.engine.loop.core import EngineCore
from quire.engine.start.text import TextSide
from quire.render.templates.chat_template import ChatOptions

logger = logging.getLogger("quire")


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prefix in a .json file."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    cache_salt: str = ""
    ttl_s: float = 0.0


def pin_configured(core: EngineCore, config: CacheConfig, text: TextSide) -> None:
    """Compute and pin the prefixes of the configured file, if any. Raises ConfigError, which names
    the file and the prefix."""
    if config.pin_prefix is None:
        return
    path = Path(config.pin_prefix)
    for number, entry in enumerate(read_entries(path)):
        try:
            request = _request(entry, text, f"prefix-of-file-{number}")
            core.add(request)
            _compute(core)
        except RequestError as error:
            raise ConfigError(f"pin_prefix={str(path)!r}, prefix {number}: {error}") from error
        num_tokens = len(request.prompt_token_ids)
        logger.info("pinned %s: %d tokens", request.request_id, num_tokens)


def read_entries(path: Path) -> list[Entry]:
    """Read the prefixes of a file. Raises ConfigError if it is unreadable, malformed or empty."""
    try:
        data = path.read_bytes()
        if path.suffix.lower() != ".json":
            return [Entry(prompt=data.decode().removesuffix("\n").removesuffix("\r"))]
        entries = msgspec.json.decode(data, type=Entry | list[Entry])
    except OSError as error:
        raise ConfigError(
            f"pin_prefix={str(path)!r} cannot be read ({error.strerror or error}); give a text or a"
            " .json file."
        ) from error
    except (UnicodeDecodeError, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(
            f"pin_prefix={str(path)!r} is not a list of prefixes: {error}. Give a text in UTF-8,"
            ' or .json as [{"prompt": "..."}] or [{"messages": [...]}].'
        ) from error
    if entries == []:
        raise ConfigError(f"pin_prefix={str(path)!r} holds no prefix; give one, or remove it.")
    return entries if isinstance(entries, list) else [entries]


def _request(entry: Entry, text: TextSide, name: str) -> Request:
    options = ChatOptions(
        add_generation_prompt=False,
        tools=entry.tools,
        template_kwargs=entry.chat_template_kwargs,
    )
    if (entry.prompt is None) == (entry.messages is None):
        raise RequestError("give either prompt (a text or token ids) or messages.")
    if entry.messages == []:
        raise RequestError("messages is empty; give at least one message.", "messages")
    if entry.messages is None and (entry.tools or entry.chat_template_kwargs):
        raise RequestError("tools and chat_template_kwargs apply to messages only; remove them.")
    rendered = text.renderer.render(
        entry.messages if entry.prompt is None else entry.prompt, options
    )
    return text.requests.make_pin(rendered, entry.ttl_s, name, entry.cache_salt)


def _compute(core: EngineCore) -> None:
    """Run steps until all prefixes are pinned; the core has no other requests at the start."""
    while core.has_work:
        for _, finish in core.step().finished:
            if finish.reason != "pinned":
                why = finish.reason if finish.error is None else finish.error.message
                raise RequestError(f"it could not be computed: {why}")
