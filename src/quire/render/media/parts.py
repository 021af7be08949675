"""Find images and videos in messages, and replace them by the parts that templates expect.

    given       {"type": "image_url", "image_url": {"url": ...}}      and other spellings
    to render   {"type": "image"}                                     for transformers' templates

Output: the new messages, and the sources of the media in the order of the parts. This module reads
no source.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.base.errors import RequestError
from quire.render.media.prepared import IMAGE, VIDEO

# Part type -> kind of media, and the field that holds its source.
PART_TYPES = {
    "image_url": (IMAGE, "image_url"),
    "input_image": (IMAGE, "image_url"),
    "image_pil": (IMAGE, "image_pil"),
    "image": (IMAGE, "image"),
    "video": (VIDEO, "video"),
}


@dataclass(frozen=True)
class MediaPart:
    """An image or a video of a conversation."""

    kind: str
    source: Any  # URL or path as text, or a Python object: a picture, an array, frames
    where: str  # the part's name in errors, such as `messages[0].content[1]`


def take_media(messages: Sequence[Any]) -> tuple[Sequence[Any], list[MediaPart]]:
    """Return messages with plain parts in place of images and videos, and the media.

    Messages without media are returned unchanged. Raises RequestError if a part has no source.
    """
    found: list[MediaPart] = []
    replaced = [_replaced(message, f"messages[{i}]", found) for i, message in enumerate(messages)]
    return (replaced if found else messages), found


def media_kinds(messages: object) -> list[str]:
    """Return the kinds of the plain parts that `take_media` leaves, in their order."""
    if not isinstance(messages, Sequence):
        return []
    contents = [each.get("content") for each in messages if isinstance(each, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return [str(part["type"]) for part in parts if is_plain(part)]


def refuse_media(prompt: object, feature: str) -> None:
    """Raise RequestError if a prompt has images or videos in any form. feature: name for the
    error."""
    if isinstance(prompt, Mapping):
        has_media = bool(prompt.get("multi_modal_data"))
    else:
        messages = prompt if isinstance(prompt, Sequence) and not isinstance(prompt, str) else ()
        has_media = bool(media_kinds(messages) or take_media(messages)[1])
    if has_media:
        raise RequestError(f"{feature} does not accept images or videos; send text only.")


def is_plain(part: object) -> bool:
    """Return whether a part is the placeholder of an image or a video, as templates take it."""
    return isinstance(part, Mapping) and len(part) == 1 and part.get("type") in (IMAGE, VIDEO)


def _replaced(message: Any, where: str, found: list[MediaPart]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, Sequence) or isinstance(content, str):
        return message
    num_before = len(found)
    parts = [_plain(part, f"{where}.content[{i}]", found) for i, part in enumerate(content)]
    return {**message, "content": parts} if len(found) > num_before else message


def _plain(part: Any, where: str, found: list[MediaPart]) -> Any:
    if not isinstance(part, Mapping):
        return part
    kind_and_field = PART_TYPES.get(str(part.get("type") or _only_field(part)))
    if kind_and_field is None:
        return part
    kind, field = kind_and_field
    source = part.get(field)
    if isinstance(source, Mapping):
        source = source.get("url")
    if source is None:
        raise RequestError(f"{where} has no {field}; give the {kind} there.", where)
    found.append(MediaPart(kind, source, where))
    return {"type": kind}


def _only_field(part: Mapping[str, Any]) -> str:
    """Return the type of a part without a type field, from its other field, as vLLM does."""
    return next((name for name in PART_TYPES if name in part), "")
