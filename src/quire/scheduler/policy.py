"""The order in which new requests of one priority are served, behind one protocol. One file per
policy."""

from typing import Protocol

from quire.scheduler.sequence import Sequence


class Policy(Protocol):
    """A queue of sequences that have not run yet."""

    def push(self, sequence: Sequence) -> None:
        """A new sequence arrived."""
        ...

    def peek(self) -> Sequence | None:
        """Whom to admit next, or None."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """The sequence was admitted or has ended."""
        ...

    def waiting(self) -> list[Sequence]:
        """All of them, in order."""
        ...

    def __len__(self) -> int: ...
