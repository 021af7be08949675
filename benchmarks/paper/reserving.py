"""Orca's reservations as scheduling policies of quire's own engine, with no other change.

A policy holds the next request back until a buddy allocator as large as the engine's pool has a
chunk for it. It frees the chunk when its sequence has ended. Memory itself stays in blocks. Since
each admitted request has a chunk for all its tokens, the pool is never short. So a real engine runs
with the batches that reserving would allow.
"""

from pathlib import Path

from benchmarks.paper.baselines.buddy import BuddyAllocator
from benchmarks.paper.baselines.core import Job
from benchmarks.paper.baselines.orca import Reserve, longest, oracle, pow2
from quire.scheduler.core.queue import Fifo, Progress
from quire.scheduler.core.sequence import Sequence, State
from quire.tools.simulate.served import Served

NAMES = {"orca-oracle": "Oracle", "orca-pow2": "Pow2", "orca-max": "Max"}


class Reserving(Fifo):
    """First in, first out, with chunks. num_slots, max_model_len: of the engine, set before it is
    made. A request's length is known from max_tokens, which its answer must reach."""

    reserve: Reserve
    num_slots = 0
    max_model_len = 0

    def __init__(self, progress: Progress) -> None:
        super().__init__(progress)
        self._memory = BuddyAllocator(Reserving.num_slots)
        self._head: tuple[Sequence, int] | None = None  # the next one, and its chunk
        self._holders: list[tuple[Sequence, int]] = []

    def peek(self) -> Sequence | None:
        head = super().peek()
        if self._head is not None and self._head[0] is head:
            return head
        self._give_back()
        if head is None:
            return None
        num_output = head.params.max_tokens
        assert num_output is not None, "a reservation needs max_tokens"
        job = Job("", Served(0.0), head.num_prompt_tokens, num_output, 1)
        offset = self._memory.allocate(type(self).reserve(job, Reserving.max_model_len))
        if offset is None:
            return None
        self._head = head, offset
        return head

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        if self._head is not None and self._head[0] is sequence:
            self._holders.append(self._head)
            self._head = None

    def _give_back(self) -> None:
        """Free the chunks of ended sequences."""
        remaining = []
        for sequence, offset in self._holders:
            if sequence.state is not State.ENDED:
                remaining.append((sequence, offset))
            else:
                self._memory.free(offset)
        self._holders = remaining


class Oracle(Reserving):
    """As much as will be needed."""

    reserve = staticmethod(oracle)


class Pow2(Reserving):
    """The answer's length, rounded up to a power of two."""

    reserve = staticmethod(pow2)


class Max(Reserving):
    """The longest sequence that may be."""

    reserve = staticmethod(longest)


def install(folder: Path) -> None:
    """Write the metadata of an installed package with these policies, into a folder of the import
    path."""
    about = folder / "quire_paper-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: quire-paper\nVersion: 1\n")
    lines = [f"{name} = {__name__}:{kind}" for name, kind in NAMES.items()]
    (about / "entry_points.txt").write_text("\n".join(["[quire.policies]", *lines, ""]))
