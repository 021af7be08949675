"""What the planning half of the KV tiers and the moving half of a store say to each other.

A store keeps blocks outside of this process: a directory, a server. A block is named by its cache
group and the digest of its tokens' chain (`kv/digest.py`); the digest's root covers the model's
fingerprint and the salt, so equal names mean equal contents.

Orders go to a store's worker, and each is answered once. Answers are control messages: they come
through the second door, so that they can be recorded and replayed. An answer has the ticket of its
order; every order has another one.
"""

import msgspec

BlockName = tuple[int, bytes]  # cache group, digest (32 bytes)
Item = tuple[int, bytes, int]  # cache group, digest, host block
KEEP_AT_END_S = 30.0  # for what is cached to be kept in stores when an engine ends


class LookUp(msgspec.Struct, frozen=True, tag=True):
    """Order: which of these blocks does the store have? store: its number. wait_s: how long to look
    again and again, as long as it has none."""

    store: int
    request_id: str
    names: tuple[BlockName, ...]
    ticket: int = 0
    wait_s: float = 0.0


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


class Remove(msgspec.Struct, frozen=True, tag=True):
    """Order: these blocks may hold wrong numbers. Nobody is to find them any more, also not those
    that `Keep` orders before this one are still to bring."""

    store: int
    ticket: int
    names: tuple[BlockName, ...]


Order = LookUp | Fetch | Keep | Remove


class LookedUp(msgspec.Struct, frozen=True, tag=True):
    """Control: what a look-up found, in the order of its names. It is no promise: a block may be
    gone when it is fetched."""

    store: int
    request_id: str
    found: list[bool]
    ticket: int = 0


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
    those that were written, which leaves out what the store had already. is_lasting: not only until
    host memory loses them."""

    store: int
    ticket: int
    ok: list[bool]
    num_bytes: int
    duration_s: float
    is_lasting: bool = True


class Removed(msgspec.Struct, frozen=True, tag=True):
    """Control: what the store has removed, or never had, in the order of the names. This engine
    does not use the others either, until they are put there anew."""

    store: int
    ticket: int
    ok: list[bool]


Answer = LookedUp | Fetched | Kept | Removed
