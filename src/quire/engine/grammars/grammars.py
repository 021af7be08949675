"""Grammars of running requests: compiled, advanced token by token, and turned into masks.

    core's thread   begin(request)     take() -> GrammarReady    draft, cut    fill(promise, ...)
                        |                    ^                       ^                |
    compiling           +--- compile, warm --+                       |                |
    masks                                                  followers +-- ask, promise.put(...)

The caller fills a promise once all results of earlier plans are in. Then all tokens before the
first masked position are known. Tokens that a grammar forces may be used as draft tokens
(`draft`). The masks of positions with draft tokens are made together with the others of the plan.
The first grammar imports llguidance and starts the threads.
"""

import logging
from collections.abc import Iterable, Mapping
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from quire.base.events import Event, Finished
from quire.base.masks import MaskPromise, TokenMasks
from quire.base.messages import GrammarReady, Request
from quire.base.plan import Plan
from quire.engine.executors.threaded import DeviceThread
from quire.engine.grammars.compiler import Compiler, in_words
from quire.engine.grammars.mask_making import MaskMaker
from quire.engine.grammars.matchers import (
    NO_DRAFT,
    DraftLimits,
    Guided,
    GuidedDraft,
    MaskRequest,
    Propose,
)
from quire.engine.grammars.vocabulary import MakeVocabulary, num_words
from quire.scheduler.core.sequence import Sequence, State

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("quire")


class Grammars:
    """Grammars of one engine's requests.

    make_vocabulary: called once, on the compiling thread. If it raises, the request gets the error,
    and the next request calls it again.
    vocab_size: number of logits of a token.
    num_threads: threads that compute masks.
    on_ready: called, from any thread, when `take` has something to return."""

    def __init__(
        self,
        make_vocabulary: MakeVocabulary,
        vocab_size: int,
        num_threads: int,
        on_ready: "Callable[[], None]",
    ) -> None:
        self._num_words, self._on_ready = num_words(vocab_size), on_ready
        self._compiler = Compiler(make_vocabulary)
        self._masks = MaskMaker(self._compiler, vocab_size, num_threads)
        self._guided: dict[str, Guided] = {}
        self._compiled: SimpleQueue[tuple[Guided, str | None]] = SimpleQueue()
        self._compiling: DeviceThread | None = None
        self._filling: DeviceThread | None = None
        self._num_open = 0

    @property
    def num_open(self) -> int:
        """Number of grammars that are being compiled."""
        return self._num_open

    @property
    def num_followed(self) -> int:
        """Number of requests with a grammar that have not ended."""
        return len(self._guided)

    @property
    def has_answers(self) -> bool:
        return not self._compiled.empty()

    def begin(self, request: Request) -> None:
        """Start to compile the grammar of a queued request; `take` returns it when it is ready."""
        if self._compiling is None:
            self._compiling, self._filling = DeviceThread("grammars"), DeviceThread("masks")
        guided = self._guided[request.request_id] = Guided(request)
        compiler, compiled, on_ready = self._compiler, self._compiled, self._on_ready
        self._num_open += 1

        def compile_it() -> None:
            error = None
            try:
                guided.compiled = compiler.compile(request.grammar)
            except BaseException as raised:  # including a panic of the library
                error = in_words(raised)
            compiled.put((guided, error))
            on_ready()

        self._compiling.do(compile_it)

    def take(self) -> list[GrammarReady]:
        """Return the requests whose grammars are ready or have failed, without ended requests."""
        found: list[GrammarReady] = []
        while True:
            try:
                guided, error = self._compiled.get_nowait()
            except Empty:
                return found
            self._num_open -= 1
            request_id = guided.request.request_id
            if self._guided.get(request_id) is guided:
                found.append(GrammarReady(request_id, error))

    def hear(self, events: Iterable[Event]) -> None:
        """Drop the requests that have ended."""
        if self._guided:
            for event in events:
                if isinstance(event, Finished):
                    self._guided.pop(event.request_id, None)

    def draft(self, sequence: Sequence, propose: Propose, limits: DraftLimits) -> GuidedDraft:
        """Return draft tokens that a sequence's grammar allows. Forced tokens come wherever there
        are some; `propose` is called for the tokens between them."""
        return self._guarded(sequence, lambda of: self._masks.draft(of, propose, limits))

    def forced(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """Return the tokens that must come next in a sequence, as far as its grammar leaves no
        choice."""
        return self.draft(sequence, lambda _: [], DraftLimits(max_tokens, 0)).token_ids

    def cut(self, sequence: Sequence, draft_ids: list[int]) -> list[int]:
        """Return the draft tokens that a sequence's grammar allows, up to the first that it
        forbids."""
        given = tuple(draft_ids)

        def allowed(requested: MaskRequest) -> GuidedDraft:
            return GuidedDraft(draft_ids[: self._masks.cut(requested)], [])

        return self._guarded(sequence, allowed, given).token_ids

    def fill(self, promise: MaskPromise, plan: Plan, sequences: Mapping[int, Sequence]) -> None:
        """Start to make the masks of a plan's masked rows: after the known tokens, and after each
        draft token. sequences: by row."""
        assert self._filling is not None, "no row has a grammar"
        masks, rows = self._masks, plan.masked_rows
        draft_ids = {draft.row: tuple(draft.token_ids.tolist()) for draft in plan.drafts}
        requested = [
            self._mask_request(row, sequences[row], draft_ids.get(row, ())) for row in rows.tolist()
        ]
        self._filling.do(lambda: promise.put(masks.make_or_report(rows, requested)))

    def forgo(self, promise: MaskPromise, plan: Plan) -> None:
        """Put masks that allow all tokens, for a plan whose result will not count."""
        num_positions = 1 + int(plan.num_drafts.max(initial=0))
        shape = len(plan.masked_rows), num_positions, self._num_words
        promise.put(TokenMasks(plan.masked_rows, np.full(shape, -1, np.int32)))

    def close(self) -> None:
        """End the threads after their queued work."""
        for thread in (self._compiling, self._filling):
            if thread is not None:
                thread.close()

    def _mask_request(
        self, row: int, sequence: Sequence, draft_ids: tuple[int, ...] = ()
    ) -> MaskRequest:
        guided = self._guided.get(sequence.request.request_id)
        is_over = sequence.state is State.ENDED
        if guided is None or is_over:
            return MaskRequest(row, None)
        # A new request may reuse an id. The scheduler may replace the request object, but it keeps
        # the list of prompt tokens.
        if guided.request.prompt_token_ids is not sequence.request.prompt_token_ids:
            return MaskRequest(row, None)
        token_ids = sequence.known_tokens[sequence.num_prompt_tokens :].copy()
        forced = guided.forced(sequence.index, token_ids, draft_ids) if draft_ids else ()
        return MaskRequest(row, guided, sequence.index, token_ids, draft_ids, forced)

    def _guarded(
        self,
        sequence: Sequence,
        compute: "Callable[[MaskRequest], GuidedDraft]",
        draft_ids: tuple[int, ...] = (),
    ) -> GuidedDraft:
        """Return the result of `compute`. An error only costs draft tokens here; the row's mask
        reports it."""
        try:
            return compute(self._mask_request(sequence.row, sequence, draft_ids))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # including a panic of the library
            logger.exception("draft tokens for %s", sequence.request.request_id)
            return NO_DRAFT
