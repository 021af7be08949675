"""Messages between the scheduler's KV tiers and the workers of stores.

A store keeps blocks outside of this process, in a directory or on a server. A block's name is its
cache group and the digest of its token chain (`kv/digest.py`). The digest's root covers the model's
fingerprint and the salt, so equal names mean equal contents.

The scheduler sends orders to a store's worker, which answers each order once. Answers are control
messages: they enter the scheduler through its door `control`, so they can be recorded and replayed.
An answer carries its order's ticket, which is unique.
"""

import msgspec

BlockName = tuple[int, bytes]  # cache group, digest (32 bytes)
Item = tuple[int, bytes, int]  # cache group, digest, host block
KEEP_AT_END_S = 30.0  # time to write cached blocks to stores when an engine ends


class LookUp(msgspec.Struct, frozen=True, tag=True):
    """Order: report which blocks the store has."""

    store: int  # index of the store
    request_id: str
    names: tuple[BlockName, ...]
    ticket: int = 0
    wait_s: float = 0.0  # time to repeat the look-up while the store has none of the blocks


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Order: copy blocks from the store to host blocks, which are reserved until the answer."""

    store: int
    ticket: int
    items: tuple[Item, ...]


class Keep(msgspec.Struct, frozen=True, tag=True):
    """Order: copy host blocks to the store. They must not change before the answer."""

    store: int
    ticket: int
    items: tuple[Item, ...]


class Remove(msgspec.Struct, frozen=True, tag=True):
    """Order: remove blocks whose contents may be wrong, including blocks of earlier `Keep` orders
    that are still being written."""

    store: int
    ticket: int
    names: tuple[BlockName, ...]


Order = LookUp | Fetch | Keep | Remove


class LookedUp(msgspec.Struct, frozen=True, tag=True):
    """Control: the result of a look-up, in the order of its names. The store may remove a block
    between the look-up and the fetch."""

    store: int
    request_id: str
    found: list[bool]
    ticket: int = 0


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """Control: the result of a fetch, in the order of its items."""

    store: int
    ticket: int
    ok: list[bool]  # whether the host block now holds the block; False if it was not written
    num_bytes: int  # bytes of all blocks that are ok
    duration_s: float  # time since the first read, without waiting; 0.0 without reads


class Kept(msgspec.Struct, frozen=True, tag=True):
    """Control: the result of a `Keep` order, in the order of its items."""

    store: int
    ticket: int
    ok: list[bool]  # whether the store has the block now
    num_bytes: int  # bytes written, without blocks that the store had already
    duration_s: float
    is_lasting: bool = True  # whether blocks outlive their copies in host memory


class Removed(msgspec.Struct, frozen=True, tag=True):
    """Control: the result of a `Remove` order, in the order of its names."""

    store: int
    ticket: int
    ok: list[bool]  # True if the store lacks the block; the engine ignores others until rewritten


Answer = LookedUp | Fetched | Kept | Removed
