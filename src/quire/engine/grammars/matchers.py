"""Matchers that follow sequences: which tokens a grammar allows after any output.

Before each use, a matcher is moved to its sequence's known output tokens. It rolls back to the
first token that differs, and takes the tokens from there on. So a preemption costs nothing, and a
fork copies a matcher. Beams, rewinds and rejected draft tokens roll back, without any notification.

A matcher also runs ahead of its sequence, to draft (`guided_draft`). The next use moves it back.
Matchers of grammars with `max_tokens=` or `stop=` cannot roll back. For these a copy runs ahead.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire.base.messages import Request
from quire.base.plan import Int32
from quire.engine.grammars.compiler import is_final

if TYPE_CHECKING:
    from llguidance import LLMatcher


class DraftLimits(NamedTuple):
    """Maximum numbers of all draft tokens, and of proposed ones, which are not forced."""

    num_tokens: int
    num_proposed: int


class GuidedDraft(NamedTuple):
    """Draft tokens that a grammar allows. is_forced: for each, whether it allows no other token."""

    token_ids: list[int]
    is_forced: list[bool]


NO_DRAFT = GuidedDraft([], [])
Propose = Callable[[Sequence[int]], list[int]]  # from draft tokens to those after them


@dataclass(eq=False, slots=True)
class Follower:
    """Matcher together with the output tokens that it has taken."""

    matcher: "LLMatcher"
    token_ids: Int32 = field(default_factory=lambda: np.empty(0, np.int32))

    def go_to(self, token_ids: Int32) -> bool:
        """Move to these tokens [T], from the first that differs. If the matcher cannot move there,
        it stays in error. Return False if it cannot roll back."""
        num_equal = num_common(self.token_ids, token_ids)
        rolls_back = True
        if num_equal < len(self.token_ids):
            rolls_back = self.matcher.rollback(len(self.token_ids) - num_equal)
        if num_equal < len(token_ids):
            self.matcher.consume_tokens(token_ids[num_equal:].tolist())
        self.token_ids = token_ids
        return rolls_back

    def copy(self) -> "Follower":
        """Return another follower of the same tokens."""
        return Follower(self.matcher.deep_copy(), self.token_ids)

    def take(self, token_id: int) -> bool:
        """Take one more token. Return whether the matcher accepts it."""
        self.token_ids = np.append(self.token_ids, np.int32(token_id))
        return self.matcher.consume_token(token_id)

    def take_forced(self, max_tokens: int) -> list[int]:
        """Take the tokens that the grammar forces, and return them."""
        forced = self.matcher.compute_ff_tokens()[:max_tokens]
        if forced:
            self.matcher.consume_tokens(forced)
            self.token_ids = np.append(self.token_ids, np.array(forced, np.int32))
        return forced

    def allows(self, token_id: int, *, is_end: bool) -> bool:
        """Return whether the grammar allows a token next, or an end."""
        if is_end:
            return self.matcher.is_accepting()
        return self.matcher.validate_tokens([token_id]) == 1


def guided_draft(
    follower: Follower, propose: Propose, limits: DraftLimits, end_token_ids: Container[int]
) -> GuidedDraft:
    """Return draft tokens after a follower's tokens. Wherever the grammar forces tokens, they come
    next. Elsewhere `propose` does, up to an end or the first token that the grammar forbids."""
    token_ids, is_forced, proposed = list[int](), list[bool](), list[int]()
    while len(token_ids) < limits.num_tokens:
        forced = follower.take_forced(limits.num_tokens - len(token_ids))
        token_ids += forced
        is_forced += [True] * len(forced)
        num_proposed = len(is_forced) - sum(is_forced)
        if len(token_ids) >= limits.num_tokens or num_proposed >= limits.num_proposed:
            break
        is_right = proposed[: len(forced)] == forced
        proposed = proposed[len(forced) :] if is_right else []
        proposed = proposed or propose(token_ids)
        if not proposed:
            break
        is_end = proposed[0] in end_token_ids
        if not follower.allows(proposed[0], is_end=is_end):
            break
        token_ids.append(proposed[0])
        is_forced.append(False)
        if is_end or not follower.take(proposed[0]):
            break
        proposed = proposed[1:]
    return GuidedDraft(token_ids, is_forced)


@dataclass(eq=False, slots=True)
class Guided:
    """Request with a grammar. followers: of its sequences, by index; used by the masks' thread.
    drafts: the last draft of each, with the output tokens before it. rolls_back: whether all
    matchers could roll back so far."""

    request: Request
    compiled: "LLMatcher | None" = None  # without tokens; set by the compiling thread
    followers: dict[int, Follower] = field(default_factory=dict)
    drafts: dict[int, tuple[Int32, GuidedDraft]] = field(default_factory=dict)
    rolls_back: bool = True

    def start_over(self, compiled: "LLMatcher") -> None:
        """Replace the compiled grammar by a new one without tokens, and drop all followers."""
        self.compiled, self.followers = compiled, {}

    def forced(self, index: int, token_ids: Int32, draft_ids: tuple[int, ...]) -> tuple[bool, ...]:
        """Return which draft tokens after these output tokens [T] are forced, as far as known."""
        before, draft = self.drafts.get(index, (token_ids, NO_DRAFT))
        num = len(draft_ids)
        if not draft.token_ids or tuple(draft.token_ids[:num]) != draft_ids:
            return ()
        return tuple(draft.is_forced[:num]) if np.array_equal(before, token_ids) else ()

    def follow(self, index: int, token_ids: Int32) -> Follower:
        """Return the follower of a sequence, moved to these output tokens [T]. A new sequence gets
        a copy of the follower with the longest common beginning."""
        follower = self.followers.get(index) or self._copy_nearest(token_ids)
        if follower.matcher.is_error():  # after a rejected draft token
            follower = self._fresh()
        self.rolls_back &= follower.go_to(token_ids)
        if follower.matcher.is_error() and not is_final(follower.matcher):
            follower = self._fresh()
            follower.go_to(token_ids)
        self.followers[index] = follower
        return follower

    def _copy_nearest(self, token_ids: Int32) -> Follower:
        others = self.followers.values()
        if not others:
            return self._fresh()
        nearest = max(others, key=lambda other: num_common(other.token_ids, token_ids))
        return nearest.copy()

    def _fresh(self) -> Follower:
        assert self.compiled is not None, "a sequence runs before its grammar is compiled"
        return Follower(self.compiled.deep_copy())


def num_common(first: Int32, second: Int32) -> int:
    """Return the length of the common beginning of two arrays [T] and [U]."""
    size = min(len(first), len(second))
    differs = first[:size] != second[:size]
    return int(differs.argmax()) if differs.any() else size


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """Sequence, by its row, with the output tokens after which masks are needed."""

    row: int
    guided: Guided | None  # None allows all tokens, for a sequence that has ended
    index: int = 0
    token_ids: Int32 = field(default_factory=lambda: np.empty(0, np.int32))  # [T]
    draft_ids: tuple[int, ...] = ()  # masks are needed after each of them, too
    forced: tuple[bool, ...] = ()  # whether each draft token is known to be forced

    def is_forced(self, position: int) -> bool:
        """Return whether only one token is allowed after this many draft tokens: the next one."""
        return position < len(self.forced) and self.forced[position]
