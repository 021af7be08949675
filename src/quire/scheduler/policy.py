"""The order in which new requests of one priority and tenant are served, behind one protocol.

One file per policy. Another package can bring one (docs/extending.md).
"""

from collections.abc import Callable
from typing import Protocol

from quire.scheduler.sequence import Sequence


class Progress(Protocol):
    """What a policy may know of the scheduler."""

    num_planned_tokens: int  # so far: the scheduler's own clock

    def remaining(self, sequence: Sequence) -> int:
        """Tokens that a sequence lacks until it samples; prefix hits left out, as of now."""
        ...

    def num_tokens_under_way(self) -> int:
        """Tokens that those that run lack until they sample."""
        ...


class Policy(Protocol):
    """A queue of sequences that have not run yet."""

    def push(self, sequence: Sequence) -> None:
        """A new sequence arrived."""
        ...

    def peek(self) -> Sequence | None:
        """Whom to admit next, or None."""
        ...

    def pass_over(self, sequence: Sequence) -> None:
        """The one at the head is not admitted now, because a prompt under way goes first."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """The sequence was admitted or has ended."""
        ...

    def rank(self, sequence: Sequence) -> int:
        """Where it stands, the smallest first: the one at the head, or one whose prompt is being
        computed. Where these compete for the budget of a step, the smaller rank gets it."""
        ...

    def waiting(self) -> list[Sequence]:
        """All of them, in an order that is likely."""
        ...

    def __len__(self) -> int: ...


MakePolicy = Callable[[Progress], Policy]
