"""Anthropic's `cache_control`: marks in a conversation, which request that it stays cached.

quire caches all prompts. A mark retains the request, as `pipeline/retention.py` does for OpenAI's
hints. The key is the beginning of the conversation, so each turn replaces the one before.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from quire.serve.anthropic.protocol import TTLS, MessagesRequest
from quire.serve.bodies.validation_errors import shown
from quire.serve.errors import bad_request
from quire.serve.http.sse import encode

Json = dict[str, Any]

MARK = "cache_control"
DEFAULT_TTL, LONG_TTL = TTLS


def hint_of(body: MessagesRequest, messages: list[Json]) -> Json:
    """Return the fields of a chat for the marks of a body: the longest lifetime of all, and a key.
    Empty without marks. messages: the conversation as a chat. Raises ApiError for a wrong mark."""
    ttls = [_ttl_of(mark, where) for mark, where in _marks(body)]
    if not ttls:
        return {}
    longest = LONG_TTL if LONG_TTL in ttls else DEFAULT_TTL
    is_system = bool(messages) and messages[0].get("role") == "system"
    begin = [repr(each) for each in messages[: 1 + is_system]]
    digest = hashlib.sha256(encode([begin, repr(body.tools)])).hexdigest()
    return {"prompt_cache_key": digest, "prompt_cache_retention": longest}


def _marks(body: MessagesRequest) -> Iterator[tuple[object, str]]:
    """Yield each mark that is not null, and the field that holds it."""
    if body.cache_control is not None:
        yield body.cache_control, ""
    lists: list[tuple[object, str]] = [(body.system, "system"), (body.tools, "tools")]
    lists += [
        (message.get("content"), f"messages[{index}].content")
        for index, message in enumerate(body.messages)
    ]
    while lists:
        blocks, where = lists.pop()
        for index, block in enumerate(blocks if isinstance(blocks, list) else ()):
            if not isinstance(block, Mapping):
                continue
            if block.get(MARK) is not None:
                yield block[MARK], f"{where}[{index}]."
            if isinstance(block.get("content"), list):  # of a tool's result
                lists.append((block["content"], f"{where}[{index}].content"))


def _ttl_of(mark: object, where: str) -> str:
    field = f"{where}{MARK}"
    if not isinstance(mark, Mapping) or mark.get("type") != "ephemeral":
        raise bad_request(f'{field} must have the type "ephemeral", got {shown(mark)}.', field)
    ttl = mark.get("ttl", DEFAULT_TTL)
    if ttl not in TTLS:
        raise bad_request(f"{field}.ttl must be {' or '.join(TTLS)}, got {shown(ttl)}.", field)
    return str(ttl)
