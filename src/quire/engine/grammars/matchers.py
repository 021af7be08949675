"""Matchers that follow sequences: which tokens a grammar's text allows, after any output.

They follow statelessly: before a matcher is asked anything, it goes to its sequence's known output
tokens, back to where these differ from those that it has taken, and on from there. So a preemption
costs nothing, forks copy, beams, rewinds and wrong guesses go back, and nobody needs to be told.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from quire.base.messages import Request
from quire.base.plan import Int32
from quire.engine.grammars.compiler import is_final

if TYPE_CHECKING:
    from llguidance import LLMatcher


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

    def take(self, token_id: int) -> bool:
        """Take one more token; returns whether the matcher can go on."""
        self.token_ids = np.append(self.token_ids, np.int32(token_id))
        return self.matcher.consume_token(token_id)


@dataclass(eq=False, slots=True)
class Guided:
    """A request with a grammar. compiled: without any token taken; made by the compiling thread.
    followers: of its sequences, by index; for who makes masks."""

    request: Request
    compiled: "LLMatcher | None" = None
    followers: dict[int, Follower] = field(default_factory=dict)

    def start_over(self, compiled: "LLMatcher") -> None:
        """Follow with matchers of this one, which has no token taken, from now on."""
        self.compiled, self.followers = compiled, {}

    def follow(self, index: int, token_ids: Int32) -> Follower:
        """Return the follower of a sequence, which has taken these output tokens. One that is not
        known yet is copied from the one that is nearest."""
        follower = self.followers.get(index) or self._copy_nearest(token_ids)
        if follower.matcher.is_error():  # since a draft that was wrong
            follower = self._fresh()
        follower.go_to(token_ids)
        # It cannot go back over what `max_tokens` has ended.
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
        return Follower(nearest.matcher.deep_copy(), nearest.token_ids)

    def _fresh(self) -> Follower:
        assert self.compiled is not None, "a sequence runs before its grammar is compiled"
        return Follower(self.compiled.deep_copy())


def num_common(first: Int32, second: Int32) -> int:
    """Count the tokens with which both begin."""
    size = min(len(first), len(second))
    differs = first[:size] != second[:size]
    return int(differs.argmax()) if differs.any() else size


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sequence, by the row that it holds, and the output tokens behind which its grammar is
    asked. guided: None allows everything, for a sequence that has ended. guesses: behind each of
    them it is asked too."""

    row: int
    guided: Guided | None
    index: int = 0
    token_ids: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    guesses: tuple[int, ...] = ()
