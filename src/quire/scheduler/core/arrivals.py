"""Client messages: new requests, pieces of open prompts, cancellations; also time limits.

While a prompt is open (T 4.4.4), its last token is not computed, since computing it would sample.
The last piece closes the prompt. A request is parked while it has no tokens to compute, or while it
waits for something, such as its grammar.
"""

from array import array
from collections.abc import Sequence as Seq
from operator import attrgetter
from types import SimpleNamespace

import numpy as np

from quire.base.errors import REQUEST_FAILED, RequestError
from quire.base.events import Appended, GrammarTaken
from quire.base.messages import (
    DEFAULTS_OF_REQUEST,
    Abort,
    Append,
    Cancel,
    GrammarReady,
    Request,
)
from quire.base.requests.retention import check_open
from quire.base.step_outputs import CANCELLED, Failure, Finish
from quire.scheduler.core.extension import Extension, Forking, RequestCompletion, of_kind
from quire.scheduler.core.lifecycle import Lifecycle
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.queue import PATIENCE
from quire.scheduler.core.rows import Rows
from quire.scheduler.core.sequence import Blocker, Sequence, State
from quire.scheduler.time_limits import TimeLimits


class Concerns:
    """Extensions that act on new requests, found by the requests that they concern."""

    def __init__(self, extensions: Seq[Extension] = ()) -> None:
        extensions = [each for each in extensions if _acts_on_arrivals(each)]
        self._extensions = [(each, each.fields, each.names) for each in extensions]
        self._always = [each for each in extensions if not each.fields]
        self._names = [each.names for each in extensions if each.fields and each.names != ()]
        names = sorted({name for each in extensions for name in each.fields})
        # One comparison for all fields, since most requests set none of them
        self._values = attrgetter(*names, "is_open", "is_open")  # always several, so a tuple
        self._defaults = self._values(SimpleNamespace(**DEFAULTS_OF_REQUEST))

    def of(self, request: Request) -> list[Extension]:
        """Return the extensions that a request concerns."""
        request_id = request.request_id
        is_named = [True for names in self._names if request_id in names]
        if not is_named and self._values(request) == self._defaults:
            return self._always
        return [
            extension
            for extension, fields, names in self._extensions
            if not fields or request_id in names or request.sets(fields)
        ]


def _acts_on_arrivals(extension: Extension) -> bool:
    kind = type(extension)
    does_more = kind.accept is not Extension.accept or kind.enter is not Extension.enter
    return does_more or isinstance(extension, RequestCompletion)


def limit_of(request: Request, num_prompt: int, max_model_len: int) -> int:
    """Return the length at which a sequence with a prompt of num_prompt tokens ends."""
    return min(num_prompt + (request.params.max_tokens or max_model_len), max_model_len)


class Arrivals:
    """Entry point of requests: checks them, creates their sequences and queues them. features: the
    attached features. max_model_len: maximum tokens of a sequence."""

    def __init__(
        self,
        rows: Rows,
        memory: Memory,
        lifecycle: Lifecycle,
        forking: Forking,
        features: Seq[object],
        max_model_len: int,
    ) -> None:
        self.time_limits = TimeLimits()
        self._rows, self._memory, self._lifecycle = rows, memory, lifecycle
        self._forking, self._features = forking, features
        self._max_model_len = max_model_len
        self._num_arrivals = 0
        self._concerns = Concerns()  # set by `connect`

    def connect(self) -> None:
        """Find the extensions, and the request fields and ids that each of them concerns."""
        self._concerns = Concerns(of_kind(self._features, Extension))

    def add(self, request: Request, now: float) -> None:
        """Check a request and queue it. Raise RequestError if it can never be served, and
        EngineBusy if it cannot be served now."""
        self._enter(*self._accept(request, now), now)

    def _accept(self, request: Request, now: float) -> tuple[Sequence, Seq[Extension]]:
        """Check a request. Return its sequence, and the extensions that it concerns."""
        if request.request_id in self._lifecycle.sequences:
            raise RequestError(f"request id {request.request_id!r} is in use; choose another.")
        num_prompt = len(request.prompt_token_ids)
        if not 1 <= num_prompt < self._max_model_len:
            raise RequestError(
                f"the prompt has {num_prompt} tokens; between 1 and max_model_len - 1 ="
                f" {self._max_model_len - 1} are possible. Shorten it or raise max_model_len."
            )
        num, max_output = request.params.num_samples, request.params.max_tokens
        if num > self._rows.table.num_rows:
            raise RequestError(
                f"{num} sequences are more than max_num_seqs={self._rows.table.num_rows}; request"
                " fewer (n, best_of) or raise max_num_seqs."
            )
        concerned = self._concerns.of(request)
        if completions := of_kind(concerned, RequestCompletion):
            for completion in completions:
                request = completion.complete(request)
            concerned = self._concerns.of(request)
        has_room = [each.accept(request) for each in concerned]
        sequence = self.new_sequence(request, now)
        if any(has_room):
            return sequence, concerned
        if request.is_open:
            check_open(request.params)
        elif not self.fits_at_all(sequence, sequence.limit, num):
            raise RequestError(
                f"{num_prompt} prompt tokens and {num} x {max_output or self._max_model_len}"
                " output tokens need more KV blocks than the pool has without pinned prefixes."
                " Lower max_tokens or enlarge kv_cache_memory_bytes."
            )
        return sequence, concerned

    def new_sequence(self, request: Request, now: float) -> Sequence:
        """Create the sequence of a request, or the leader of its group. It is not in any table
        yet."""
        num, num_prompt = request.params.num_samples, len(request.prompt_token_ids)
        limit = self._max_model_len
        if not request.is_open:
            limit = limit_of(request, num_prompt, self._max_model_len)
        sequence = Sequence(
            request=request,
            arrival=self._num_arrivals,
            arrival_s=now,
            limit=limit,
            blocks=self._memory.new_sequence(),
            root=self._memory.names.root(request, num, self._num_arrivals),
            table=self._rows.table,
            # "I" is read faster than "i"; `RequestLimits` has refused negative and huge ids
            saved_tokens=np.frombuffer(array("I", request.prompt_token_ids), np.int32),
            num_prompt_tokens=num_prompt,
            is_open=request.is_open,
            reads_cache=request.params.reads_prefix_cache,
            blockers=frozenset((Blocker.READY,) if request.grammar or request.is_held_back else ()),
            keep_s=request.keep_s,
        )
        if num > 1 or request.params.use_beam_search:
            sequence.group = self._forking.group_of(sequence, num)
        return sequence

    def enter(self, sequence: Sequence, now: float) -> None:
        """Queue a new sequence that needs no check, or park it until it can be computed."""
        self._enter(sequence, self._concerns.of(sequence.request), now)

    def _enter(self, sequence: Sequence, concerned: Seq[Extension], now: float) -> None:
        self._num_arrivals += sequence.request.params.num_samples
        for extension in concerned:
            if extension.reads_digests:
                self._memory.names.readable(sequence)
            extension.enter(sequence, now)
        is_parked = bool(sequence.blockers) or not sequence.has_something_to_compute
        self._lifecycle.enter(sequence, is_parked, now)
        self.time_limits.add(sequence)

    def append(self, message: Append, now: float) -> None:
        """Append a piece to an open prompt. If the prompt gets too long, the request fails."""
        sequence = self._lifecycle.sequences.get(message.request_id)
        if sequence is None or not sequence.is_open:
            return  # the request has ended
        num_prompt = sequence.num_prompt_tokens + len(message.token_ids)
        limit, num_needed = self._max_model_len, num_prompt + 1
        if message.is_last:
            limit = limit_of(sequence.request, num_prompt, self._max_model_len)
            num_needed = limit
        is_too_long = num_prompt >= self._max_model_len
        if is_too_long or not self.fits_at_all(sequence, num_needed, 1):
            error = Failure(REQUEST_FAILED, self._too_long(num_prompt))
            self._lifecycle.drop(sequence, Finish("error", error=error), now)
            return
        sequence.num_prompt_tokens, sequence.limit = num_prompt, limit
        sequence.is_open = not message.is_last
        sequence.due_at += int(PATIENCE * len(message.token_ids))
        self._rows.extend_prompt(sequence, np.asarray(message.token_ids, np.int32))
        self._lifecycle.add_event(Appended(now, message.request_id, len(message.token_ids)))
        if sequence.state is State.PARKED and sequence.has_something_to_compute:
            self._lifecycle.unpark(sequence)

    def take_ready(self, message: GrammarReady, now: float) -> None:
        """Remove the READY blocker of a request whose grammar or model is ready, and queue it if
        nothing else blocks it. If preparing it failed, the request fails."""
        sequence = self._lifecycle.sequences.get(message.request_id)
        if sequence is None or Blocker.READY not in sequence.blockers:
            return  # the request has ended
        if message.error is not None:
            error = Failure.of_request(message.error)
            self._lifecycle.drop(sequence, Finish("error", error=error), now)
            return
        sequence.blockers -= {Blocker.READY}
        self._lifecycle.add_event(GrammarTaken(now, message.request_id))
        if sequence.has_something_to_compute:
            self._lifecycle.unpark(sequence)

    def cancel(self, message: Cancel, now: float) -> None:
        """End a request, and report that to its client."""
        for member in self._unfinished(message.request_id):
            self._lifecycle.drop(member, CANCELLED, now)

    def abort(self, message: Abort, now: float) -> None:
        """End a request, or one of its sequences. Index -1 means all. The client gets no report."""
        for member in self._unfinished(message.request_id):
            if message.index in (-1, member.index):
                self._lifecycle.end(member, message.finish_reason, now)

    def drop_late(self, now: float) -> None:
        """End the requests whose time limit is over."""
        for sequence, finish in self.time_limits.take_late(self._lifecycle.sequences, now):
            for member in self._unfinished(sequence.request.request_id):
                self._lifecycle.drop(member, finish, now)

    def fits_at_all(self, sequence: Sequence, limit: int, num: int) -> bool:
        """Return whether `num` sequences of this request, each of `limit` tokens, fit into the
        pools at all."""
        return self._memory.fits_at_all(self._memory.needs_of_all(sequence, limit - 1, num))

    def _unfinished(self, request_id: str) -> list[Sequence]:
        """Return the unfinished sequences of a request; none for an unknown request."""
        sequence = self._lifecycle.sequences.get(request_id)
        members = [] if sequence is None else sequence.members
        return [member for member in members if member.state is not State.ENDED]

    def _too_long(self, num_prompt: int) -> str:
        return (
            f"the prompt has grown to {num_prompt} tokens. With its output it does not fit next to"
            f" the pinned prefixes (max_model_len {self._max_model_len}); send less, lower"
            " max_tokens, or enlarge kv_cache_memory_bytes."
        )
