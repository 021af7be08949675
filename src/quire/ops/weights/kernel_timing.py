"""Times the C++ core's matrix products on this CPU, by instruction set and weight format. No torch.

A feature's name does not say how fast a CPU carries it out, so every instruction set that runs here
is timed, at the two shapes that matter: one row, bound by the weights that stream through, and a
tile of rows, bound by arithmetic. One thread only: it is disturbed the least by what else runs, and
what differs between instruction sets differs on each core alike. Rounds alternate between the
instruction sets and the fastest call counts, so that a busy machine hits none of them alone.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from quire.ops.host.native_types import Core, WeightLayout
from quire.ops.weights.kernel_choice import Speed

INPUTS = 1024
TILE_ROWS, TILE_OUTPUTS = 48, 256
ROW_BYTES = 4 << 20  # of the weight that one row streams through: more than a core's own caches
FLOAT32 = 0  # the core's number for activations, as they come in its programs
NORMAL_BYTES = 0x38, 0x40  # of these, every float format makes normal numbers
ROUNDS, FEWEST_ROUNDS = 12, 2
HOPELESS = 10.0  # times as slow as the fastest: not timed again
FORMAT_S = 0.02  # after that no more rounds

Call = Callable[[], None]
Clock = Callable[[], float]


def measure_kernels(
    core: Core, variants: Mapping[str, int], formats: Mapping[str, tuple[int, int]]
) -> dict[str, dict[str, Speed]]:
    """Time every instruction set with every format: {format: {variant: speed}}. Takes about 0.1 s.

    variants: the core's names and numbers. formats: the core's number of what is timed for each,
    and inputs of its groups.
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
    """Return the shortest time of every call, in seconds, like `calls`: a list for each candidate.

    Rounds over all candidates, until the time is up; who was hopeless in all of the first rounds is
    left out of the later ones.
    """
    best = [[float("inf")] * len(candidate) for candidate in calls]
    alive, until = list(range(len(calls))), clock() + FORMAT_S
    for num_done in range(ROUNDS):
        if num_done >= FEWEST_ROUNDS and clock() >= until:
            break
        for i in alive:
            for j, call in enumerate(calls[i]):
                began = clock()
                call()
                best[i][j] = min(best[i][j], max(clock() - began, 1e-9))
        if num_done + 1 >= FEWEST_ROUNDS:
            limits = [HOPELESS * min(column) for column in zip(*best, strict=True)]
            alive = [
                i for i in alive if any(s < most for s, most in zip(best[i], limits, strict=True))
            ]
    return best


Shape = tuple[int, WeightLayout]  # rows of activations, and a packed weight


def _shapes(core: Core, format_: int, variant: int, group: int) -> tuple[Shape, Shape]:
    """One row, and a tile of rows."""
    tile = WeightLayout(format_, variant, TILE_OUTPUTS, INPUTS, group)
    times = ROW_BYTES // core.linear_bytes(tile.at(0, core))
    return (1, tile._replace(outputs=times * TILE_OUTPUTS)), (TILE_ROWS, tile)


def _some_weights() -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """Bytes that any format can take for weights: how long a product takes does not depend on what
    is multiplied, unless that is not a normal number."""
    some = np.random.default_rng(0).integers(*NORMAL_BYTES, 1 << 16, dtype=np.uint8)
    return np.tile(some, ROW_BYTES // len(some))


def _product(
    core: Core,
    weights: "np.ndarray[tuple[int], np.dtype[np.uint8]]",
    rows: int,
    layout: WeightLayout,
) -> Call:
    weight = layout.at(weights.ctypes.data, core)
    assert core.linear_bytes(weight) <= len(weights)
    outputs, inputs = layout.outputs, layout.inputs
    x = np.linspace(-1, 1, rows * inputs, dtype=np.float32)
    out = np.empty(rows * outputs, np.float32)

    def multiply() -> None:
        core.linear(out.ctypes.data, x.ctypes.data, 0, FLOAT32, rows, inputs, outputs, weight, 1)

    return multiply
