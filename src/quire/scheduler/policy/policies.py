"""The scheduling policies by name: those that are built in, and those of other packages."""

from collections.abc import Mapping
from types import MappingProxyType

from quire.base.errors import ConfigError
from quire.base.plugins import POLICIES as KIND
from quire.base.plugins import load_plugin
from quire.scheduler.core.queue import Fifo, MakePolicy
from quire.scheduler.core.sequence import Sequence
from quire.scheduler.policy.srtf import Srtf
from quire.scheduler.policy.two_level import TwoLevel

POLICIES: Mapping[str, MakePolicy] = MappingProxyType(
    {"fifo": Fifo, "fcfs": Fifo, "priority": Fifo, "srtf": Srtf, "two-level": TwoLevel}
)


class _Nothing:
    """The progress of a scheduler without requests."""

    num_planned_tokens = 0

    def remaining(self, sequence: Sequence) -> int:
        return 0

    def num_tokens_under_way(self) -> int:
        return 0


def make_policy(name: str) -> MakePolicy:
    """Return what makes the queues of one policy. Raises ConfigError if there is none of this name.

    One of another package is tried: what is wrong with it shows now, not with the first request.
    """
    if name in POLICIES:
        return POLICIES[name]
    found: MakePolicy = load_plugin(KIND, name, POLICIES)
    try:
        policy = found(_Nothing())
        head, number = policy.peek(), len(policy)
    except Exception as error:
        raise ConfigError(
            f"the scheduling policy {name!r} cannot be created: {type(error).__name__}: {error}."
        ) from error
    if head is not None or number:
        raise ConfigError(f"the scheduling policy {name!r} is not empty when it is created.")
    return found
