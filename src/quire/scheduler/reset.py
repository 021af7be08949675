"""Beginning the cache anew (`ResetPrefixCache`): what was cached before is never used again.

Forgetting names is not enough. Stores keep blocks under them, and what is running goes on to name
blocks that were computed from old ones. So the names change: an epoch, a word that nobody used
before, enters all roots to come.

    came before, waits, holds no blocks    gets a root of the new epoch: it has yet to be computed
    came before, holds blocks              gets a root of its own, which nobody else ever has
    is pinned                              is computed again, from the new epoch's root

Names of an epoch mean something to this engine alone. In a store that is shared, what others left
stays as it is, for them and for a later run of this one.
"""

from typing import TYPE_CHECKING

from quire.kv.digest import root_digest
from quire.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler


def reset_cache(scheduler: "Scheduler", epoch: str, now: float) -> None:
    """Forget all names, and let those to come be others."""
    scheduler.kv.reset_prefix_cache()
    scheduler.history.reset()
    scheduler.fingerprint = root_digest(scheduler.fingerprint, epoch)
    scheduler.pins.give_rows_back(now)
    for sequence in scheduler.sequences.values():
        _rename(scheduler, scheduler.members(sequence), epoch)
    if scheduler.stores is not None:
        scheduler.stores.begin_anew()
    scheduler.pins.begin_anew(now)


def _rename(scheduler: "Scheduler", members: list[Sequence], epoch: str) -> None:
    """Give the sequences of a request, who share blocks by their names, another root."""
    first = members[0]
    root = root_digest(first.root, epoch, "held")
    if not any(_holds_blocks(member) for member in members):
        num = 1 if first.group is None else first.group.num_members
        root = scheduler.root(first.request, num, first.arrival)
    for member in members:
        member.root, member.digests = root, []  # not emptied in place: a recorder may hold it
        member.prefix_digests, member.found_at = {}, -1


def _holds_blocks(sequence: Sequence) -> bool:
    return sequence.row >= 0 or sequence.host_blocks is not None
