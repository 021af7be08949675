"""Starting over with an empty cache (`ResetPrefixCache`): what was cached is never used again.

Forgetting names is not enough. Stores keep blocks under them, and what is running goes on to name
blocks that were computed from old ones. So the names change: an epoch, a word that nobody used
before, enters all roots to come.

    came before, waits, holds no blocks    gets a root of the new epoch: it has yet to be computed
    came before, holds blocks              gets a root of its own, which nobody else ever has
    is pinned                              is computed again, from the new epoch's root

Names of an epoch mean something to this engine alone. In a store that is shared, what others left
stays as it is, for them and for a later run of this one.
"""

from quire.kv.digest import root_digest
from quire.scheduler.block_naming import BlockNaming
from quire.scheduler.sequence import Sequence


def rename(sequence: Sequence, names: BlockNaming, epoch: str) -> None:
    """Give the sequences of a request, who share blocks by their names, another root."""
    members = sequence.members
    first = members[0]
    root = root_digest(first.root, epoch, "held")
    holds = any(member.row >= 0 or member.host_blocks is not None for member in members)
    if not holds:
        num = 1 if first.group is None else first.group.num_members
        root = names.root(first.request, num, first.arrival)
    for member in members:
        member.is_renamed = holds
        member.root, member.digests = root, []  # not emptied in place: a recorder may hold it
        member.prefix_digests, member.found_at = {}, -1
