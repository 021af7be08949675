"""Tiles and numbers of programs of stream-K products. Nothing here imports Triton.

Shape legend: as in `stream_k.py`.
"""

import functools
from collections import Counter
from dataclasses import dataclass

MIN_ROWS, MAX_ROWS = 5, 64
MIN_COLUMNS = 16  # of the matrix instruction
BLOCK_K = 64  # inputs of a step: 128 bytes of each row
OUTPUTS = (128, 256)  # rows of the weight in a tile
# Below this the sums that programs share cost more than the library loses.
MIN_NUMBERS = 700_000  # of the weight, for each row of x


@dataclass(frozen=True)
class Costs:
    """Rates and latencies of a device, by default an H200. `cache` and `arrival_us` are
    assumptions."""

    memory: float = 4.35e6  # bytes per microsecond
    cache: float = 48e3  # bytes per microsecond, from the L2 cache to a multiprocessor
    start_us: float = 2.04  # until the first step of a tile has its data
    arrival_us: float = 1.02  # a fence and an atomic addition, before shared sums are read


@dataclass(frozen=True)
class Tile:
    """Sizes of a program's product: rows of the weight, and rows of x."""

    outputs: int
    rows: int

    @property
    def num_warps(self) -> int:
        return 8 if self.outputs > 128 else 4

    @property
    def stage_bytes(self) -> int:
        return (self.outputs + self.rows) * BLOCK_K * 2

    @property
    def sums_bytes(self) -> int:
        return self.outputs * self.rows * 4


@dataclass(frozen=True)
class Sharing:
    """The work of all programs. parts: of tiles. partial: parts that are not a whole tile. tiles:
    with such parts. largest: maximum number of programs that share a tile."""

    parts: int
    partial: int
    tiles: int
    largest: int


@dataclass(frozen=True)
class Schedule:
    """How a product is computed."""

    tile: Tile
    num_programs: int

    def us(self, num_rows: int, num_inputs: int, costs: Costs) -> float:
        """Return the expected time for a weight of so many rows, after the first start.

        All programs read weights from memory, and x and shared sums from the cache. Then one
        program adds the sums of the tile that most programs share, and loads all but its own.
        """
        num_tiles, weight = -(-num_rows // self.tile.outputs), 2 * num_rows * num_inputs
        shared = sharing(num_tiles, num_inputs // BLOCK_K, self.num_programs)
        cached = weight + 2 * self.tile.rows * num_inputs * num_tiles
        cached += (2 * shared.partial - shared.tiles) * self.tile.sums_bytes
        reading = max(weight / costs.memory, cached / (costs.cache * self.num_programs))
        starts = (shared.parts / self.num_programs - 1) * costs.start_us
        adding = max(0, shared.largest - 1) * self.tile.sums_bytes / costs.cache
        return reading + starts + adding + costs.arrival_us * (shared.largest > 0)


@functools.cache
def schedule_for(num_tokens: int, num_rows: int, num_inputs: int, num_cores: int) -> Schedule:
    """Return the fastest schedule for T tokens and a weight [E, I]. The programs are as many as
    multiprocessors, or a multiple of the tiles, so that each tile has equal parts."""
    rows = max(MIN_COLUMNS, 1 << (num_tokens - 1).bit_length())
    choices = []
    for tile in (Tile(outputs, rows) for outputs in OUTPUTS):
        num_tiles = -(-num_rows // tile.outputs)
        num_steps = num_tiles * (num_inputs // BLOCK_K)
        for programs in (num_cores, num_cores // num_tiles * num_tiles or num_cores):
            choices.append(Schedule(tile, min(programs, num_steps)))
    return min(choices, key=lambda choice: choice.us(num_rows, num_inputs, Costs()))


def pays_off(num_tokens: int, weight_numbers: int) -> bool:
    """Return whether stream-K is expected to beat the library."""
    return MIN_ROWS <= num_tokens <= MAX_ROWS and weight_numbers >= MIN_NUMBERS * num_tokens


@functools.cache
def sharing(num_tiles: int, num_steps: int, num_programs: int) -> Sharing:
    """Return how programs share tiles of num_steps steps each."""
    parts, partial = 0, Counter[int]()
    total = num_tiles * num_steps
    for program in range(num_programs):
        begin, end = (at * total // num_programs for at in (program, program + 1))
        for tile in range(begin // num_steps, -(-end // num_steps)):
            parts += 1
            if begin > tile * num_steps or end < (tile + 1) * num_steps:
                partial[tile] += 1
    return Sharing(parts, partial.total(), len(partial), max(partial.values(), default=0))
