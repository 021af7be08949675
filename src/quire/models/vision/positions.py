"""Positions of a prompt with images, for M-RoPE, the rotation of the Qwen families.

Source: Qwen2-VL, arXiv 2409.12191. A token has three positions: frame, row and column. In text the
three are equal and grow by one with each token. The tokens of an image count from the position at
which the image begins. The text after it continues after the larger side of the grid. So a position
differs from the index of its token; `delta` is that difference for all tokens after the prompt.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Grid = tuple[int, int, int]  # frames, rows and columns of patches


def mrope_positions(
    num_tokens: int,
    images: Sequence[tuple[int, Grid]],
    merge_size: int,
    intervals: Sequence[float] = (),
) -> tuple[Int64, int]:
    """Return the positions of a prompt, int64 [3, num_tokens], and the delta.

    images: for each image or video the index of its first placeholder token and its grid, in the
    order of the prompt. merge_size: patches on each side of the group that one token stands for.
    intervals: for each image the number of positions between two frames (`frame_interval`); 1 for
    all if empty. The position of a later token i is i + delta in all three rows.

    A video of Qwen2-VL and Qwen2.5-VL is one entry of `images`. Qwen3-VL writes a timestamp before
    each frame, so each frame is an entry of its own (`frames_of`).
    """
    intervals = intervals or [1.0] * len(images)
    positions = np.empty((3, num_tokens), np.int64)
    index, position = 0, 0  # of the next token
    for (start, grid), interval in zip(images, intervals, strict=True):
        assert index <= start, "images are in the order of the prompt and do not overlap"
        positions[:, index:start] = np.arange(position, position + start - index)
        position += start - index
        of_image = _image_positions(grid, merge_size, interval)
        index = start + of_image.shape[1]
        assert index <= num_tokens, "the prompt holds all tokens of an image"
        positions[:, start:index] = of_image + position
        position += max(grid[1:]) // merge_size
    positions[:, index:] = np.arange(position, position + num_tokens - index)
    largest = int(positions.max()) if num_tokens else -1
    return positions, largest + 1 - num_tokens


def _image_positions(grid: Grid, merge_size: int, interval: float) -> Int64:
    """Return the positions of an image's tokens, from 0: int64 [3, tokens]."""
    frames, rows, columns = grid
    cell_indices = np.indices((frames, rows // merge_size, columns // merge_size)).reshape(3, -1)
    # In float32, as transformers scales frames, so that both round the same way.
    cell_indices[0] = (cell_indices[0].astype(np.float32) * np.float32(interval)).astype(np.int64)
    return cell_indices


def frame_interval(tokens_per_second: float, seconds_per_frame: float) -> float:
    """Return the number of positions between two frames of a video of Qwen2.5-VL.

    tokens_per_second: field of `vision_config`. seconds_per_frame: time between two entries of the
    grid's first dimension, each of which holds temporal_patch_size pictures.
    """
    return float(np.float32(tokens_per_second) * np.float32(seconds_per_frame))


def frames_of(starts: Sequence[int], grid: Grid) -> list[tuple[int, Grid]]:
    """Return the frames of a video of Qwen3-VL as images. starts: each frame's first token."""
    frames, rows, columns = grid
    assert len(starts) == frames, "each frame has placeholder tokens of its own"
    return [(start, (1, rows, columns)) for start in starts]
