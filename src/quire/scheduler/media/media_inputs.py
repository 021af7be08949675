"""Media items of prompts: limits of chunks, and the items that a step encodes and reads.

    prompt     text | item: 6 placeholder tokens | text
    chunk 1    ---------------->                            encodes the item, reads slots 0..2
    chunk 2                     ---------------->           reads slots 3..5

A chunk ends before an item that has no outputs in the encoder cache and cannot be encoded in this
step. Then the step's budget of encoder tokens is used up, or the cache has no free slots. An item
that a step in flight encodes counts as missing, since that step may fail. In one step, rows with
the same item share one encoder input.

A sequence refers to an entry while its next token is inside the item. A step in flight refers to
all entries that it writes or reads. So a repeated step finds its slots unchanged. No sequence waits
while it refers to an entry, since the rest of that item needs no more slots. So one of the
sequences can always continue.
"""

from dataclasses import dataclass, field

from quire.base.errors import RequestError
from quire.base.messages import Request
from quire.base.requests.media_items import EncoderInput, EncoderRead, MediaItem
from quire.base.settings.config import SchedulerConfig
from quire.scheduler.core.extension import ChunkLimit, Extension, StepEnd, StepExtension
from quire.scheduler.core.plans import PlanBuilder
from quire.scheduler.core.sequence import Sequence
from quire.scheduler.media.encoder_cache import EncoderCache, Entry
from quire.scheduler.views import MediaView

FIELD = "media"


@dataclass(slots=True)
class StepMedia:
    """Use of the encoder cache by one step. entries: one reference for each entry that it writes or
    reads; new: the entries it writes."""

    entries: list[Entry] = field(default_factory=list)
    new: list[Entry] = field(default_factory=list)
    inputs: list[EncoderInput] = field(default_factory=list)
    reads: list[EncoderRead] = field(default_factory=list)


class MediaRefusal(Extension):
    """Extension that refuses requests with media, for a model without media input."""

    fields = (FIELD,)

    def accept(self, request: Request) -> bool:
        """See Extension."""
        if request.media:
            kinds = " and ".join(sorted({item.kind for item in request.media}))
            raise RequestError(
                f"the model does not accept {kinds} input; remove it from the request or use a"
                " multimodal model.",
                FIELD,
            )
        return False


class MediaInputs(ChunkLimit, Extension, StepExtension):
    """Planner of encoder inputs and reads. limited: sequences with a row that still compute tokens
    of items."""

    fields = (FIELD,)
    follows_steps = True

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.max_num_batched_tokens, "derive it first"
        self.cache = EncoderCache(config.encoder_cache_tokens)
        self.limited: dict[Sequence, None] = {}
        self.num_encoded_tokens = 0
        self.num_hits = 0  # items that were found in the cache
        self._budget = config.max_encoder_tokens or config.max_num_batched_tokens
        self._max_whole = config.max_num_batched_tokens
        if config.long_prefill_token_threshold:
            self._max_whole = min(self._max_whole, config.long_prefill_token_threshold)
        self._open: dict[Sequence, int] = {}  # by leader: size of its largest whole item
        self._inside: dict[Sequence, Entry] = {}  # entry of the item of its next token
        self._steps: dict[int, StepMedia] = {}  # steps in flight, and the step being planned

    # ---- requests ----------------------------------------------------------------------------

    def accept(self, request: Request) -> bool:
        """See Extension."""
        if not request.media:
            return False
        if request.is_open:
            raise RequestError(
                "a prompt that comes in pieces cannot have media; send the whole prompt at once.",
                FIELD,
            )
        end = 0
        for i, item in enumerate(request.media):
            self._check(item, f"{FIELD}[{i}]: the {item.kind} at token {item.start}", end)
            end = item.end
        if end > len(request.prompt_token_ids):
            raise RequestError(
                f"{FIELD}: the last item ends at token {end}, and the prompt has"
                f" {len(request.prompt_token_ids)} tokens; correct its span.",
                FIELD,
            )
        return False

    def _check(self, item: MediaItem, label: str, end: int) -> None:
        """Raise RequestError for an item that can never be computed. label: the item, for the
        message. end: end of the previous item."""
        if item.start < end:
            raise RequestError(
                f"{label} starts before token {end}, where the item before it ends; list items in"
                " the order of the prompt, without overlap.",
                FIELD,
            )
        if item.num_tokens < 1 or len(item.digest) == 0:
            raise RequestError(f"{label} has no tokens or no digest; give it both.", FIELD)
        if item.num_tokens > self.cache.num_slots:
            raise RequestError(
                f"{label} has {item.num_tokens} tokens, more than the encoder cache holds; send a"
                f" smaller one, or raise encoder_cache_tokens={self.cache.num_slots}.",
                FIELD,
            )
        if item.is_whole and item.num_tokens > self._max_whole:
            raise RequestError(
                f"{label} has {item.num_tokens} tokens, which one step must compute together; raise"
                f" max_num_batched_tokens (and long_prefill_token_threshold, if set), which allow"
                f" {self._max_whole}.",
                FIELD,
            )

    def enter(self, sequence: Sequence, now: float) -> None:
        """See Extension."""
        if media := sequence.request.media:
            sequence.watch(self)
            self._open[sequence] = max(item.num_tokens if item.is_whole else 0 for item in media)
            self.min_tokens = max(self._open.values())  # a whole item must fit into one step

    def leave(self, sequence: Sequence, reason: str, now: float) -> None:
        """See Extension."""
        if sequence.group is None or sequence.group.unfinished == [sequence]:
            self._open.pop(sequence.members[0], None)
            self.min_tokens = max(self._open.values(), default=0)
        self._let_go(sequence)

    # ---- plans -------------------------------------------------------------------------------

    def limit(self, sequence: Sequence, first: int, num: int, builder: PlanBuilder) -> int:
        """See ChunkLimit."""
        media, last = sequence.request.media, first + num
        if not media or first >= media[-1].end:
            return num
        self._drop_idle()
        if sequence.row >= 0:
            self.limited[sequence] = None
        for item in _overlapping(media, first, last):
            is_cut = item.is_whole and item.end > last
            if is_cut or not self._claim(sequence, item, builder):
                return max(item.start, first) - first
        return num

    def _claim(self, sequence: Sequence, item: MediaItem, builder: PlanBuilder) -> bool:
        """Reserve the encoder outputs of an item for the plan being made. Return whether the plan
        may use them. A claim is (number of slots, number of these that the step encodes)."""
        claims, size = builder.claims, item.num_tokens
        own = self._inside.get(sequence)
        if item.digest in claims or (own is not None and own.digest == item.digest):
            return True
        entry = self.cache.find(item.digest)
        if entry is not None and not entry.is_ready:
            return False  # a step in flight encodes it
        num_encoded = sum(new for _, new in claims.values())
        if entry is None and num_encoded and num_encoded + size > self._budget:
            return False
        if (entry is None or not entry.num_refs) and size > self._room(builder):
            return False
        claims[item.digest] = size, size if entry is None else 0
        return True

    def _room(self, builder: PlanBuilder) -> int:
        """Return the number of slots that the plan may still claim."""
        room, find = self.cache.num_available, self.cache.find
        for digest, (size, _) in builder.claims.items():
            entry = find(digest)
            if entry is None or not entry.num_refs:
                room -= size
        return room

    def grant(self, sequence: Sequence, first: int, num: int, builder: PlanBuilder) -> None:
        """See ChunkLimit."""
        media, last = sequence.request.media, first + num
        if not media or first >= media[-1].end:
            return
        step = self._steps.setdefault(builder.step_id, StepMedia())
        for item in _overlapping(media, first, last):
            entry = self._entry_for(sequence, item, step, builder)
            self.cache.take(entry)
            step.entries.append(entry)
            begin, end = max(item.start, first), min(item.end, last)
            slots = entry.slots[begin - item.start : end - item.start]
            step.reads.append(EncoderRead(sequence.row, begin, slots))
            if item.end > last:
                self.cache.take(entry)
                self._let_go(sequence)
                self._inside[sequence] = entry
                break
        else:
            self._let_go(sequence)
        if last < media[-1].end:
            self.limited[sequence] = None
        builder.extras["encoder_inputs"] = tuple(step.inputs)
        builder.extras["encoder_reads"] = tuple(step.reads)

    def _entry_for(
        self, sequence: Sequence, item: MediaItem, step: StepMedia, builder: PlanBuilder
    ) -> Entry:
        """Return the entry of a claimed item. If there is none, this step encodes the item."""
        own = self._inside.get(sequence)
        if own is not None and own.digest == item.digest:
            return own
        entry = self.cache.find(item.digest)
        if entry is None:
            entry = self.cache.allocate(item.digest, item.num_tokens, spared=builder.claims)
            step.new.append(entry)
            step.inputs.append(EncoderInput(item, entry.slots))
            self.num_encoded_tokens += item.num_tokens
        else:
            self.num_hits += 1
        return entry

    # ---- releasing references ----------------------------------------------------------------

    def end_step(self, end: StepEnd, now: float) -> None:
        """See StepExtension. After a failure, entries that steps in flight encode are forgotten."""
        result, step = end.result, self._steps.pop(end.result.step_id, None)
        ended = [] if step is None else [step]
        if result.error is not None or result.row_errors:
            for each in (*ended, *self._steps.values()):
                for entry in each.new:
                    self.cache.forget(entry)
        for each in ended:
            for entry in each.new:
                entry.is_ready = True
            for entry in each.entries:
                self.cache.release(entry)

    def _let_go(self, sequence: Sequence) -> None:
        self.limited.pop(sequence, None)
        entry = self._inside.pop(sequence, None)
        if entry is not None:
            self.cache.release(entry)

    def _drop_idle(self) -> None:
        """Release the references of preempted sequences."""
        for sequence in [s for s in (*self._inside, *self.limited) if s.row < 0]:
            self._let_go(sequence)

    # ---- questions ---------------------------------------------------------------------------

    def view(self) -> MediaView:
        """Return the counters of encoder cache, encoded tokens and hits."""
        cache = self.cache
        return MediaView(cache.num_slots, cache.num_used, self.num_encoded_tokens, self.num_hits)

    def check(self) -> None:
        """Assert that every reference belongs to a sequence inside an item, or to a step in
        flight."""
        in_flight = [entry for step in self._steps.values() for entry in step.entries]
        self.cache.check([*self._inside.values(), *in_flight])


def _overlapping(media: tuple[MediaItem, ...], first: int, last: int) -> list[MediaItem]:
    """Return the items that have tokens in [first, last)."""
    return [item for item in media if item.start < last and item.end > first]
