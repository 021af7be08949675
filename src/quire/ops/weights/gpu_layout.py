"""How a quantised weight is cut on a GPU, and what that takes. No torch.

Shape legend: N outputs, K inputs, C chunks of inputs, W words of 32 bits of an output's chunk, G
groups of inputs that share a scale. `gpu_weights.py` says what stands in the words.
"""

import math
from dataclasses import dataclass

from quire.base.errors import ConfigError

MOST_WORDS = {4: 16, 8: 32}  # by bits; a chunk is 128 inputs then
LEAST_PLANE = 16  # inputs that one matrix instruction multiplies


@dataclass(frozen=True)
class GPULayout:
    """words: W. group: inputs that share a scale, a part or a multiple of a chunk's; 0: all."""

    bits: int
    words: int
    group: int

    @property
    def planes(self) -> int:
        """Pairs of inputs in a word."""
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
        """Count the scales of an output, those of a chunk's filling with them."""
        if self.group == 0:
            return 1
        return -(-self.num_chunks(num_inputs) * self.chunk_inputs // self.group)


def layout_of(bits: int, group_size: int, num_inputs: int) -> GPULayout:
    """Choose the layout of a weight of 4 or 8 bits whose groups have that many inputs, 0 being all
    of them.

    Raises ConfigError for groups that matrix instructions do not fit.
    """
    most = MOST_WORDS[bits]
    if group_size == 0 or group_size >= num_inputs:
        return GPULayout(bits, most, 0)
    plane = math.gcd(group_size, 2 * most)
    if plane < LEAST_PLANE:
        raise ConfigError(
            f"there is no kernel for weights of {bits} bits with a scale for each {group_size}"
            f" inputs on a GPU: groups must be multiples of {LEAST_PLANE}."
        )
    layout = GPULayout(bits, plane // 2, group_size)
    if group_size % layout.chunk_inputs:  # then scales are repeated
        layout = GPULayout(bits, plane // 2, math.gcd(group_size, layout.chunk_inputs))
    return layout


def gpu_weight_bytes(shape: tuple[int, ...], bits: int, group_size: int, factor_bytes: int) -> int:
    """Count the bytes of a weight [N, K], or [E, N, K] of experts. bits: of an input, for which it
    takes 4 or 8. factor_bytes: of the scale, and the zero, of an output's group."""
    *others, num_inputs = shape
    layout = layout_of(4 if bits <= 4 else 8, group_size, num_inputs)
    codes = 4 * layout.num_chunks(num_inputs) * layout.words
    return math.prod(others) * (codes + factor_bytes * layout.num_groups(num_inputs))
