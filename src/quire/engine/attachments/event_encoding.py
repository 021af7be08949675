"""KV events as bytes: vLLM's messages about changes of the prefix index, in msgpack.

A message is `[time, [event, ...], number of the core]`. An event is a map with its `type`, as vLLM
sends it since its PR #42892 (June 2026; before, it was an array):

    BlockStored       block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium,
                      lora_name, extra_keys (if any), group_idx, kv_cache_spec_kind,
                      kv_cache_spec_sliding_window (of a window)
    BlockRemoved      block_hashes, medium, group_idx
    AllBlocksCleared

A block's name is an integer: the last eight bytes of its digest, as in vLLM. Events of blocks in
host memory have no parent and no tokens. Adapters, salts and images are sent only with tokens.

Events are joined from encoded pieces, since an object for each block takes several times as long.
The core waits while this thread has Python's lock.
"""

import struct
from collections.abc import Sequence

import msgspec
import numpy as np

from quire.base.messages import Request
from quire.kv.pool import NAME_REMOVED
from quire.scheduler.core.sequence import Int32
from quire.scheduler.reuse.index_changes import IndexDelta
from quire.spec.cache_group import CHUNKED, FULL, LATENT, STATE, WINDOW, CacheGroup

DEVICE, HOST = "GPU", "CPU"  # vLLM's names of where a block is, on any device
KINDS = {  # vLLM's names of kinds of cache groups
    FULL: "full_attention", LATENT: "mla_attention", WINDOW: "sliding_window",
    CHUNKED: "chunked_local_attention", STATE: "mamba",
}  # fmt: skip
HASH_BYTES = 8
NIL, UINT64, UINT32, FLOAT64 = b"\xc0", b"\xcf", 0xCE, b"\xcb"
SMALL_MAP, SMALL_ARRAY = 0x80, 0x90  # for up to 15 entries
pack = msgspec.msgpack.Encoder().encode
CLEARED = pack({"type": "AllBlocksCleared"})

# Origin of a block's name: the sequence's names, its index there, the request, packed tokens.
Origin = tuple[list[bytes], int, Request, bytes]


class EventMaker:
    """Encoder of messages about changes of the index. A message has the time of its last change."""

    def __init__(self, groups: tuple[CacheGroup, ...], block_size: int, core_id: int) -> None:
        self._end = pack(core_id)
        self._stored = {
            (g, is_on_host): _StoredParts(g, group, block_size, HOST if is_on_host else DEVICE)
            for g, group in enumerate(groups)
            for is_on_host in (False, True)
        }

    def encode(self, timed_deltas: Sequence[tuple[float, IndexDelta]]) -> bytes:
        """Return the payload of one message for all these changes, each with its time in
        seconds."""
        events: list[bytes] = []
        for _, delta in timed_deltas:
            if delta.was_cleared:
                events.append(CLEARED)
            origins = _origins(delta)
            for group, is_on_host, changes in delta.changes:
                parts = self._stored[group, is_on_host]
                _add_events(events, parts, changes, {} if is_on_host else origins)
        at = FLOAT64 + struct.pack(">d", timed_deltas[-1][0])
        head = bytes((SMALL_ARRAY + 3,)) + at + _array(len(events))
        return b"".join((head, *events, self._end))


class _StoredParts:
    """Bytes that all events of one cache group and one medium share."""

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
        """Return the bytes before the names of blocks, and the bytes after their tokens."""
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
    """Add the events of one pool's changes; consecutive blocks of a sequence share an event."""
    run: list[bytes] = []  # names of the next event
    is_stored = False  # type of that event
    origin: Origin | None = None
    come_from: list[Origin] = []
    names = iter(changes)
    for name in names:
        is_there = name != NAME_REMOVED
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
    """Return whether a block joins the previous block's event. It does if it follows that block in
    a sequence, or if the origins of both are unknown."""
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
    """Return what block names are made of besides tokens, one entry per block from `place` on.

    An entry has the hex digests of images that start in the block, and the adapter. The first block
    of a sequence also has the salt."""
    adapter = [request.adapter_id] if request.adapter_id else []
    keys: list[list[str] | None] = []
    for block in range(place, place + num_blocks):
        images = [mark.hex() for index, mark in request.marks if index // block_size == block]
        salt = [request.cache_salt] if request.cache_salt and not block else []
        keys.append([*images, *adapter, *salt] or None)
    return keys if any(keys) else None


def _packed(tokens: Int32) -> bytes:
    """Return the token ids [T], each as a msgpack uint32 in five bytes."""
    data = np.empty((len(tokens), 5), np.uint8)
    data[:, 0] = UINT32
    data[:, 1:] = tokens.astype(">u4").view(np.uint8).reshape(-1, 4)
    return data.tobytes()


def _array(num: int) -> bytes:
    """Return the msgpack head of an array of `num` elements."""
    if num < 16:
        return bytes((SMALL_ARRAY + num,))
    return struct.pack(">BH", 0xDC, num) if num < 1 << 16 else struct.pack(">BI", 0xDD, num)
