"""The interface of vision towers.

Input: images as uint8 pixels with a table of values (`render/media/`). Output: for each image one
tensor [num_tokens, W] in the tower's dtype, whose rows replace the embeddings of the image's
placeholder tokens. One file per family; `layers.py` and `attention.py` hold what they share.

A tower embeds patches, runs its blocks on them, and makes rows from the resulting states.
On a CPU the C++ core runs the blocks (`program.py`).

A tower computes each image separately. So the bits of its result do not depend on the other images
of a call, in whatever order a device's kernels sum.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from quire.models.parts.layers import ParamFactory
from quire.models.vision.attention import BlockAttention, RangeAttention
from quire.models.vision.program import BlockProgram, trace_blocks
from quire.spec.media_families import EncoderSize


class ImageArrays(Protocol):
    """The arrays of one preprocessed image, such as a `ProcessedImage` (`render/media/`)."""

    @property
    def pixels(self) -> npt.NDArray[np.uint8]:
        """Return the pixels; each family defines the axes."""
        ...

    @property
    def table(self) -> npt.NDArray[np.float32]:
        """Return the model input for each value of each channel, [3, 256]."""
        ...

    @property
    def grid(self) -> tuple[int, ...]:
        """Return the layout of the pixels; each family defines the numbers."""
        ...


class VisionTower(nn.Module):
    """A vision encoder and its projector, up to the width of the text model.

    prefixes: prefixes of the canonical names of its tensors. unused: prefixes of the names of
    tensors that its layers do not need. width: values in a row of the result (W).
    """

    prefixes: tuple[str, ...]
    unused: tuple[str, ...] = ()
    blocks: nn.ModuleList

    def __init__(self, width: int, factory: ParamFactory) -> None:
        super().__init__()
        self.width, self.dtype, self.device = width, factory.dtype, factory.device
        self._program: BlockProgram | None = None
        self._is_traced = False

    def forward(self, images: Sequence[ImageArrays]) -> list[torch.Tensor]:
        """Return the embeddings of each image, [num_tokens, W]."""
        return [self.encode(image) for image in images]

    def encode(self, image: ImageArrays) -> torch.Tensor:
        """Return the embeddings of one image, [num_tokens, W]."""
        raise NotImplementedError

    def states(
        self, x_TD: torch.Tensor, attention: BlockAttention, rotary_rows: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Run the blocks on embedded patches [T, D]. Return the states that the projector reads,
        [T, D] each; by default the last one."""
        for block in self.blocks:
            x_TD = block(x_TD, attention, 0, rotary_rows)
        return [x_TD]

    def run_blocks(
        self,
        x_TD: torch.Tensor,
        cuts: Sequence[Sequence[int]],
        rotary_rows: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Return the states of an image, [T, D] each. cuts: bounds of the ranges of attention.

        The blocks are traced with the first image, when all weights are packed.
        """
        if not self._is_traced:
            self._program = trace_blocks(self.states, len(cuts), x_TD, rotary_rows)
            self._is_traced = True
        if self._program is not None:
            return self._program.run(x_TD, cuts, rotary_rows)
        return self.states(x_TD, RangeAttention(cuts), rotary_rows)

    @property
    def max_tokens(self) -> int | None:
        """Return the maximum number of tokens of an image; None if its size is not bounded."""
        return None

    @property
    def size(self) -> EncoderSize:
        """Return the sizes that determine the tower's memory besides its weights."""
        return EncoderSize(self.width, self.numbers_per_token, self.max_tokens)

    @property
    def numbers_per_token(self) -> int:
        """Return the peak number of values that encoding holds per token of an image."""
        raise NotImplementedError

    def values(self, image: ImageArrays, channel_axis: int) -> torch.Tensor:
        """Return the model input for an image, in the shape of its pixels.

        The table's float32 values are cast to the tower's dtype. channel_axis: axis of the pixels.
        """
        table = torch.tensor(image.table, device=self.device).to(self.dtype)
        channels = torch.tensor(image.pixels, device=self.device).unbind(channel_axis)
        found = [row[channel.int()] for row, channel in zip(table, channels, strict=True)]
        return torch.stack(found, channel_axis)

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return the names that layers may use for a tensor of the weight files.

        Some checkpoints add the prefix `model.`, or `vision_model.` after `vision_tower.`.
        """
        plain = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
        return name, plain

    def owns(self, name: str) -> bool:
        """Return whether a tensor of the weight files belongs to the tower."""
        return self.names_of(name)[-1].startswith(self.prefixes)

    def ignores(self, name: str) -> bool:
        """Return whether no layer needs this tensor, which the tower owns."""
        return self.names_of(name)[-1].startswith(self.unused)


def numbers_of_patch(pixels: int, width: int, inner: int) -> int:
    """Return the peak number of values that a tower holds for a patch.

    pixels: values of the patch in all channels and frames. They exist as indices, as values and as
    patches. width: width of the inputs, residual stream, norm, queries, keys, values, outputs and
    states. Attention reads a second copy of keys and values. inner: inner size of feed-forward
    layers. Gate, up and their product exist, and a copy of the product in 16 bits for the core.
    """
    return max(3 * pixels + width, 16 * width, 10 * width + 7 * inner // 2)
