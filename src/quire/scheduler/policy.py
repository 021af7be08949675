"""The order in which new requests of one priority and tenant are served, behind one protocol.

One file per policy. Another package can bring one (docs/extending.md).
"""

from collections.abc import Callable
from typing import Protocol

from quire.scheduler.sequence import Sequence

# When so many times the tokens before a request have been computed, its turn has come.
PATIENCE = 1.8


class Progress(Protocol):
    """What a policy may know of the scheduler."""

    num_planned_tokens: int  # so far: the scheduler's own clock

    def remaining(self, sequence: Sequence) -> int:
        """Count the tokens that a sequence lacks until it samples, without those of its present
        hit."""
        ...

    def num_tokens_under_way(self) -> int:
        """Count the tokens that all that run lack until they sample."""
        ...


class Policy(Protocol):
    """A queue of sequences that have not run yet."""

    def push(self, sequence: Sequence) -> None:
        """Take in a new sequence."""
        ...

    def peek(self) -> Sequence | None:
        """Return the sequence to admit next, or None."""
        ...

    def pass_over(self, sequence: Sequence) -> None:
        """Pass over the one at the head for now: a prompt under way goes first."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that was admitted or has ended."""
        ...

    def rank(self, sequence: Sequence) -> int:
        """Rank the one at the head, or one whose prompt is being computed. Where these compete for
        the tokens of a step, the smallest rank gets them."""
        ...

    def waiting(self) -> list[Sequence]:
        """List all for those who watch, in the order in which they are likely to be admitted as
        far as that is known without asking for `remaining`: a look-up names blocks, and would make
        a run that is watched another one."""
        ...

    def __len__(self) -> int: ...


MakePolicy = Callable[[Progress], Policy]
