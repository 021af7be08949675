"""What the planning half of the KV tiers and the moving half of a store say to each other.

A store keeps blocks outside of this process: a directory, a server. A block is named by its cache
group and the digest of its tokens' chain (`kv/digest.py`); the digest's root covers the model's
fingerprint and the salt, so equal names mean equal contents.

Orders go to a store's worker, and each is answered once. Answers are control messages: they come
through the second door, so that they can be recorded and replayed.
"""

import msgspec

BlockName = tuple[int, bytes]  # cache group, digest (32 bytes)
Item = tuple[int, bytes, int]  # cache group, digest, host block


class LookUp(msgspec.Struct, frozen=True, tag=True):
    """Order: which of these blocks does the store have? store: its number."""

    store: int
    request_id: str
    names: tuple[BlockName, ...]


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Order: bring blocks into host blocks. Nobody else may use these before the answer."""

    store: int
    ticket: int
    items: tuple[Item, ...]


class Keep(msgspec.Struct, frozen=True, tag=True):
    """Order: copy host blocks into the store. They must not change before the answer."""

    store: int
    ticket: int
    items: tuple[Item, ...]


Order = LookUp | Fetch | Keep


class LookedUp(msgspec.Struct, frozen=True, tag=True):
    """Control: what a look-up found, in the order of its names. It is no promise: a block may be
    gone when it is fetched."""

    store: int
    request_id: str
    found: list[bool]


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """Control: what a fetch brought, in the order of its items.

    ok: the host block holds that block's bytes; if False, it was not written. num_bytes: of all
    that are ok. duration_s: from the first read on, without waiting; 0.0 if nothing was read.
    """

    store: int
    ticket: int
    ok: list[bool]
    num_bytes: int
    duration_s: float


class Kept(msgspec.Struct, frozen=True, tag=True):
    """Control: what the store keeps now, in the order of the items; as in `Fetched`. num_bytes: of
    those that were written, which leaves out what the store had already."""

    store: int
    ticket: int
    ok: list[bool]
    num_bytes: int
    duration_s: float


Answer = LookedUp | Fetched | Kept
