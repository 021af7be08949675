"""Masks of a plan's rows, and look-ahead into the tokens that grammars allow.

    position      0              1                         2
    mask of    known tokens   and the first draft   and the second ...    to a row's last draft

No token is allowed after a draft token that its own mask forbids, after an end token, and where a
grammar is in error. No row samples there, or its next step asks for the mask again.
"""

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.base.masks import TokenMasks
from quire.base.plan import Int32
from quire.engine.grammars.compiler import Compiler, check, in_words, is_final
from quire.engine.grammars.matchers import Follower, Wanted
from quire.engine.grammars.vocabulary import Vocabulary, num_words

if TYPE_CHECKING:
    from llguidance import LLExecutor

logger = logging.getLogger("quire")


@dataclass(slots=True)
class Asked:
    """Matcher that is to compute a mask. place: index of the mask among all rows and positions."""

    wanted: Wanted
    follower: Follower
    place: int


class MaskMaker:
    """Maker of masks, used by one thread at a time."""

    def __init__(self, compiler: Compiler, vocab_size: int, num_threads: int) -> None:
        self._compiler = compiler
        self._num_words = num_words(vocab_size)
        self._num_threads = num_threads
        self._executor: LLExecutor | None = None
        self._lock = threading.Lock()

    def make_or_tell(self, rows: Int32, wanted: list[Wanted]) -> TokenMasks:
        """Return the masks of these `rows` [N]. They report any error, which is never raised: the
        device waits for them."""
        try:
            with self._lock:
                return self.make(rows, wanted)
        except BaseException as error:
            logger.exception("masks of %d rows", len(rows))
            words = np.broadcast_to(
                np.int32(0), (len(rows), _num_positions(wanted), self._num_words)
            )
            return TokenMasks(rows, words, dict.fromkeys(rows.tolist(), in_words(error)))

    def make(self, rows: Int32, wanted: list[Wanted]) -> TokenMasks:
        """Return the masks of these `rows` [N]; an error in a grammar is reported for its row."""
        num_positions = _num_positions(wanted)
        words = np.zeros((len(rows), num_positions, self._num_words), np.int32)
        words[:, 0] = -1
        masks = words.reshape(-1, self._num_words)
        errors: dict[int, str] = {}
        if asked := self._follow(wanted, num_positions, errors):
            self._ask(asked, masks, errors)
        for i, each in enumerate(wanted):
            if each.row in errors:
                words[i] = 0
        for position in range(1, num_positions):
            asked = [each for each in asked if self._goes_on(each, position, masks)]
            self._ask_further(asked, masks)
        return TokenMasks(rows, words, errors)

    def forced(self, wanted: Wanted) -> list[int]:
        """Return the tokens that must come next, as far as the grammar leaves no choice."""
        with self._lock:
            follower = _follow(wanted)
            return [] if follower is None else follower.matcher.compute_ff_tokens()

    def cut(self, wanted: Wanted) -> int:
        """Return how many of the draft tokens, from the first on, the grammar allows."""
        with self._lock:
            follower = _follow(wanted)
            return 0 if follower is None else follower.matcher.validate_tokens(list(wanted.guesses))

    def _follow(
        self, wanted: list[Wanted], num_positions: int, errors: dict[int, str]
    ) -> list[Asked]:
        asked = []
        for i, each in enumerate(wanted):
            if each.guided is None:
                continue
            try:
                follower = each.guided.follow(each.index, each.token_ids)
                asked.append(Asked(each, follower, i * num_positions))
            except Exception as error:
                errors[each.row] = in_words(error)
        return asked

    def _ask(self, asked: list[Asked], masks: Int32, errors: dict[int, str]) -> None:
        """Fill the masks of position 0: the tokens allowed after the known tokens."""
        self._fill(asked, masks)
        for each in asked:
            if each.follower.matcher.is_error():
                try:
                    if not is_final(each.follower.matcher):
                        each.follower = self._start_over(each.wanted)
                        self._fill([each], masks)
                    check(each.follower.matcher)
                except Exception as error:
                    errors[each.wanted.row] = in_words(error)
        self._leave_out_ends(asked, masks)

    def _goes_on(self, asked: Asked, position: int, masks: Int32) -> bool:
        """Return whether to fill the mask of a position, after taking the draft token before it."""
        guesses, before = asked.wanted.guesses, asked.place
        if position > len(guesses):
            return False
        guess = guesses[position - 1]
        asked.place += 1
        may_stand = bool(masks[before, guess // 32] >> (guess % 32) & 1)
        is_end = guess in self._vocabulary.end_token_ids
        return may_stand and not is_end and asked.follower.take(guess)

    def _ask_further(self, asked: list[Asked], masks: Int32) -> None:
        """Fill masks of a later position; they allow nothing where a matcher is in error."""
        if not asked:
            return
        self._fill(asked, masks)
        for each in asked:
            if each.follower.matcher.is_error():
                masks[each.place] = 0
        self._leave_out_ends(asked, masks)

    def _start_over(self, wanted: Wanted) -> Follower:
        """Return a follower, from a grammar that is compiled again if the old one is in error.
        Copies share results up to a limit; when one copy meets it, all are useless."""
        guided = wanted.guided
        assert guided is not None, "an ended row has no mask"
        follower = guided.followers.get(wanted.index)
        if follower is not None and follower.matcher.is_error():
            guided.start_over(self._compiler.compile(guided.request.grammar, guided.compiled))
        return guided.follow(wanted.index, wanted.token_ids)

    def _fill(self, asked: list[Asked], masks: Int32) -> None:
        """Have the library write masks, on its threads, while Python continues. A tokenizer may
        have more tokens than the model's table, so wider masks are cut."""
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._num_threads)
        vocabulary = self._vocabulary
        places = [each.place for each in asked]
        num_known, wide = num_words(vocabulary.tokens.vocab_size), masks
        matchers = [(each.follower.matcher, each.place) for each in asked]
        if num_known > masks.shape[1]:
            wide = np.empty((len(masks), num_known), np.int32)
        self._executor.unsafe_compute_mask_ptr(
            matchers, wide.ctypes.data, wide[0].nbytes, len(wide)
        )
        if wide is not masks:
            masks[places] = wide[places, : masks.shape[1]]
        padding = vocabulary.padding
        masks[places, -len(padding) :] &= padding

    def _leave_out_ends(self, asked: list[Asked], masks: Int32) -> None:
        """Forbid end tokens where another token is allowed, for requests with `ignore_eos`."""
        for each in asked:
            guided = each.wanted.guided
            if guided is not None and guided.request.params.ignore_eos:
                others = masks[each.place] & ~self._vocabulary.ends
                if others.any():
                    masks[each.place] = others

    @property
    def _vocabulary(self) -> Vocabulary:
        vocabulary = self._compiler.vocabulary
        assert vocabulary is not None, "a grammar was compiled without it"
        return vocabulary


def _num_positions(wanted: list[Wanted]) -> int:
    return 1 + max((len(each.guesses) for each in wanted), default=0)


def _follow(wanted: Wanted) -> Follower | None:
    """Return a sequence's follower; None if its grammar is in error, which its mask reports."""
    if wanted.guided is None or wanted.guided.compiled is None:
        return None
    follower = wanted.guided.follow(wanted.index, wanted.token_ids)
    return None if follower.matcher.is_error() else follower
