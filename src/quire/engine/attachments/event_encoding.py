"""KV events as bytes: vLLM's messages of what has changed in the prefix index, in msgpack.

A message is `[time, [event, ...], number of the core]`; an event is a map with its `type`, as vLLM
has sent it since its PR #42892 (June 2026; it was an array before):

    BlockStored       block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium,
                      lora_name, extra_keys (if any), group_idx, kv_cache_spec_kind,
                      kv_cache_spec_sliding_window (of a window)
    BlockRemoved      block_hashes, medium, group_idx
    AllBlocksCleared

Names of blocks are whole numbers: the last eight bytes of a digest, as vLLM's are. Of blocks in
host memory there is no parent and no token. A router that reads tokens gets adapters, salts and
images with them.

Events are put together from ready pieces: the core waits while this thread has Python's lock, and
to make an object of each block takes several times as long.
"""

import struct
from collections.abc import Sequence

import msgspec
import numpy as np

from quire.base.messages import Request
from quire.kv.pool import TAKEN
from quire.scheduler.core.sequence import Int32
from quire.scheduler.reuse.index_changes import IndexDelta
from quire.spec.cache_group import CHUNKED, FULL, LATENT, STATE, WINDOW, CacheGroup

DEVICE, HOST = "GPU", "CPU"  # vLLM's names of where blocks are, whatever the device
KINDS = {  # and of what cache groups keep
    FULL: "full_attention", LATENT: "mla_attention", WINDOW: "sliding_window",
    CHUNKED: "chunked_local_attention", STATE: "mamba",
}  # fmt: skip
HASH_BYTES = 8
NIL, UINT64, UINT32, FLOAT64 = b"\xc0", b"\xcf", 0xCE, b"\xcb"
SMALL_MAP, SMALL_ARRAY = 0x80, 0x90  # of up to 15
pack = msgspec.msgpack.Encoder().encode
CLEARED = pack({"type": "AllBlocksCleared"})

# Where a name comes from: a sequence's names, which of them it is, its request, and its tokens
Origin = tuple[list[bytes], int, Request, bytes]


class EventMaker:
    """Makes messages of changes of the index, each with the time at which the last was told."""

    def __init__(self, groups: tuple[CacheGroup, ...], block_size: int, core_id: int) -> None:
        self._end = pack(core_id)
        self._stored = {
            (g, is_on_host): _StoredParts(g, group, block_size, HOST if is_on_host else DEVICE)
            for g, group in enumerate(groups)
            for is_on_host in (False, True)
        }

    def encode(self, told: Sequence[tuple[float, IndexDelta]]) -> bytes:
        """Return the payload of one message for all these changes."""
        events: list[bytes] = []
        for _, delta in told:
            if delta.was_cleared:
                events.append(CLEARED)
            origins = _origins(delta)
            for group, is_on_host, changes in delta.changes:
                parts = self._stored[group, is_on_host]
                _add_events(events, parts, changes, {} if is_on_host else origins)
        at = FLOAT64 + struct.pack(">d", told[-1][0])
        head = bytes((SMALL_ARRAY + 3,)) + at + _array(len(events))
        return b"".join((head, *events, self._end))


class _StoredParts:
    """What all events of blocks of one cache group in one place have alike."""

    def __init__(self, g: int, group: CacheGroup, block_size: int, medium: str) -> None:
        self.num_fields = 10
        self._size = pack("block_size") + pack(block_size) + pack("lora_id") + NIL
        self._size += pack("medium") + pack(medium) + pack("lora_name")
        self._end = pack("group_idx") + pack(g)
        self.removed_end = pack("medium") + pack(medium) + self._end
        self._end += pack("kv_cache_spec_kind") + pack(KINDS[group.kind])
        if group.kind == WINDOW:
            self._end += pack("kv_cache_spec_sliding_window") + pack(group.window)
            self.num_fields += 1
        self.plain_head, self.plain_end = self.around(NIL, b"")

    def around(self, adapter: bytes, keys: bytes) -> tuple[bytes, bytes]:
        """Return what comes before the names of blocks, and after their tokens."""
        head = bytes((SMALL_MAP + self.num_fields + bool(keys),)) + STORED
        return head, self._size + adapter + keys + self._end


STORED = pack("type") + pack("BlockStored") + pack("block_hashes")
REMOVED = bytes((SMALL_MAP + 4,)) + pack("type") + pack("BlockRemoved") + pack("block_hashes")
PARENT, TOKENS, KEYS = pack("parent_block_hash"), pack("token_ids"), pack("extra_keys")


def _origins(delta: IndexDelta) -> dict[bytes, Origin]:
    found: dict[bytes, Origin] = {}
    size = 5 * delta.block_size
    for digests_of, firsts, lasts, requests, tokens in delta.named:
        data, at = b"" if tokens is None else _packed(tokens), 0
        for digests, first, last, request in zip(digests_of, firsts, lasts, requests, strict=True):
            for i in range(first, last):
                found[digests[i]] = digests, i, request, data[at : at + size]
                at += size
    return found


def _add_events(
    events: list[bytes],
    parts: _StoredParts,
    changes: list[bytes],
    origins: dict[bytes, Origin],
) -> None:
    """Add the events of one pool, one for blocks that follow each other."""
    run: list[bytes] = []  # names that go into one event
    is_stored = False  # what that event says
    origin: Origin | None = None
    come_from: list[Origin] = []
    names = iter(changes)
    for name in names:
        is_there = name != TAKEN
        digest = name if is_there else next(names)
        before, origin = origin, origins.get(digest)
        if run and (is_there != is_stored or (is_there and not _is_next(before, origin))):
            events.append(_event(parts, run, come_from, is_stored))
            run, come_from = [], []
        run.append(digest)
        is_stored = is_there
        if origin is not None:
            come_from.append(origin)
    if run:
        events.append(_event(parts, run, come_from, is_stored))


def _is_next(before: Origin | None, origin: Origin | None) -> bool:
    """Tell whether a block goes into the event that the last one is in: all those of which only the
    names are known, or the one behind it in a sequence."""
    if before is None or origin is None:
        return before is origin
    return origin[0] is before[0] and origin[1] == before[1] + 1


def _event(
    parts: _StoredParts, run: list[bytes], come_from: list[Origin], is_stored: bool
) -> bytes:
    if len(run) == 1:
        hashes = b"\x91\xcf" + run[0][-HASH_BYTES:]
    else:
        hashes = _array(len(run)) + b"".join([UINT64 + name[-HASH_BYTES:] for name in run])
    if not is_stored:
        return REMOVED + hashes + parts.removed_end
    if not come_from:
        head, end = parts.plain_head, parts.plain_end
        return b"".join((head, hashes, PARENT, NIL, TOKENS, _array(0), end))
    digests, place, request, tokens = come_from[0]
    parent = UINT64 + digests[place - 1][-HASH_BYTES:] if place else NIL
    head, end = parts.plain_head, parts.plain_end
    if not tokens:
        return b"".join((head, hashes, PARENT, parent, TOKENS, _array(0), end))
    if len(come_from) > 1:
        tokens = b"".join([each[3] for each in come_from])
    if request.adapter_id or request.cache_salt or request.media:
        adapter = pack(request.adapter_id or None)
        size = len(come_from[0][3]) // 5
        keys = _extra_keys(request, place, len(run), size)
        head, end = parts.around(adapter, KEYS + pack(keys) if keys else b"")
    return b"".join((head, hashes, PARENT, parent, TOKENS, _array(len(tokens) // 5), tokens, end))


def _extra_keys(
    request: Request, place: int, num_blocks: int, block_size: int
) -> list[list[str] | None] | None:
    """Return what else the names of blocks are made of, one entry for each block from `place` on:
    the digests of the images that start in it, in hex, the adapter, and in the first block of a
    sequence the salt."""
    adapter = [request.adapter_id] if request.adapter_id else []
    keys: list[list[str] | None] = []
    for block in range(place, place + num_blocks):
        images = [mark.hex() for index, mark in request.marks if index // block_size == block]
        salt = [request.cache_salt] if request.cache_salt and not block else []
        keys.append([*images, *adapter, *salt] or None)
    return keys if any(keys) else None


def _packed(tokens: Int32) -> bytes:
    """Return the numbers, each in five bytes."""
    data = np.empty((len(tokens), 5), np.uint8)
    data[:, 0] = UINT32
    data[:, 1:] = tokens.astype(">u4").view(np.uint8).reshape(-1, 4)
    return data.tobytes()


def _array(num: int) -> bytes:
    """Return the head of an array."""
    if num < 16:
        return bytes((SMALL_ARRAY + num,))
    return struct.pack(">BH", 0xDC, num) if num < 1 << 16 else struct.pack(">BI", 0xDD, num)
