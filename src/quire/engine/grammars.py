"""Grammars while their requests run: compiled, followed token by token, asked what they allow.

    core's thread   begin(request)        take() -> GrammarReady     fill(promise, rows, sequences)
                        |                    ^                            |
    compiling           +--- compile, warm --+                            |
    masks                                                 follow, ask, promise.put(...)

Matchers follow sequences statelessly: before a mask is made, the matcher of a sequence goes to its
known output tokens, back to where these differ from those that it has taken, and on from there. So
a preemption costs nothing, forks copy, and beams and rewinds go back, and nobody needs to be told.

The caller fills a promise once all results of earlier plans are in: then the known tokens are those
before the position that is masked. llguidance is imported, and the threads are made, when the first
grammar comes.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from quire.base.errors import QuireError
from quire.base.events import Event, Finished
from quire.base.masks import MaskPromise, TokenMasks
from quire.base.messages import GrammarReady, Request
from quire.base.plan import Int32
from quire.engine.threaded import DeviceThread
from quire.engine.vocabulary import MakeVocabulary, Vocabulary, num_words
from quire.scheduler.sequence import Sequence as Line
from quire.scheduler.sequence import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from llguidance import LLExecutor, LLMatcher

logger = logging.getLogger("quire")

MOST_CACHED = 32  # compiled grammars that are kept for other requests
MAX_LEXER_STATES = 50_000  # of one compiled grammar: some 20 MB


@dataclass(eq=False, slots=True)
class Follower:
    """A matcher, and the output tokens that it has taken."""

    matcher: "LLMatcher"
    token_ids: Int32 = field(default_factory=lambda: np.empty(0, np.int32))

    def go_to(self, token_ids: Int32) -> None:
        """Take these tokens instead, from where they differ on. A matcher that cannot go on, or
        back, is in error from then on."""
        num_kept = num_common(self.token_ids, token_ids)
        if num_kept < len(self.token_ids):
            self.matcher.rollback(len(self.token_ids) - num_kept)
        if num_kept < len(token_ids):
            self.matcher.consume_tokens(token_ids[num_kept:].tolist())
        self.token_ids = token_ids


@dataclass(eq=False, slots=True)
class Guided:
    """A request with a grammar. compiled: without any token taken; made by the compiling thread.
    followers: of its sequences, by index; for the thread that makes masks."""

    request: Request
    compiled: "LLMatcher | None" = None
    followers: dict[int, Follower] = field(default_factory=dict)

    def start_over(self, compiled: "LLMatcher") -> None:
        """Follow with matchers of this one, which has no token taken, from now on."""
        self.compiled, self.followers = compiled, {}

    def follow(self, index: int, token_ids: Int32) -> "LLMatcher":
        """Return the matcher of a sequence, which has taken these output tokens. One that is not
        known yet is copied from the one that is nearest."""
        follower = self.followers.get(index) or self._copy_nearest(token_ids)
        follower.go_to(token_ids)
        if follower.matcher.is_error():  # it cannot go back over what `max_tokens` has ended
            follower = self._fresh()
            follower.go_to(token_ids)
        self.followers[index] = follower
        return follower.matcher

    def _copy_nearest(self, token_ids: Int32) -> Follower:
        others = self.followers.values()
        if not others:
            return self._fresh()
        nearest = max(others, key=lambda other: num_common(other.token_ids, token_ids))
        return Follower(nearest.matcher.deep_copy(), nearest.token_ids)

    def _fresh(self) -> Follower:
        assert self.compiled is not None, "a sequence runs before its grammar is compiled"
        return Follower(self.compiled.deep_copy())


@dataclass(frozen=True, slots=True)
class Wanted:
    """One mask. guided: None allows everything, for a sequence that has ended."""

    row: int
    guided: Guided | None
    index: int = 0
    token_ids: Int32 = field(default_factory=lambda: np.empty(0, np.int32))


class Grammars:
    """The grammars of one engine's requests.

    make_vocabulary: called once, on the compiling thread; what it raises of ours is told to the
    request, and it is called again for the next one. vocab_size: of the logits. num_threads: that
    make masks. on_ready: called, from any thread, when `take` has something to give.
    """

    def __init__(
        self,
        make_vocabulary: MakeVocabulary,
        vocab_size: int,
        num_threads: int,
        on_ready: "Callable[[], None]",
    ) -> None:
        self._vocab_size, self._on_ready = vocab_size, on_ready
        self._compiler = _Compiler(make_vocabulary)
        self._masks = _Masks(self._compiler, vocab_size, num_threads)
        self._guided: dict[str, Guided] = {}
        self._compiled: SimpleQueue[tuple[Guided, str | None]] = SimpleQueue()
        self._compiling: DeviceThread | None = None
        self._filling: DeviceThread | None = None
        self._num_open = 0

    @property
    def num_open(self) -> int:
        """Grammars that are being compiled."""
        return self._num_open

    @property
    def num_followed(self) -> int:
        """Requests that have a grammar and have not ended."""
        return len(self._guided)

    @property
    def has_answers(self) -> bool:
        return not self._compiled.empty()

    def begin(self, request: Request) -> None:
        """Compile the grammar of a request that was queued; `take` tells when it is ready."""
        if self._compiling is None:
            self._compiling, self._filling = DeviceThread("grammars"), DeviceThread("masks")
        guided = self._guided[request.request_id] = Guided(request)
        compiler, compiled, on_ready = self._compiler, self._compiled, self._on_ready
        self._num_open += 1

        def compile_it() -> None:
            error = None
            try:
                guided.compiled = compiler.compile(request.grammar)
            except BaseException as raised:  # as a panic of the library's is
                error = _in_words(raised)
            compiled.put((guided, error))
            on_ready()

        self._compiling.do(compile_it)

    def take(self) -> list[GrammarReady]:
        """Take what is ready, without what was compiled for requests that have ended."""
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
        """Forget the requests that have ended."""
        if self._guided:
            for event in events:
                if isinstance(event, Finished):
                    self._guided.pop(event.request_id, None)

    def fill(self, promise: MaskPromise, rows: Int32, sequences: Sequence[Line]) -> None:
        """Have the masks of these rows made, for the token after those that are known now."""
        assert self._filling is not None, "nobody has a grammar"
        masks = self._masks
        wanted = [self._want(*each) for each in zip(rows.tolist(), sequences, strict=True)]
        self._filling.do(lambda: promise.put(masks.make_or_tell(rows, wanted)))

    def forgo(self, promise: MaskPromise, rows: Int32) -> None:
        """Put masks that allow everything, for a plan whose result will not count."""
        promise.put(self._masks.make(rows, [Wanted(row, None) for row in rows.tolist()]))

    def close(self) -> None:
        """End the threads, when they have done what they were given."""
        for thread in (self._compiling, self._filling):
            if thread is not None:
                thread.close()

    def _want(self, row: int, sequence: Line) -> Wanted:
        guided = self._guided.get(sequence.request.request_id)
        is_over = sequence.state is State.ENDED
        if guided is None or is_over or guided.request is not sequence.request:
            return Wanted(row, None)
        token_ids = sequence.known_tokens[sequence.num_prompt_tokens :].copy()
        return Wanted(row, guided, sequence.index, token_ids)


class _Compiler:
    """Compiles, on any thread. vocabulary: None before the first grammar."""

    def __init__(self, make_vocabulary: MakeVocabulary) -> None:
        self.vocabulary: Vocabulary | None = None
        self._make_vocabulary = make_vocabulary
        self._cache: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: str, instead_of: "LLMatcher | None" = None) -> "LLMatcher":
        """Return a matcher that nobody may change. instead_of: one that is used up. Raises
        _BadGrammar, ConfigError, MissingDependency."""
        if self.vocabulary is None:
            self.vocabulary = self._make_vocabulary()
        with self._lock:
            found = self._cache.get(grammar)
        if found is None or found is instead_of:
            found = _compiled(self.vocabulary, grammar)
        with self._lock:
            self._cache[grammar] = found
            self._cache.move_to_end(grammar)
            if len(self._cache) > MOST_CACHED:
                self._cache.popitem(last=False)
        return found


class _BadGrammar(Exception):
    """What llguidance says of a grammar."""


def _compiled(vocabulary: Vocabulary, grammar: str) -> "LLMatcher":
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=limits)
    _check(matcher)
    matcher.compute_bitmask()  # copies share what this finds out
    _check(matcher)
    return matcher


def _check(matcher: "LLMatcher") -> None:
    """Raise _BadGrammar for a matcher that cannot go on."""
    if matcher.is_error():
        raise _BadGrammar(matcher.get_error().partition("\n<")[0])  # not its inner state


class _Masks:
    """The side of the thread that makes masks."""

    def __init__(self, compiler: _Compiler, vocab_size: int, num_threads: int) -> None:
        self._compiler = compiler
        self._num_words = num_words(vocab_size)
        self._num_threads = num_threads
        self._executor: LLExecutor | None = None

    def make_or_tell(self, rows: Int32, wanted: list[Wanted]) -> TokenMasks:
        """Make the masks of these rows; whatever goes wrong is told by them. Somebody waits."""
        try:
            return self.make(rows, wanted)
        except BaseException as error:
            logger.exception("masks of %d rows", len(rows))
            words = np.broadcast_to(np.int32(0), (len(rows), 1, self._num_words))
            return TokenMasks(rows, words, dict.fromkeys(rows.tolist(), _in_words(error)))

    def make(self, rows: Int32, wanted: list[Wanted]) -> TokenMasks:
        """Make the masks of these rows. What is wrong with a grammar is told of its row."""
        words = np.full((len(rows), 1, self._num_words), -1, np.int32)
        errors: dict[int, str] = {}
        asked = self._follow(wanted, errors)
        if asked:
            self._ask(asked, words, errors)
        for i, each in enumerate(wanted):
            if each.row in errors:
                words[i] = 0
        return TokenMasks(rows, words, errors)

    def _follow(
        self, wanted: list[Wanted], errors: dict[int, str]
    ) -> "list[tuple[LLMatcher, int, Wanted]]":
        asked = []
        for i, each in enumerate(wanted):
            if each.guided is None:
                continue
            try:
                asked.append((each.guided.follow(each.index, each.token_ids), i, each))
            except Exception as error:
                errors[each.row] = _in_words(error)
        return asked

    def _ask(
        self, asked: "list[tuple[LLMatcher, int, Wanted]]", words: Int32, errors: dict[int, str]
    ) -> None:
        """Ask all matchers at once, on the library's threads; Python goes on meanwhile."""
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._num_threads)
        vocabulary = self._compiler.vocabulary
        assert vocabulary is not None, "a grammar was compiled without it"
        self._fill(self._executor, [(matcher, i) for matcher, i, _ in asked], words)
        for matcher, i, each in asked:
            if matcher.is_error():
                try:
                    again = self._start_over(each)
                    self._fill(self._executor, [(again, i)], words)
                    _check(again)
                except Exception as error:
                    errors[each.row] = _in_words(error)
        words[:, :, -len(vocabulary.padding) :] &= vocabulary.padding
        for _, i, each in asked:
            if each.guided is not None and each.guided.request.params.ignore_eos:
                _leave_out_ends(words[i], vocabulary)

    def _start_over(self, each: Wanted) -> "LLMatcher":
        """Return the matcher of a grammar that is compiled anew. Copies share what they find out,
        up to a limit, and when one of them meets it, none is of any use any more."""
        guided = each.guided
        assert guided is not None, "whoever has ended is not asked"
        follower = guided.followers.get(each.index)
        if follower is not None and follower.matcher.is_error():
            guided.start_over(self._compiler.compile(guided.request.grammar, guided.compiled))
        return guided.follow(each.index, each.token_ids)

    def _fill(
        self, executor: "LLExecutor", asked: "list[tuple[LLMatcher, int]]", words: Int32
    ) -> None:
        """Let the library write the masks. A tokenizer may know more tokens than the model."""
        vocabulary = self._compiler.vocabulary
        assert vocabulary is not None, "a grammar was compiled without it"
        num_known, wide = num_words(vocabulary.tokens.vocab_size), words
        if num_known > words.shape[2]:
            wide = np.empty((len(words), 1, num_known), np.int32)
        executor.unsafe_compute_mask_ptr(asked, wide.ctypes.data, wide[0].nbytes, len(wide))
        if wide is not words:
            places = [i for _, i in asked]
            words[places] = wide[places, :, : words.shape[2]]


def _leave_out_ends(words: Int32, vocabulary: Vocabulary) -> None:
    """Forbid the end where something else is allowed: the answer is not to end by itself."""
    others = words & ~vocabulary.ends
    if others.any():
        words[:] = others


def num_common(first: Int32, second: Int32) -> int:
    """Count the tokens with which both begin."""
    size = min(len(first), len(second))
    differs = first[:size] != second[:size]
    return int(differs.argmax()) if differs.any() else size


def _in_words(error: BaseException) -> str:
    if isinstance(error, QuireError):
        return str(error)
    what = str(error) if isinstance(error, _BadGrammar) else f"{type(error).__name__}: {error}"
    return f"the grammar of this request cannot be followed: {what}"
