"""A scheduler in a random run, and the state of its blocks, computed block by block."""

from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Any

from quire.base.errors import RequestError
from quire.base.live import CACHED, FREE, HELD, NO_OWNER, PINNED, USED, LiveState
from quire.base.messages import Abort, Hold, Unpin
from quire.kv.table import NULL
from quire.spec.cache_group import CacheGroup
from tests.support.scheduler.pinning_core import FULL, WINDOW, Bench


def random_run(
    seed: int, num_steps: int, groups: tuple[CacheGroup, ...] = (FULL, WINDOW), **settings: Any
) -> Iterator[Bench]:
    """Yield the bench after each step. Prompts share prefixes and have 1 to 3 sequences. Some are
    pinned for a while, retained or aborted, and there is memory for only a few of them."""
    random = Random(seed)
    settings = {"max_num_batched_tokens": 24, "max_num_seqs": 4} | settings
    bench = Bench(num_blocks=28, groups=groups, **settings)
    lines = [[random.randrange(50) for _ in range(60)] for _ in range(6)]
    names: list[str] = []
    for i in range(num_steps):
        if i % 40 == 0:
            with suppress(RequestError):  # running requests may need the memory
                bench.begin_pin(f"pin {i}", lines[0][:18])
        if i % 40 == 30:
            bench.core.control(Unpin(f"pin {i - 30}"))
        if random.random() < 0.4:
            prompt = random.choice(lines)[: random.randint(1, 45)]
            n = random.choice([1, 1, 2, 3])
            try:
                bench.add(f"r{i}", prompt, random.randint(1, 30), n=n, seed=i)
            except RequestError:  # three sequences of this length are too large
                assert n > 1 or bench.pins
            else:
                names.append(f"r{i}")
                if i % 3 == 0:
                    bench.core.control(Hold(f"r{i}", 1000.0))
        if random.random() < 0.05 and names:
            bench.core.control(Abort(random.choice(names)))
        bench.step()
        yield bench


def blocks_of(bench: Bench, g: int) -> list[tuple[int, int, int]]:
    """Return owner, sharers and state of each block, from the tables and the index alone."""
    pool = bench.kv.pools[g]
    holders: list[list[int]] = [[] for _ in range(pool.num_blocks)]
    pinned: set[int] = set()
    for sequence in bench.scheduler.lifecycle.sequences.values():
        for member in sequence.members:
            for block in member.blocks.tables[g].live_blocks if member.row >= 0 else ():
                if block != NULL:
                    holders[block].append(sequence.members[0].arrival)
    for pin in bench.pins.values():
        for block in pin.blocks.tables[g].live_blocks if pin.blocks is not None else ():
            holders[block].append(NO_OWNER)
            pinned.add(block)
    held: set[int] = set()
    for each in bench.scheduler.retained.all():
        for block in each.blocks.tables[g].live_blocks if each.blocks is not None else ():
            if block != NULL:
                holders[block].append(NO_OWNER)
                held.add(block)
    found = []
    for block, numbers in enumerate(holders):
        state = PINNED if block in pinned else HELD if block in held else USED
        if not numbers:
            state = CACHED if pool.is_indexed(block) else FREE
        owner = min((n for n in numbers if n != NO_OWNER), default=NO_OWNER)
        found.append((owner, len(numbers), state))
    return found


def told_blocks(state: LiveState, g: int) -> list[tuple[int, int, int]]:
    """Return the same as a live state reports it."""
    group = state.groups[g]
    columns = (group.owners.tolist(), group.sharers.tolist(), group.states.tolist())
    return list(zip(*columns, strict=True))
