"""Image parts of messages, in the formats of all endpoints.

    Chat completions  {"type": "image_url", "image_url": {"url": ..., "detail": ...}}
    Responses         {"type": "input_image", "image_url": ..., "detail": ...}
    Messages          {"type": "image", "source": {"type": "base64", "media_type": ...,
                                                   "data": ...}}

All formats become an `ImagePart`. Errors are RequestErrors that name the field.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.base.errors import EngineBusy, RequestError

Part = Mapping[str, Any]

DETAILS = ("auto", "low", "high", "original")
AS_IMAGES = "send an image as an image_url part"
NO_AUDIO = "this server does not accept audio; remove it"
NO_VIDEO = "this server decodes no video files; send frames as image_url parts"
# Types of parts that hold media and are not supported.
REFUSED = {
    "image_pil": f"is an object of Python, which JSON cannot hold; {AS_IMAGES}",
    "image_embeds": f"is not supported: this server encodes images itself; {AS_IMAGES}",
    "audio_embeds": f"is not supported: {NO_AUDIO}",
    "audio_url": f"is not supported: {NO_AUDIO}",
    "input_audio": f"is not supported: {NO_AUDIO}",
    "video_url": f"is not supported: {NO_VIDEO}",
    "input_video": f"is not supported: {NO_VIDEO}",
    "video": f"is not supported: {NO_VIDEO}",
    "image": f"is no part of this endpoint; {AS_IMAGES}",
    "file": f"is not supported: this server reads images only; {AS_IMAGES}",
    "input_file": f"is not supported: this server reads images only; {AS_IMAGES}",
}
IMAGE_TYPES = ("image_url", "input_image")
SOURCES = ("base64", "url")
# Names of fields that hold an image, for `image_chars`; the last one holds a list in Ollama's API.
HOLDERS = ("url", "image_url", "data", "image_pil", "images")
MAX_DEPTH = 8


@dataclass(frozen=True)
class ImagePart:
    """An image of a request. url: data:, https: or file:. where: the field's name in errors."""

    url: str
    where: str


def read_part(part: Part, where: str) -> ImagePart | None:
    """Return the image in a part of a chat or of a Responses input; None for a part without media.

    Raises RequestError for a part with another medium, or for an image without a URL.
    """
    kind = part.get("type")
    if kind is None:  # vLLM accepts parts without a type
        kind = next((name for name in (*IMAGE_TYPES, *REFUSED) if name in part), None)
    if isinstance(kind, str) and kind in REFUSED:
        raise wrong(f"{where}.type", f"{kind!r} {REFUSED[kind]}")
    if kind not in IMAGE_TYPES:
        return None
    field = f"{where}.image_url"
    if part.get("file_id") is not None:
        raise wrong(
            f"{where}.file_id", "cannot be used: uploaded files are for batches; give image_url"
        )
    given, detail = part.get("image_url"), part.get("detail")
    if isinstance(given, Mapping):
        detail = given.get("detail", detail)
        given = given.get("url")
    if detail is not None and detail not in DETAILS:
        raise wrong(f"{where}.detail", f"must be one of {', '.join(DETAILS)}, got {_shown(detail)}")
    if not isinstance(given, str) or not given:
        form = 'must be {"url": ...} with' if kind == "image_url" else "must be"
        raise wrong(field, f"{form} a data: or https: URL, got {_shown(given)}")
    return ImagePart(given, field)


def read_block(block: Part, where: str) -> ImagePart:
    """Return the image in a block of the Messages API. Raises RequestError."""
    source, where = block.get("source"), f"{where}.source"
    kind = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or kind not in SOURCES:
        got = _shown(kind if isinstance(source, Mapping) else source)
        raise wrong(f"{where}.type", f"must be one of {', '.join(SOURCES)}, got {got}")
    if kind == "url":
        return ImagePart(_text(source, "url", where), f"{where}.url")
    media_type, data = _text(source, "media_type", where), _text(source, "data", where)
    return ImagePart(f"data:{media_type};base64,{data}", f"{where}.data")


def take_images(
    messages: Sequence[Any], max_images: int
) -> tuple[list[Mapping[str, Any]], list[ImagePart]]:
    """Return messages with an ImagePart in place of each image, and the ImageParts in order.

    A part may be an ImagePart already. Raises RequestError for more than `max_images` images.
    """
    found: list[ImagePart] = []

    def take(part: Any, where: str) -> Any:
        image = read_part(part, where) if isinstance(part, Mapping) else part
        if not isinstance(image, ImagePart):
            return part
        if len(found) == max_images:
            raise wrong(
                where,
                f"is image {max_images + 1} of the request, which may have at most"
                f" {max_images};"
                " send fewer, or ask the operator for a larger --limit-mm-per-prompt",
            )  # fmt: skip
        found.append(image)
        return image

    return change_parts(messages, take), found


def image_chars(value: Any, depth: int = 0) -> int:
    """Return the number of characters of data URLs and other encoded images in a JSON body."""
    if depth > MAX_DEPTH:
        return 0
    if isinstance(value, Mapping):
        held = (each for name, item in value.items() if name in HOLDERS for each in _listed(item))
        texts = (each for each in held if isinstance(each, str))
        return sum(map(len, texts)) + image_chars(list(value.values()), depth)
    return sum(image_chars(each, depth + 1) for each in value) if isinstance(value, list) else 0


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def wrong(where: str, rule: str) -> RequestError:
    """Return the error for a field. rule: what is wrong, after the field's name."""
    return RequestError(f"{where} {rule}.", where)


def error_at(where: str, error: RequestError) -> RequestError:
    """Return the error with the name of the field; a busy server's error stays unchanged."""
    if isinstance(error, EngineBusy):
        return error
    return RequestError(f"{where}: {error}", where, error.code)


def change_parts(
    messages: Sequence[Any], change: Callable[[Any, str], Any]
) -> list[Mapping[str, Any]]:
    """Return messages with `change` applied to each part of their contents."""
    made = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            where = f"messages[{index}].content"
            parts = [change(part, f"{where}[{i}]") for i, part in enumerate(content)]
            message = {**message, "content": parts}
        made.append(message)
    return made


def _text(source: Part, name: str, where: str) -> str:
    value = source.get(name)
    if not isinstance(value, str) or not value:
        raise wrong(f"{where}.{name}", f"must be a text that is not empty, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    """Return a short repr for an error, which never holds much of an image."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
