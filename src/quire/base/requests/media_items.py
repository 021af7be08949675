"""Media items of a prompt: the images and videos behind its placeholder tokens.

A media item (an image, a video) occupies one span of placeholder tokens in the prompt. The vision
tower turns its pixels into encoder outputs, one row of numbers per token. These replace the
embeddings of the placeholder tokens (T 4.1.2, 4.3.2). The outputs stand in the slots of an encoder
cache; a plan says which items a step encodes into which slots, and which rows read them.
"""

import msgspec
import numpy as np
import numpy.typing as npt

from quire.base.errors import RequestError

Int32 = npt.NDArray[np.int32]


class MediaItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A media item and its span in the prompt.

    start, num_tokens: the span of its placeholder tokens.
    digest: 32 bytes that cover all that determines the encoder outputs and the positions of its
    tokens: the pixels after preprocessing, the table, the grid and the kind.
    kind: `image` or `video`.
    grid: the layout of the pixels, as the model family describes it.
    pixels, shape: uint8, C order. table: float32 [3, 256], the model input for each value of each
    channel. Both are empty where only the span matters, as in a `RowStart`.
    seconds_per_grid: of a video, between two entries of the grid's first dimension; 0.0: no video.
    is_whole: a step computes all tokens of the item that are not computed yet, or none, because
    they attend to each other in both directions.
    """

    start: int
    num_tokens: int
    digest: bytes
    kind: str = "image"
    grid: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    pixels: bytes = b""
    table: bytes = b""
    seconds_per_grid: float = 0.0
    is_whole: bool = False

    @property
    def end(self) -> int:
        """Return the index of the first token after the span."""
        return self.start + self.num_tokens

    def at(self, start: int) -> "MediaItem":
        """Return the item with its span at another place."""
        return msgspec.structs.replace(self, start=start)

    @property
    def without_pixels(self) -> "MediaItem":
        """Return the span and the digest, without what the vision tower reads."""
        return msgspec.structs.replace(self, shape=(), pixels=b"", table=b"")


def items_before(
    items: tuple[MediaItem, ...], num_tokens: int, param: str = "num_tokens"
) -> tuple[MediaItem, ...]:
    """Return the items among the first tokens of a prompt. Raises RequestError, which names the
    parameter, if the last of these tokens is inside an item, which cannot be cut."""
    for item in items:
        if item.start < num_tokens < item.end:
            raise RequestError(
                f"token {num_tokens} is inside the {item.kind} at tokens {item.start} to"
                f" {item.end - 1}; cut the prompt at token {item.start} or {item.end}.",
                param,
            )
    return tuple(item for item in items if item.end <= num_tokens)


class EncoderInput(msgspec.Struct, frozen=True):
    """A step encodes an item into these slots of the encoder cache, int32 [item.num_tokens],
    before its forward pass."""

    item: MediaItem
    slots: Int32


class EncoderRead(msgspec.Struct, frozen=True):
    """A row's tokens from `position` on, which the step computes, take the encoder outputs in
    these slots, int32 [n], in the place of their embeddings."""

    row: int
    position: int
    slots: Int32
