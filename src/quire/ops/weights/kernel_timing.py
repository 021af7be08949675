"""Timing of the C++ core's matrix products on this CPU, by instruction set and weight format.

A feature's name does not show how fast a CPU executes it, so all instruction sets are timed, at the
two shapes that matter. One row is bound by the bandwidth for weights, a tile of rows by arithmetic.
One thread is timed: other load disturbs it least, and instruction sets differ equally on each core.
Rounds alternate between them and the fastest call counts, so that a busy machine does not affect
only one of them. No torch is needed.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from quire.ops.host.native_types import Core, WeightLayout
from quire.ops.weights.kernel_choice import Speed

INPUTS = 1024
TILE_ROWS, TILE_OUTPUTS = 48, 256
ROW_BYTES = 4 << 20  # bytes of the weight for one row: more than a core's own caches
FLOAT32 = 0  # the core's number for the dtype of activations in its programs
NORMAL_BYTES = 0x38, 0x40  # range of bytes that are normal numbers in every float format
ROUNDS, MIN_ROUNDS = 12, 2
HOPELESS = 10.0  # times as slow as the fastest: no further rounds
FORMAT_S = 0.02  # time limit of the rounds

Call = Callable[[], None]
Clock = Callable[[], float]


def measure_kernels(
    core: Core, variants: Mapping[str, int], formats: Mapping[str, tuple[int, int]]
) -> dict[str, dict[str, Speed]]:
    """Time each instruction set with each format: {format: {variant: speed}}. Takes about 0.1 s.

    variants: the core's names and numbers. formats: the core's number and group size of each
    format.
    """
    weights = _some_weights()
    found = {}
    for name, (number, group) in formats.items():
        shapes = [_shapes(core, number, variant, group) for variant in variants.values()]
        calls = [
            tuple(_product(core, weights, rows, layout) for rows, layout in pair) for pair in shapes
        ]
        seconds = fastest(calls)
        found[name] = {
            variant: Speed(
                core.linear_bytes(pair[0][1].at(0, core)) / row_s,
                2.0 * TILE_ROWS * TILE_OUTPUTS * INPUTS / tile_s,
            )
            for variant, pair, (row_s, tile_s) in zip(variants, shapes, seconds, strict=True)
        }
    return found


def fastest(calls: Sequence[Sequence[Call]], clock: Clock = time.perf_counter) -> list[list[float]]:
    """Return the shortest time of each call, in seconds, in the same nesting as `calls`: a list for
    each candidate.

    Rounds over all candidates run until the time is up. A candidate whose calls were all hopeless
    in the first rounds skips the later ones.
    """
    best = [[float("inf")] * len(candidate) for candidate in calls]
    alive, until = list(range(len(calls))), clock() + FORMAT_S
    for num_done in range(ROUNDS):
        if num_done >= MIN_ROUNDS and clock() >= until:
            break
        for i in alive:
            for j, call in enumerate(calls[i]):
                began = clock()
                call()
                best[i][j] = min(best[i][j], max(clock() - began, 1e-9))
        if num_done + 1 >= MIN_ROUNDS:
            limits = [HOPELESS * min(column) for column in zip(*best, strict=True)]
            alive = [
                i for i in alive if any(s < limit for s, limit in zip(best[i], limits, strict=True))
            ]
    return best


Shape = tuple[int, WeightLayout]  # rows of activations, packed weight


def _shapes(core: Core, format_: int, variant: int, group: int) -> tuple[Shape, Shape]:
    """Return the two timed shapes: one row, and a tile of rows."""
    tile = WeightLayout(format_, variant, TILE_OUTPUTS, INPUTS, group)
    times = ROW_BYTES // core.linear_bytes(tile.at(0, core))
    return (1, tile._replace(outputs=times * TILE_OUTPUTS)), (TILE_ROWS, tile)


def _some_weights() -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """Return bytes that are valid weights in any format. The time of a product does not depend on
    its numbers, unless they are not normal."""
    some = np.random.default_rng(0).integers(*NORMAL_BYTES, 1 << 16, dtype=np.uint8)
    return np.tile(some, ROW_BYTES // len(some))


def _product(
    core: Core,
    weights: "np.ndarray[tuple[int], np.dtype[np.uint8]]",
    rows: int,
    layout: WeightLayout,
) -> Call:
    """Return a call that multiplies `rows` rows by a weight of this layout."""
    weight = layout.at(weights.ctypes.data, core)
    assert core.linear_bytes(weight) <= len(weights)
    outputs, inputs = layout.outputs, layout.inputs
    x = np.linspace(-1, 1, rows * inputs, dtype=np.float32)
    out = np.empty(rows * outputs, np.float32)

    def multiply() -> None:
        core.linear(out.ctypes.data, x.ctypes.data, 0, FLOAT32, rows, inputs, outputs, weight, 1)

    return multiply
