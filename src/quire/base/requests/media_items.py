"""Media items of a prompt: its images and videos.

A media item occupies one span of placeholder tokens in the prompt. The vision tower turns its
pixels into encoder outputs, one feature vector per token. They replace the embeddings of the
placeholder tokens (T 4.1.2, 4.3.2). The outputs stay in the slots of an encoder cache. A plan lists
the items that a step encodes, their slots, and the rows that read the slots.
"""

import msgspec
import numpy as np
import numpy.typing as npt

from quire.base.errors import RequestError

Int32 = npt.NDArray[np.int32]


class MediaItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A media item and its span in the prompt."""

    start: int  # index of the first placeholder token
    num_tokens: int  # placeholder tokens
    # 32 bytes over all that determines outputs and positions: pixels, table, grid and kind
    digest: bytes
    kind: str = "image"  # image or video
    grid: tuple[int, ...] = ()  # layout of the pixels, as the model family defines it
    shape: tuple[int, ...] = ()  # shape of the pixels
    pixels: bytes = b""  # uint8, C order; empty if only the span matters, as in a `RowStart`
    table: bytes = b""  # float32 [3, 256], model input for each value of each channel; or empty
    seconds_per_grid: float = 0.0  # seconds per entry of a video's first grid dimension
    # whether one step must compute all remaining tokens, because they attend in both directions
    is_whole: bool = False

    @property
    def end(self) -> int:
        """Return the index of the first token after the span."""
        return self.start + self.num_tokens

    def at(self, start: int) -> "MediaItem":
        """Return the item with its span moved to start at another index."""
        return msgspec.structs.replace(self, start=start)

    @property
    def without_pixels(self) -> "MediaItem":
        """Return the item without the vision tower's input."""
        return msgspec.structs.replace(self, shape=(), pixels=b"", table=b"")


def items_before(
    items: tuple[MediaItem, ...], num_tokens: int, param: str = "num_tokens"
) -> tuple[MediaItem, ...]:
    """Return the items within the first `num_tokens` tokens of a prompt.

    Raises RequestError, with `param` as its field, if this would cut an item."""
    for item in items:
        if item.start < num_tokens < item.end:
            raise RequestError(
                f"token {num_tokens} is inside the {item.kind} at tokens {item.start} to"
                f" {item.end - 1}; cut the prompt at token {item.start} or {item.end}.",
                param,
            )
    return tuple(item for item in items if item.end <= num_tokens)


class EncoderInput(msgspec.Struct, frozen=True):
    """An item that a step encodes before its forward pass, and its slots of the encoder cache."""

    item: MediaItem
    slots: Int32  # [item.num_tokens]


class EncoderRead(msgspec.Struct, frozen=True):
    """A span of a row in the step that takes encoder outputs in place of embeddings."""

    row: int
    position: int  # position of the first token
    slots: Int32  # [n] slots of the encoder cache, one per token
