"""A listener for the events of a scheduler's doors, for tests without a core."""

from collections.abc import Callable

from quire.base.events import Event
from quire.scheduler.decisions import Decisions
from quire.scheduler.scheduler import Scheduler


def listen(scheduler: Scheduler) -> list[Event]:
    """Return a list to which the events of all later calls are added, in order."""
    heard: list[Event] = []

    def hearing(door: Callable[..., Decisions]) -> Callable[..., Decisions]:
        def call(*args: object) -> Decisions:
            decisions = door(*args)
            heard.extend(decisions.events)
            return decisions

        return call

    for name in ("add", "control", "schedule", "update"):
        setattr(scheduler, name, hearing(getattr(scheduler, name)))
    return heard
