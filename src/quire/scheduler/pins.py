"""Pinned prefixes: prompts that are computed, never sampled, and kept (P 4.4, shared prefix).

A request to pin is queued like others. With the result of the step that computes its last token it
has ended, and its block tables belong to the pin, which holds no row. A request that begins with a
pinned prefix forks it: full blocks are shared, and whoever writes into a last block that is not
full copies it first (copy-on-write). Pinned blocks are referenced, so nothing evicts them.

    pinned    | block 0 | block 1 | blo      |        prefix of 2 blocks and 3 tokens
    request   | block 0 | block 1 | blo ck 2 | ...    its own copy of the last one

Prefixes are told by the digest of all their tokens, from the same root as blocks' digests, so that
salts keep tenants apart here, too. What pins hold, nobody else can get: a request is accepted if it
fits beside them, and a pin if all open requests then still do. A tenant has a share of what may be
pinned, which its request to pin brings (`pin_share`), so that none takes it all.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire.base.errors import EngineBusy, RequestError
from quire.base.messages import PinnedPrefix, Request
from quire.base.step_outputs import Finish
from quire.kv.digest import root_digest
from quire.kv.manager import KVBlocks, SequenceBlocks
from quire.scheduler.preemption import preempt
from quire.scheduler.sequence import Int32, Sequence

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler

MOST_PINNED = 0.5  # of each pool
MOST_PINS = 256  # each request that comes is compared with all of them
EPSILON = 1e-6  # a third of 300 is 100, also in binary fractions


@dataclass(eq=False, slots=True)
class Pin:
    """sequence: that computes it, None once it is there; blocks: what it holds then. most_blocks:
    that it may hold, by cache group. digest: of all its tokens. num_own_hits: by its tenant, who
    is not to learn what others ask."""

    request: Request
    sequence: Sequence | None
    most_blocks: list[int]
    since_s: float
    digest: bytes = b""
    blocks: SequenceBlocks | None = None
    ends_s: float = math.inf
    num_hits: int = 0
    num_own_hits: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids)


class Pins:
    """All pinned prefixes of a scheduler, by request id."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self.by_id: dict[str, Pin] = {}
        self.num_hits = self.num_hit_tokens = 0
        self.num_changes = 0  # a hit that was found before the last of these may differ now
        self._scheduler = scheduler
        self._ready: list[Pin] = []  # longest first
        self._reserved = [0] * len(scheduler.kv.groups)  # blocks, by group

    @property
    def _num_computing(self) -> int:
        return len(self.by_id) - len(self._ready)

    # ---- the life of a pin -------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise RequestError if this prefix cannot be pinned; EngineBusy if only now."""
        kv = self._scheduler.kv
        if len(self.by_id) >= MOST_PINS:
            raise RequestError(
                f"{MOST_PINS} prefixes are pinned already, and there can be no more; remove those"
                " that are not needed any more."
            )
        needs, num_tokens = self._most_blocks(request), len(request.prompt_token_ids)
        self._check_share(request, needs)
        after = [need + held for need, held in zip(needs, self._reserved, strict=True)]
        for num, pool in zip(after, kv.pools, strict=True):
            if num > MOST_PINNED * pool.num_blocks:
                raise RequestError(
                    f"a prefix of {num_tokens} tokens would bring what is pinned to {num} of"
                    f" {pool.num_blocks} KV blocks, and half of them may be; remove pinned prefixes"
                    " that are not needed any more, or enlarge kv_cache_memory_bytes."
                )
        for sequence in self._scheduler.sequences.values():
            if not self._leaves_room_for(sequence, after):
                raise EngineBusy(
                    f"a prefix of {num_tokens} tokens cannot be pinned now: a request that is open"
                    " would lack the memory; try again in a moment."
                )

    def _check_share(self, request: Request, needs: list[int]) -> None:
        """Raise RequestError if its tenant would pin more than its share: what one pins, others
        cannot."""
        mine = [pin for pin in self.by_id.values() if pin.request.tenant == request.tenant]
        share, most_pins = request.pin_share, max(1, int(request.pin_share * MOST_PINS + EPSILON))
        if len(mine) >= most_pins:
            raise RequestError(
                f"{len(mine)} prefixes are pinned by your key already, and its share is {most_pins}"
                f" of {MOST_PINS}; remove those that are not needed any more, or ask the operator"
                " for a larger pin_share."
            )
        held = [sum(each) for each in zip(needs, *(pin.most_blocks for pin in mine), strict=True)]
        for num, pool in zip(held, self._scheduler.kv.pools, strict=True):
            most = int(share * MOST_PINNED * pool.num_blocks + EPSILON)
            if share < 1.0 and num > most:
                raise RequestError(
                    f"a prefix of {len(request.prompt_token_ids)} tokens would bring what your key"
                    f" pins to {num} KV blocks, and its share is {most} of {pool.num_blocks};"
                    " remove pinned prefixes that are not needed any more, or ask the operator for"
                    " a larger pin_share."
                )

    def begin(self, sequence: Sequence, now: float) -> None:
        """A request to pin was queued."""
        request = sequence.request
        pin = Pin(request, sequence, self._most_blocks(request), now)
        pin.digest = self._digest(sequence, pin.num_tokens)
        self.by_id[request.request_id] = pin
        self._count_blocks()

    def settle(self, now: float) -> list[Sequence]:
        """A result came: sequences whose last token is computed, and whose blocks their pins have
        taken over. They hold a row until they are ended by the caller."""
        done = []
        for pin in self.by_id.values() if self._num_computing else ():
            sequence = pin.sequence
            if sequence is not None and self._is_computed(sequence):
                sequence.blocks.advance(pin.num_tokens)
                pin.blocks, pin.sequence = self._scheduler.kv.fork(sequence.blocks), None
                if pin.ends_s == math.inf:  # otherwise it was computed before
                    pin.ends_s = now + (sequence.request.pin_s or math.inf)
                self._ready.append(pin)
                done.append(sequence)
        if done:
            self._ready.sort(key=lambda pin: -pin.num_tokens)
            self._count_blocks()
        return done

    def _is_computed(self, sequence: Sequence) -> bool:
        if sequence.row < 0 or sequence.num_computed_tokens < sequence.num_prompt_tokens:
            return False
        return all(sequence.row not in flight.plan.rows for flight in self._scheduler.flights)

    def drop(self, sequence: Sequence) -> None:
        """A sequence that was to be pinned has ended otherwise."""
        pin = self.by_id.get(sequence.request.request_id)
        if pin is not None and pin.sequence is sequence:
            del self.by_id[sequence.request.request_id]
            self._count_blocks()

    def remove(self, request_id: str, tenant: str | None, now: float) -> None:
        """Pin a prefix no longer. tenant: whose it must be; None is anybody's."""
        pin = self.by_id.get(request_id)
        if pin is None or tenant not in (None, pin.request.tenant):
            return
        if pin.sequence is not None:
            self._scheduler.late.append((pin.sequence, Finish("abort")))  # somebody waits for it
            self._scheduler.finish(pin.sequence, "abort", now)
            return
        self._give_up(pin)
        del self.by_id[request_id]
        self._count_blocks()

    def drop_late(self, now: float) -> None:
        """Remove those whose time is over."""
        for pin in [pin for pin in self._ready if pin.ends_s <= now]:
            self.remove(pin.request.request_id, None, now)

    @property
    def next_s(self) -> float | None:
        """When the next one's time is over; None is never."""
        next_s = min((pin.ends_s for pin in self._ready), default=math.inf)
        return None if next_s == math.inf else next_s

    def compute_again(self, failed: Iterable[Sequence], now: float) -> None:
        """Requests have failed: the error may have come with any of their tokens, also with those
        of a prefix that they forked, or of a shorter one that this one was forked from."""
        for sequence in failed:
            for pin in () if sequence.is_pin else list(self._fitting(sequence)):
                self._compute(pin, now)

    def give_rows_back(self, now: float) -> None:
        """Prefixes that are being computed lose what they have."""
        for pin in self.by_id.values():
            if pin.sequence is not None and pin.sequence.row >= 0:
                preempt(self._scheduler, pin.sequence, pin.request.request_id, now)

    def begin_anew(self, now: float) -> None:
        """What was computed does not count any more, and no pin holds a row."""
        for pin in self.by_id.values():
            sequence = pin.sequence or self._compute(pin, now)
            pin.digest = self._digest(sequence, pin.num_tokens)

    def _compute(self, pin: Pin, now: float) -> Sequence:
        """Give up what a pin holds, and compute it again."""
        self._give_up(pin)
        self.num_changes += 1
        pin.sequence = self._scheduler.enter_again(pin.request, now)
        return pin.sequence

    def _give_up(self, pin: Pin) -> None:
        assert pin.blocks is not None, "the prefix is not computed yet"
        self._scheduler.kv.free(pin.blocks)
        pin.blocks = None
        self._ready.remove(pin)

    # ---- hits --------------------------------------------------------------------------------

    def find(self, sequence: Sequence) -> Pin | None:
        """The longest pinned prefix that a sequence may fork, and that is of use to it."""
        if not self._ready:
            return None
        return next(
            (pin for pin in self._fitting(sequence) if self.num_usable(pin, sequence)), None
        )

    def num_usable(self, pin: Pin, sequence: Sequence) -> int:
        """Tokens of a pin that a sequence need not compute: one must be left. None of one that has
        given up what the next token would see: its windows are those of its own end."""
        readable = min(sequence.num_known_tokens - 1, sequence.num_readable_tokens)
        num_tokens, kv = min(pin.num_tokens, readable), self._scheduler.kv
        tables = () if pin.blocks is None else pin.blocks.tables
        is_there = all(
            table.num_dropped <= kv.first_seen(g, num_tokens) for g, table in enumerate(tables)
        )
        return num_tokens if is_there else 0

    def _fitting(self, sequence: Sequence) -> Iterator[Pin]:
        """All that a sequence may fork, longest first."""
        for pin in self._ready if sequence.may_read_cache else ():
            is_longer = pin.num_tokens > sequence.num_prompt_tokens
            if not is_longer and self._digest(sequence, pin.num_tokens) == pin.digest:
                yield pin

    def hit(self, sequence: Sequence) -> KVBlocks | None:
        """The blocks of that prefix, of which the last one may be full in part."""
        pin = self.find(sequence)
        if pin is None or pin.blocks is None:
            return None
        num_tokens = self.num_usable(pin, sequence)
        num_blocks = -(-num_tokens // self._scheduler.kv.block_size)
        blocks = tuple(table.blocks[:num_blocks] for table in pin.blocks.tables)
        return KVBlocks(num_tokens, blocks, is_pinned=True)

    def count_hit(self, sequence: Sequence) -> None:
        """A new sequence is admitted, which may begin with a prefix."""
        pin = self.find(sequence)
        if pin is not None:
            pin.num_hits += 1
            pin.num_own_hits += sequence.request.tenant == pin.request.tenant
            self.num_hits += 1
            self.num_hit_tokens += self.num_usable(pin, sequence)

    def _digest(self, sequence: Sequence, num_tokens: int) -> bytes:
        """Of the first tokens of a sequence, as if they were one block."""
        found = sequence.prefix_digests.get(num_tokens)
        if found is None:
            request, scheduler = sequence.request, self._scheduler
            parts = request.cache_salt, request.adapter_id, request.media_ids
            root, known = root_digest(scheduler.fingerprint, *parts), sequence.known_tokens
            line = dataclasses.replace(sequence, row=-1, saved_tokens=known, root=root, digests=[])
            scheduler.digester([line], num_tokens, [1])
            found = sequence.prefix_digests[num_tokens] = line.digests[0]
        return found

    # ---- room --------------------------------------------------------------------------------

    def room(self, group: int) -> int:
        """Blocks of a group that no pin holds, or will hold."""
        return self._scheduler.kv.pools[group].num_blocks - self._reserved[group]

    def have_room(self, blocks: Seq[SequenceBlocks]) -> bool:
        """Whether these could stand beside what is pinned without sharing it, with a block more
        each."""
        return not any(self._reserved) or self._stand_beside(blocks, self._reserved)

    def _stand_beside(self, blocks: Seq[SequenceBlocks], reserved: list[int]) -> bool:
        kv = self._scheduler.kv
        needs = zip(kv.num_distinct(blocks), reserved, kv.pools, strict=True)
        return all(num + len(blocks) + held <= pool.num_blocks for num, held, pool in needs)

    def shared_blocks(self, sequence: Sequence) -> list[int]:
        """Full blocks, by group, that a sequence would share with a pinned prefix for as long as it
        is there: not those that a window leaves behind."""
        pin, kv = self.find(sequence), self._scheduler.kv
        num_blocks = 0 if pin is None else self.num_usable(pin, sequence) // kv.block_size
        return [num_blocks if group.window is None else 0 for group in kv.groups]

    def fits_alone(self, sequence: Sequence, limit: int, num: int) -> bool:
        """Whether so many sequences of this request fit beside what is pinned."""
        return self._fits_beside(sequence, limit, num, self._reserved)

    def _fits_beside(self, sequence: Sequence, limit: int, num: int, reserved: list[int]) -> bool:
        scheduler = self._scheduler
        chunk = min(scheduler.token_budget, limit - 1)
        shared = sequence.num_prompt_tokens // scheduler.kv.block_size
        needs = scheduler.kv.group_blocks(limit - 1, shared, num, chunk)
        return all(
            need - mine + held <= pool.num_blocks
            for need, mine, held, pool in zip(
                needs, self.shared_blocks(sequence), reserved, scheduler.kv.pools, strict=True
            )
        )

    def _leaves_room_for(self, sequence: Sequence, reserved: list[int]) -> bool:
        """Whether an open request can still end if pins hold that much."""
        members = self._scheduler.members(sequence)
        away = [member.host_blocks for member in members if member.host_blocks is not None]
        if not self._stand_beside(away, reserved):
            return False
        num = sequence.request.params.num_samples
        return sequence.is_pin or self._fits_beside(sequence, sequence.limit, num, reserved)

    def _most_blocks(self, request: Request) -> list[int]:
        num_tokens = len(request.prompt_token_ids)
        chunk = min(self._scheduler.token_budget, num_tokens)
        return self._scheduler.kv.group_blocks(num_tokens, 0, 1, chunk)

    def _count_blocks(self) -> None:
        most = [pin.most_blocks for pin in self.by_id.values()]
        nothing = [0] * len(self._reserved)
        self._reserved = [sum(each) for each in zip(nothing, *most, strict=True)]
        self.num_changes += 1

    # ---- for others --------------------------------------------------------------------------

    def do_not_sample(self, rows: Int32, is_sampling: "npt.NDArray[np.bool_]") -> None:
        """Take the rows that compute a prefix out of those that sample."""
        if self._num_computing:
            pinned = [pin.sequence.row for pin in self.by_id.values() if pin.sequence is not None]
            is_sampling &= ~np.isin(rows, pinned)

    def tables(self) -> list[SequenceBlocks]:
        """What the pins hold."""
        return [pin.blocks for pin in self._ready if pin.blocks is not None]

    @property
    def num_blocks(self) -> int:
        """Blocks of the fullest group that pins hold."""
        return self._most_held(self.tables())

    def _most_held(self, blocks: list[SequenceBlocks]) -> int:
        return max(self._scheduler.kv.num_distinct(blocks))

    def listing(self, now: float, tenant: str | None = None) -> list[PinnedPrefix]:
        """What is pinned, oldest first. tenant: only whose, and of their hits only
        that tenant's; None is all."""
        return [
            PinnedPrefix(
                id=prefix_id,
                num_tokens=pin.num_tokens,
                num_blocks=0 if pin.blocks is None else self._most_held([pin.blocks]),
                is_ready=pin.blocks is not None,
                age_s=now - pin.since_s,
                expires_in_s=None if pin.ends_s == math.inf else max(0.0, pin.ends_s - now),
                num_hits=pin.num_hits if tenant is None else pin.num_own_hits,
            )
            for prefix_id, pin in self.by_id.items()
            if tenant in (None, pin.request.tenant) and pin.ends_s > now
        ]
