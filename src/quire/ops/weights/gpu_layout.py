"""Layout of a quantised weight on a GPU, and its size. This module does not import torch.

Shape legend: N outputs, K inputs, C chunks of inputs, W words of 32 bits of an output's chunk, G
groups of inputs that share a scale. `gpu_weights.py` defines the content of the words.
"""

import math
from dataclasses import dataclass

from quire.base.errors import ConfigError

MAX_WORDS = {4: 16, 8: 32}  # by bits; with so many words, a chunk is 128 inputs
MIN_PLANE_INPUTS = 16  # inputs that one matrix instruction multiplies


@dataclass(frozen=True)
class GPULayout:
    """Layout of a weight. words: W. group: inputs that share a scale, a part or a multiple of a
    chunk; 0: all."""

    bits: int
    words: int
    group: int

    @property
    def planes(self) -> int:
        """Pairs of inputs in a word, and planes of a chunk."""
        return 16 // self.bits

    @property
    def plane_inputs(self) -> int:
        return 2 * self.words

    @property
    def chunk_inputs(self) -> int:
        return self.planes * self.plane_inputs

    def num_chunks(self, num_inputs: int) -> int:
        return -(-num_inputs // self.chunk_inputs)

    def num_groups(self, num_inputs: int) -> int:
        """Return the number of scales of an output, with scales of a chunk's padding."""
        if self.group == 0:
            return 1
        return -(-self.num_chunks(num_inputs) * self.chunk_inputs // self.group)


def layout_of(bits: int, group_size: int, num_inputs: int) -> GPULayout:
    """Choose the layout of a weight of 4 or 8 bits with groups of `group_size` inputs, 0 for one
    group.

    Raises ConfigError for groups that do not fit matrix instructions.
    """
    max_words = MAX_WORDS[bits]
    if group_size == 0 or group_size >= num_inputs:
        return GPULayout(bits, max_words, 0)
    plane = math.gcd(group_size, 2 * max_words)
    if plane < MIN_PLANE_INPUTS:
        raise ConfigError(
            f"there is no kernel for weights of {bits} bits with a scale for each {group_size}"
            f" inputs on a GPU: groups must be multiples of {MIN_PLANE_INPUTS}."
        )
    layout = GPULayout(bits, plane // 2, group_size)
    if group_size % layout.chunk_inputs:  # smaller groups, with repeated scales
        layout = GPULayout(bits, plane // 2, math.gcd(group_size, layout.chunk_inputs))
    return layout


def gpu_weight_bytes(shape: tuple[int, ...], bits: int, group_size: int, factor_bytes: int) -> int:
    """Return the bytes of a weight [N, K], or [E, N, K] of experts. bits: bits per weight, stored
    as 4 or 8. factor_bytes: bytes of scale and zero point, per output and group."""
    *others, num_inputs = shape
    layout = layout_of(4 if bits <= 4 else 8, group_size, num_inputs)
    codes = 4 * layout.num_chunks(num_inputs) * layout.words
    return math.prod(others) * (codes + factor_bytes * layout.num_groups(num_inputs))
