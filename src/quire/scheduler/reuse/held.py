"""Retained requests: ended requests that can be continued, forked at a token or rewound (T 5.2).

    retained  | block 0 | block 1 | blo     |      its tokens, and its former tables
    branch    | block 0 | block 1 | blo     |      from a fork's arrival until it gets a row
    fork      | block 0 | block 1 | bl ck 2 | ...  its own copy of the last block: copy-on-write

A fork is a request whose prompt begins with known tokens of a source request, retained or running.
Its branch is made on arrival, so later changes of the source do not affect the fork.

Retained requests never block others. When blocks are lacking, the tables of the least recently
forked request are evicted first, and its tokens stay. Its full blocks may still be found by name,
on the device, in host memory and in stores; missing ones are recomputed. This changes the blocks
that a request allocates, never its tokens. The tokens have a maximum number and a time limit.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.base.errors import EngineBusy, RequestError
from quire.base.messages import (
    Fork,
    Hold,
    PutBack,
    Request,
    RetainedRequest,
    Rewind,
    without_prompt,
)
from quire.base.requests.media_items import items_before
from quire.base.requests.retention import check_retainable
from quire.base.requests.sampling_params import SamplingParams
from quire.kv.manager import KVBlocks, SequenceBlocks
from quire.scheduler.core.arrivals import limit_of
from quire.scheduler.core.extension import (
    CacheListener,
    Handler,
    HitSource,
    RequestCompletion,
    StepExtension,
)
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.rows import Rows
from quire.scheduler.core.sequence import Int32, Sequence, State
from quire.scheduler.views import RetainedView

SOURCE = "held"  # name of this source in the report of a hit
MAX_RETAINED = 1024  # maximum number of retained sequences
MAX_RETAINED_TOKENS = 1 << 24  # maximum number of their tokens together: 64 MiB
MAX_RETAINED_MEDIA_TOKENS = 1 << 18  # of retained items with pixels: 0.6 to 3 KB each, rarely 9 KB
RETAINED_REASONS = (
    "stop",
    "length",
    "repetition",
)  # finish reasons of requests that can be retained


@dataclass(eq=False, slots=True)
class Held:
    """One sequence of an ended request. request: without its prompt. num_computed: leading
    tokens with keys and values in `blocks`. digests: names of its full blocks that other blocks
    may share."""

    request: Request
    index: int
    tokens: Int32 = field(repr=False)
    num_prompt_tokens: int
    num_computed: int
    digests: list[bytes] = field(repr=False)
    blocks: SequenceBlocks | None
    keep_s: float
    ends_s: float


class RetainedChanges(NamedTuple):
    """Changed retained sequences, by request id and index: each with its tokens, or None if
    released."""

    found: dict[tuple[str, int], tuple[RetainedRequest, Int32] | None]


@dataclass(eq=False, slots=True)
class Branch:
    """Blocks that a fork begins with once it gets a row. num_tokens: maximum number of leading
    tokens to use. source_id: request id of the source."""

    blocks: SequenceBlocks
    num_tokens: int
    source_id: str


class Holds(HitSource, CacheListener, RequestCompletion, StepExtension):
    """Hit source of retained sequences, and of the branches of waiting forks.

    sequences: unfinished requests by id. by_id: retained sequences by request id and index.
    standing: retained sequences with blocks, in order of eviction. branches: by the fork's request
    id. changes: names of sequences that were retained, changed or released since the last
    `take_changes`; None without subscribers.
    """

    changes: dict[tuple[str, int], None] | None = None
    fields = ("keep_s", "fork")

    def __init__(self, memory: Memory, rows: Rows, sequences: Mapping[str, Sequence]) -> None:
        self.by_id: dict[str, dict[int, Held]] = {}
        self.standing: list[Held] = []
        self.entries = self.branches = dict[str, Branch]()
        self._memory, self._kv = memory, memory.kv
        self._rows, self._sequences = rows, sequences

    def handlers(self) -> Mapping[type, Handler]:
        """See Extension."""
        return {Hold: self.hold, PutBack: self.put_back, Rewind: self.rewind}

    @property
    def names(self) -> Collection[str]:
        """See Extension."""
        return self.by_id

    def accept(self, request: Request) -> bool:
        """See Extension."""
        if request.request_id in self.by_id:
            raise RequestError(f"a request {request.request_id!r} is retained; choose another id.")
        if request.keep_s:
            self.check(request)
        return False

    def complete(self, request: Request) -> Request:
        """See RequestCompletion. A fork inherits the media items of the tokens that it shares."""
        fork = request.fork
        found = None if fork is None else self.find_source(fork)
        if found is None or not found.request.media:
            return request
        assert fork is not None, "it is no fork"
        inherited = items_before(found.request.media, fork.num_tokens)
        own = tuple(item for item in request.media if item.start >= fork.num_tokens)
        return request.with_media((*inherited, *own))

    def enter(self, sequence: Sequence, now: float) -> None:
        """See Extension. Create the branch of a fork. A running source row that shares its blocks
        then copies the last one before it writes."""
        if sequence.keep_s:
            sequence.watch(self)
        if sequence.request.fork is None:
            return
        sequence.watch(self)
        running = self.branch(sequence)
        if running is not None:
            self._rows.share(running.row)

    def leave(self, sequence: Sequence, reason: str, now: float) -> None:
        """See Extension. Retain a sequence that ends normally, with its blocks."""
        if sequence.keep_s and reason in RETAINED_REASONS:
            self.keep(sequence, now)

    # ---- retaining, from the end of a request to its release ---------------------------------

    def check(self, request: Request) -> None:
        """Raise EngineBusy if a request could not be retained when it ends. Count open requests to
        be retained, too, with their maximum length."""
        open_ = [(s.request, s.limit) for s in self._sequences.values() if s.keep_s]
        open_ = [(r, limit) for r, limit in open_ for _ in range(r.params.num_samples)]
        counted = [(held.request, len(held.tokens)) for held in self.all()]
        counted += open_
        num, share = request.params.num_samples, request.pin_share
        mine = [n for r, n in counted if r.tenant == request.tenant]
        media = [_num_media_tokens(r) for r, _ in counted]
        my_media = [_num_media_tokens(r) for r, _ in counted if r.tenant == request.tenant]
        more_media = num * _num_media_tokens(request)
        limit = max_len = self._rows.table.tokens.shape[1]
        if not request.is_open:
            limit = limit_of(request, len(request.prompt_token_ids), max_len)
        for noun, maximum, all_, own, more in (
            ("sequences", MAX_RETAINED, len(counted), len(mine), num),
            ("tokens", MAX_RETAINED_TOKENS, sum(n for _, n in counted), sum(mine), num * limit),
            ("tokens of images", MAX_RETAINED_MEDIA_TOKENS, sum(media), sum(my_media), more_media),
        ):
            if not more:
                continue
            if all_ + more > maximum:
                raise EngineBusy(
                    f"keep_s: {all_} {noun} are retained or will be, and {more} more would exceed"
                    f" the limit of {maximum}. Release requests you no longer need, or remove"
                    " keep_s.",
                    "keep_s",
                )
            if share < 1.0 and own + more > max(1, int(share * maximum)):
                raise EngineBusy(
                    f"keep_s: {own} {noun} of your key are retained or will be, and with {more}"
                    f" more they would exceed its share, {max(1, int(share * maximum))} of"
                    f" {maximum}."
                    " Release requests you no longer need, or remove keep_s.",
                    "keep_s",
                )

    def keep(self, sequence: Sequence, now: float) -> None:
        """Retain a sequence that ends and still has its blocks."""
        request, tokens = sequence.request, sequence.known_tokens.copy()
        num_computed = num_sure(sequence)
        blocks = self._fork(sequence, num_computed) if num_computed else None
        held = Held(
            request=without_prompt(request),
            index=sequence.index,
            tokens=tokens,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_computed=num_computed,
            digests=self._names_of(sequence, len(tokens)),
            blocks=blocks,
            keep_s=sequence.keep_s,
            ends_s=now + sequence.keep_s,
        )
        self._enter(held)
        if blocks is not None:
            self._kv.set_evictable(blocks, True)
            self.standing.append(held)
        if request.fork is not None and request.fork.takes_over:
            self._remove(request.fork.request_id, request.fork.index)

    def put_back(self, message: PutBack, now: float) -> None:
        """Retain a sequence of an earlier engine again, without blocks. Ignore it if the limits are
        exceeded."""
        name, tokens = message.request_id, np.array(message.token_ids, np.int32)
        view = self.view()
        num_tokens, is_known = view.num_tokens + len(tokens), name in self.by_id
        if is_known and message.index in self.by_id[name]:
            return
        if view.num_sequences == MAX_RETAINED or num_tokens > MAX_RETAINED_TOKENS:
            return
        held = Held(
            request=Request(
                name,
                [],
                SamplingParams(),
                0,
                tenant=message.tenant,
                cache_salt=message.cache_salt,
                adapter_id=message.adapter_id,
            ),
            index=message.index,
            tokens=tokens,
            num_prompt_tokens=message.num_prompt_tokens,
            num_computed=0,
            digests=[],
            blocks=None,
            keep_s=message.keep_s,
            ends_s=now + message.left_s,
        )
        self._enter(held)

    def _enter(self, held: Held) -> None:
        self.by_id.setdefault(held.request.request_id, {})[held.index] = held
        self._note(held)
        self._find_next()

    def _note(self, held: Held) -> None:
        if self.changes is not None:
            self.changes[held.request.request_id, held.index] = None

    def hold(self, message: Hold, now: float) -> None:
        """Set the time to retain a request, counted from now; 0 seconds releases it. For an
        unfinished request, set the time to retain it after its end."""
        sequence = self._sequences.get(message.request_id)
        if sequence is not None and message.tenant in (None, sequence.request.tenant):
            self._keep_open(sequence, message.keep_s)
        for held in list(self.by_id.get(message.request_id, {}).values()):
            if message.tenant not in (None, held.request.tenant):
                continue
            held.keep_s, held.ends_s = message.keep_s, now + message.keep_s
            self._note(held)
            if not message.keep_s:
                self._remove(message.request_id, held.index)
        self._find_next()

    def _keep_open(self, sequence: Sequence, keep_s: float) -> None:
        """Set the time to retain an unfinished request after its end. Ignore the message if the
        request cannot be retained or there is no room."""
        if keep_s and not sequence.keep_s:
            try:
                check_retainable(sequence.request, keep_s)
                self.check(sequence.request)
            except RequestError:
                return
        for member in sequence.members:
            member.keep_s = keep_s
            member.watch(self)

    def rewind(self, message: Rewind, now: float) -> None:
        """Drop the last tokens of a retained sequence. At least one token stays."""
        held = self.by_id.get(message.request_id, {}).get(message.index)
        if held is None or message.tenant not in (None, held.request.tenant):
            return
        num_tokens, size = message.num_tokens, self._kv.block_size
        if not 0 < num_tokens < len(held.tokens):
            return
        try:
            media = items_before(held.request.media, num_tokens)
        except RequestError:  # inside an item; the server refuses such a rewind
            return
        held.request = held.request.with_media(media)
        self._note(held)
        held.tokens = held.tokens[:num_tokens].copy()
        held.digests = held.digests[: num_tokens // size]
        held.num_prompt_tokens = min(held.num_prompt_tokens, num_tokens)
        held.num_computed = min(held.num_computed, num_tokens)
        if held.blocks is not None:
            self._cut(held.blocks, held.num_computed)

    def expire(self, now: float) -> None:
        """Release the retained sequences whose time is over."""
        for held in [held for held in self.all() if held.ends_s <= now]:
            self._remove(held.request.request_id, held.index)

    # ---- forks -------------------------------------------------------------------------------

    def branch(self, sequence: Sequence) -> Sequence | None:
        """Create the branch of a fork that has arrived, if its source exists. Return the source
        sequence if it is running and shares blocks, else None."""
        request, fork = sequence.request, sequence.request.fork
        assert fork is not None, "it is not a fork"
        found = self.find_source(fork)
        if found is None:
            return None
        if _have_same_names(found.request, request):  # so their names can be reused
            sequence.digests = self._names_of(found, fork.num_tokens)
        if isinstance(found, Held):
            if found.blocks is not None:
                num_tokens = min(fork.num_tokens, found.num_computed)
                self._add_branch(request, self._kv.fork(found.blocks), num_tokens)
                self.standing.remove(found)
                self.standing.append(found)
            return None
        num_tokens = min(fork.num_tokens, num_sure(found))
        if num_tokens == 0:
            return None
        self._add_branch(request, self._fork(found, num_tokens), num_tokens)
        return found

    def _add_branch(self, request: Request, blocks: SequenceBlocks, num_tokens: int) -> None:
        assert request.fork is not None, "it is no fork"
        self._kv.set_evictable(blocks, True)
        branch = Branch(blocks, num_tokens, request.fork.request_id)
        self.branches[request.request_id] = branch

    def find_source(self, fork: Fork) -> Held | Sequence | None:
        """Return the source of a fork, retained or unfinished, or None. An index of -1 matches
        any."""
        held = self.by_id.get(fork.request_id, {})
        sequence = self._sequences.get(fork.request_id)
        members = [] if sequence is None or sequence.is_beam else sequence.members
        alive = (m for m in members if m.state is not State.ENDED)
        found: list[Held | Sequence] = [*held.values(), *alive]
        return next((each for each in found if fork.index in (-1, each.index)), None)

    def find(self, sequence: Sequence, best: KVBlocks | None) -> KVBlocks | None:
        """See HitSource: return the branch of a fork. Its last block may be partly full."""
        branch, num_tokens = self._usable(sequence)
        if branch is None or (best is not None and best.num_tokens > num_tokens):
            return best
        num_blocks = -(-num_tokens // self._kv.block_size)
        blocks = tuple(table.blocks[:num_blocks] for table in branch.blocks.tables)
        return KVBlocks(num_tokens, blocks, source=SOURCE, is_in_use=True)

    def num_tokens(self, sequence: Sequence) -> int:
        """See HitSource."""
        return self._usable(sequence)[1]

    def begin(self, sequence: Sequence, hit: KVBlocks, now: float) -> None:
        """See HitSource: release the branch of a sequence, which now has its own references."""
        branch = self.branches.pop(sequence.request.request_id, None)
        if branch is not None:
            self._memory.free_after_plan(branch.blocks)

    def forget(self, sequence: Sequence) -> None:
        """Free the branch of a sequence that has ended before it got a row."""
        branch = self.branches.pop(sequence.request.request_id, None)
        if branch is not None:
            self._kv.free(branch.blocks)

    def _usable(self, sequence: Sequence) -> tuple[Branch | None, int]:
        """Return the branch of a sequence and the number of its tokens to use. At least one token
        remains to compute. All tokens visible to the next one must be there."""
        branch = self.branches.get(sequence.request.request_id)
        if branch is None:
            return None, 0
        readable = min(sequence.num_known_tokens - 1, sequence.num_readable_tokens)
        num_tokens = min(branch.num_tokens, readable)
        if num_tokens <= 0 or not self._can_continue_at(branch.blocks, num_tokens):
            return None, 0
        return branch, num_tokens

    def _can_continue_at(self, blocks: SequenceBlocks, num_tokens: int) -> bool:
        """Return whether another sequence could begin with the first num_tokens tokens of these
        blocks."""
        pairs = zip(blocks.tables, self._kv.groups, strict=True)
        return all(t.can_continue_at(num_tokens, g.first_needed(num_tokens)) for t, g in pairs)

    # ---- eviction ----------------------------------------------------------------------------

    def evict_one(self, spared: Sequence | None = None) -> bool:
        """See HitSource. Tables of the least recently forked request are evicted first, then
        branches."""
        if self.standing:
            self._give_up(self.standing[0])
            return True
        names = self._branches_to_evict(spared)
        if names:
            self._kv.free(self.branches.pop(names[0]).blocks)
        return bool(names)

    def tables(self) -> list[SequenceBlocks]:
        """Return the tables of all retained sequences and of branches."""
        held = [held.blocks for held in self.standing if held.blocks is not None]
        return held + [branch.blocks for branch in self.branches.values()]

    def _branches_to_evict(self, spared: Sequence | None) -> list[str]:
        """Return the fork ids of the branches in order of eviction."""
        own = None if spared is None else spared.request.request_id
        return sorted(self.branches, key=lambda name: name == own)

    def fail(self, failed: Collection[Sequence], now: float) -> None:
        """Drop the blocks of every ancestor of a failed request, and begin no fork with its blocks:
        the error may be in any shared block."""
        ids = {sequence.request.request_id for sequence in failed}
        for name in [name for name, each in self.branches.items() if each.source_id in ids]:
            self._kv.free(self.branches.pop(name).blocks)
        for sequence in failed:
            for held in self._lineage(sequence.request):
                if held.blocks is not None:
                    self._give_up(held)

    def _lineage(self, request: Request) -> list[Held]:
        """Return the retained ancestors of a request: its source, the source's source, and so
        on."""
        found: list[Held] = []
        while (fork := request.fork) is not None:
            held = self.by_id.get(fork.request_id, {}).get(fork.index)
            if held is None or held in found:  # ids may be reused, so the chain may loop
                break
            found.append(held)
            request = held.request
        return found

    def reset(self, now: float) -> None:
        """Drop the blocks and names of all retained sequences. Their tokens stay."""
        while self.evict_one():
            pass
        for held in self.all():
            held.digests = []

    # ---- reports -----------------------------------------------------------------------------

    def all(self) -> list[Held]:
        """Return all retained sequences, by request."""
        return [held for mine in self.by_id.values() for held in mine.values()]

    def view(self) -> RetainedView:
        """Return the numbers of retained sequences and tokens."""
        lengths = [len(held.tokens) for held in self.all()]
        return RetainedView(len(lengths), sum(lengths))

    def take_changes(self, now: float) -> RetainedChanges | None:
        """Return the changes since the last call, or None if there are none."""
        if not self.changes:
            return None
        changes, self.changes = self.changes, {}
        found = {(name, i): self.by_id.get(name, {}).get(i) for name, i in changes}
        return RetainedChanges(
            {
                name: None if held is None else (description_of(held, 0, now), held.tokens)
                for name, held in found.items()
            }
        )

    def listing(self, tenant: str | None, now: float) -> list[RetainedRequest]:
        """Return the retained sequences of a tenant, without tokens; of all tenants if None."""
        mine = [h for h in self.all() if tenant in (None, h.request.tenant)]
        return [description_of(held, self._num_blocks(held.blocks), now) for held in mine]

    def describe(self, fork: Fork, tenant: str | None, now: float) -> RetainedRequest | None:
        """Return a possible source of a fork, with its tokens, or None."""
        found = self.find_source(fork)
        if found is None or tenant not in (None, found.request.tenant):
            return None
        if isinstance(found, Held):
            return description_of(found, self._num_blocks(found.blocks), now, found.tokens)
        return RetainedRequest(
            id=found.request.request_id,
            index=found.index,
            num_prompt_tokens=found.num_prompt_tokens,
            num_tokens=found.num_known_tokens,
            num_blocks=self._num_blocks(found.blocks),
            keep_s=found.keep_s,
            tenant=found.request.tenant,
            cache_salt=found.request.cache_salt,
            tokens=found.known_tokens.tobytes(),
            adapter_id=found.request.adapter_id,
            media=found.request.spans,
        )

    # ------------------------------------------------------------------------------------------

    def _names_of(self, known: Held | Sequence, num_tokens: int) -> list[bytes]:
        """Return the names of the first full blocks, if blocks of other requests may share these
        names."""
        is_alone = isinstance(known, Sequence) and known.is_renamed
        if is_alone or not self._kv.enable_prefix_caching:
            return []
        return known.digests[: num_tokens // self._kv.block_size]

    def _num_blocks(self, blocks: SequenceBlocks | None) -> int:
        """Return the number of blocks in the largest cache group."""
        return 0 if blocks is None else max(len(table.live_blocks) for table in blocks.tables)

    def _fork(self, sequence: Sequence, num_tokens: int) -> SequenceBlocks:
        """Return second tables of a sequence with a row, cut to num_tokens tokens."""
        own, num_computed = sequence.blocks, sequence.num_computed_tokens
        if own.num_tokens > num_computed:  # with room for rejected drafts
            self._kv.truncate(own, num_computed)
        own.advance(num_computed)
        blocks = self._kv.fork(own)
        self._cut(blocks, num_tokens)
        return blocks

    def _cut(self, blocks: SequenceBlocks, num_tokens: int) -> None:
        """Free the blocks after the first num_tokens tokens. States and windows cannot be cut,
        since they only cover their own end."""
        if self._kv.has_states or blocks.num_tokens <= num_tokens:
            return
        if self._can_continue_at(blocks, num_tokens):
            self._kv.truncate(blocks, num_tokens)

    def _give_up(self, held: Held) -> None:
        assert held.blocks is not None, "it has no blocks"
        self._kv.free(held.blocks)
        held.blocks, held.num_computed = None, 0
        self.standing.remove(held)

    def _remove(self, request_id: str, index: int) -> None:
        held = self.by_id.get(request_id, {}).pop(index, None)
        if held is None:
            return
        self._note(held)
        if not self.by_id[request_id]:
            del self.by_id[request_id]
        if held.blocks is not None:
            self._give_up(held)
        self._find_next()

    def _find_next(self) -> None:
        self.next_s = min((held.ends_s for held in self.all()), default=None)


def _num_media_tokens(request: Request) -> int:
    return sum(item.num_tokens for item in request.media)


def _have_same_names(one: Request, other: Request) -> bool:
    """Return whether equal tokens of two requests get equal block names."""
    names = ("cache_salt", "adapter_id")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def num_sure(sequence: Sequence) -> int:
    """Return the number of a sequence's tokens whose keys and values are final, whatever plans in
    flight do. A row that has sampled since its start has all tokens before its last known one."""
    if sequence.row < 0:
        return 0
    began = max(len(sequence.saved_tokens), sequence.num_prompt_tokens)
    return sequence.num_known_tokens - 1 if sequence.num_known_tokens > began else 0


def description_of(
    held: Held, num_blocks: int, now: float, tokens: Int32 | None = None
) -> RetainedRequest:
    """Return the client's description of a retained sequence."""
    return RetainedRequest(
        id=held.request.request_id,
        index=held.index,
        num_prompt_tokens=held.num_prompt_tokens,
        num_tokens=len(held.tokens),
        num_blocks=num_blocks,
        keep_s=held.keep_s,
        tenant=held.request.tenant,
        cache_salt=held.request.cache_salt,
        expires_in_s=max(0.0, held.ends_s - now),
        tokens=b"" if tokens is None else tokens.tobytes(),
        adapter_id=held.request.adapter_id,
        media=held.request.spans,
    )
