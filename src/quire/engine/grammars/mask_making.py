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
from quire.engine.grammars.matchers import (
    NO_DRAFT,
    DraftLimits,
    Follower,
    GuidedDraft,
    MaskRequest,
    Propose,
    guided_draft,
)
from quire.engine.grammars.vocabulary import Vocabulary, num_words

if TYPE_CHECKING:
    from llguidance import LLExecutor

logger = logging.getLogger("quire")

BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)  # each of a mask's words


@dataclass(slots=True)
class MaskJob:
    """Matcher that is to compute a mask. mask_index: index of the mask among all rows and
    positions."""

    requested: MaskRequest
    follower: Follower
    mask_index: int


class MaskMaker:
    """Maker of masks, used by one thread at a time."""

    def __init__(self, compiler: Compiler, vocab_size: int, num_threads: int) -> None:
        self._compiler = compiler
        self._num_words = num_words(vocab_size)
        self._num_threads = num_threads
        self._executor: LLExecutor | None = None
        self._lock = threading.Lock()

    def make_or_report(self, rows: Int32, requested: list[MaskRequest]) -> TokenMasks:
        """Return the masks of these `rows` [N]. They report any error, which is never raised: the
        device waits for them."""
        try:
            with self._lock:
                return self.make(rows, requested)
        except BaseException as error:
            logger.exception("masks of %d rows", len(rows))
            words = np.broadcast_to(
                np.int32(0), (len(rows), _num_positions(requested), self._num_words)
            )
            return TokenMasks(rows, words, dict.fromkeys(rows.tolist(), in_words(error)))

    def make(self, rows: Int32, requested: list[MaskRequest]) -> TokenMasks:
        """Return the masks of these `rows` [N]; an error in a grammar is reported for its row."""
        num_positions = _num_positions(requested)
        words = np.zeros((len(rows), num_positions, self._num_words), np.int32)
        words[:, 0] = -1
        masks = words.reshape(-1, self._num_words)
        errors: dict[int, str] = {}
        if pending := self._follow(requested, num_positions, errors):
            self._fill_first(pending, masks, errors)
        for i, each in enumerate(requested):
            if each.row in errors:
                words[i] = 0
        for position in range(1, num_positions):
            pending = [each for each in pending if self._takes_draft(each, position, masks)]
            self._fill_later(pending, masks, position)
        return TokenMasks(rows, words, errors)

    def draft(self, requested: MaskRequest, propose: Propose, limits: DraftLimits) -> GuidedDraft:
        """Return draft tokens that the grammar allows; see `guided_draft`."""
        with self._lock:
            follower = _follow(requested)
            if follower is None or requested.guided is None:
                return NO_DRAFT
            ends = self._vocabulary.end_token_ids
            ahead = follower if requested.guided.rolls_back else follower.copy()
            found = guided_draft(ahead, propose, limits, ends)
            requested.guided.drafts[requested.index] = requested.token_ids, found
            return found

    def cut(self, requested: MaskRequest) -> int:
        """Return how many of the draft tokens, from the first on, the grammar allows."""
        with self._lock:
            follower = _follow(requested)
            return (
                0
                if follower is None
                else follower.matcher.validate_tokens(list(requested.draft_ids))
            )

    def _follow(
        self, requested: list[MaskRequest], num_positions: int, errors: dict[int, str]
    ) -> list[MaskJob]:
        pending = []
        for i, each in enumerate(requested):
            if each.guided is None:
                continue
            try:
                follower = each.guided.follow(each.index, each.token_ids)
                pending.append(MaskJob(each, follower, i * num_positions))
            except Exception as error:
                errors[each.row] = in_words(error)
        return pending

    def _fill_first(self, pending: list[MaskJob], masks: Int32, errors: dict[int, str]) -> None:
        """Fill the masks of position 0: the tokens allowed after the known tokens."""
        self._fill(pending, masks, 0)
        for each in pending:
            if each.follower.matcher.is_error():
                try:
                    if not is_final(each.follower.matcher):
                        each.follower = self._start_over(each.requested)
                        self._fill([each], masks, 0)
                    check(each.follower.matcher)
                except Exception as error:
                    errors[each.requested.row] = in_words(error)
        self._forbid_ends(pending, masks)

    def _takes_draft(self, pending: MaskJob, position: int, masks: Int32) -> bool:
        """Return whether to fill the mask of a position, after taking the draft token before it."""
        draft_ids, before = pending.requested.draft_ids, pending.mask_index
        if position > len(draft_ids):
            return False
        draft_id = draft_ids[position - 1]
        pending.mask_index += 1
        may_stand = bool(masks[before, draft_id // 32] >> (draft_id % 32) & 1)
        is_end = draft_id in self._vocabulary.end_token_ids
        return may_stand and not is_end and pending.follower.take(draft_id)

    def _fill_later(self, pending: list[MaskJob], masks: Int32, position: int) -> None:
        """Fill masks of a later position; they allow nothing where a matcher is in error."""
        if not pending:
            return
        self._fill(pending, masks, position)
        for each in pending:
            if each.follower.matcher.is_error():
                masks[each.mask_index] = 0
        self._forbid_ends(pending, masks)

    def _start_over(self, requested: MaskRequest) -> Follower:
        """Return a follower, from a grammar that is compiled again if the old one is in error.
        Copies share results up to a limit; when one copy meets it, all are useless."""
        guided = requested.guided
        assert guided is not None, "an ended row has no mask"
        follower = guided.followers.get(requested.index)
        if follower is not None and follower.matcher.is_error():
            guided.start_over(self._compiler.compile(guided.request.grammar, guided.compiled))
        return guided.follow(requested.index, requested.token_ids)

    def _fill(self, pending: list[MaskJob], masks: Int32, position: int) -> None:
        """Write the masks of a position. A forced token is the only one that is allowed."""
        others = []
        for each in pending:
            if each.requested.is_forced(position):
                draft_id = each.requested.draft_ids[position]
                masks[each.mask_index] = 0
                masks[each.mask_index, draft_id // 32] = BITS[draft_id % 32]
            else:
                others.append(each)
        if others:
            self._compute(others, masks)

    def _compute(self, pending: list[MaskJob], masks: Int32) -> None:
        """Have the library write masks, on its threads, while Python continues. A tokenizer may
        have more tokens than the model's table, so wider masks are cut."""
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._num_threads)
        vocabulary = self._vocabulary
        mask_indices = [each.mask_index for each in pending]
        num_known, wide = num_words(vocabulary.tokens.vocab_size), masks
        matchers = [(each.follower.matcher, each.mask_index) for each in pending]
        if num_known > masks.shape[1]:
            wide = np.empty((len(masks), num_known), np.int32)
        self._executor.unsafe_compute_mask_ptr(
            matchers, wide.ctypes.data, wide[0].nbytes, len(wide)
        )
        if wide is not masks:
            masks[mask_indices] = wide[mask_indices, : masks.shape[1]]
        padding = vocabulary.padding
        masks[mask_indices, -len(padding) :] &= padding

    def _forbid_ends(self, pending: list[MaskJob], masks: Int32) -> None:
        """Forbid end tokens where another token is allowed, for requests with `ignore_eos`."""
        for each in pending:
            guided = each.requested.guided
            if guided is not None and guided.request.params.ignore_eos:
                others = masks[each.mask_index] & ~self._vocabulary.ends
                if others.any():
                    masks[each.mask_index] = others

    @property
    def _vocabulary(self) -> Vocabulary:
        vocabulary = self._compiler.vocabulary
        assert vocabulary is not None, "a grammar was compiled without it"
        return vocabulary


def _num_positions(requested: list[MaskRequest]) -> int:
    return 1 + max((len(each.draft_ids) for each in requested), default=0)


def _follow(requested: MaskRequest) -> Follower | None:
    """Return a sequence's follower; None if its grammar is in error, which its mask reports."""
    if requested.guided is None or requested.guided.compiled is None:
        return None
    follower = requested.guided.follow(requested.index, requested.token_ids)
    return None if follower.matcher.is_error() else follower
