"""Orders of a trainer that arrive at a core's server: new weights, pauses and sleeps."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from quire.base.errors import RequestError
from quire.base.messages import Done, SetPause, SetSleep, UpdateWeights, WeightsChanged
from quire.engine.attachments.pausing import Pausing, Sleeping
from quire.engine.attachments.weight_updates import WeightUpdates
from quire.engine.wire.core_server import CoreServer, Handlers, Reply


def order_handlers(updates: WeightUpdates, pausing: Pausing, sleeping: Sleeping) -> Handlers:
    """Return the handlers of a trainer's orders. Each replies `Done` when the order has ended."""

    def update(message: UpdateWeights, reply: Reply) -> None:
        number, name = message.question_id, message.version
        try:
            version = updates.begin(
                Path(message.path),
                name,
                lambda error: reply(Done(number, error, version)),
                is_partial=message.is_partial,
            )
        except RequestError as error:
            reply(Done(number, str(error)))

    def pause(message: SetPause, reply: Reply) -> None:
        def report() -> None:
            reply(Done(message.question_id, is_paused=pausing.is_paused))

        if message.is_paused is None:
            report()
        elif sleeping.is_sleeping and not message.is_paused:
            reply(Done(message.question_id, "the engine sleeps; wake it up instead.", "", True))
        else:
            pausing.set(message.is_paused, message.drains, report)

    def sleep(message: SetSleep, reply: Reply) -> None:
        def report(error: str | None) -> None:
            reply(Done(message.question_id, error, is_sleeping=sleeping.is_sleeping))

        try:
            if message.level:
                sleeping.begin(message.level, message.aborts, report)
            else:
                sleeping.wake(message.wakes, report)
        except RequestError as error:
            report(str(error))

    return {UpdateWeights: update, SetPause: pause, SetSleep: sleep}


def announce_changes(
    updates: WeightUpdates, server: CoreServer, numerics: Callable[[], dict[str, str]] = dict
) -> None:
    """Make a server announce new weights to all clients, also to later ones. numerics: returns the
    engine's numerics with these weights."""

    def announce(version: str) -> None:
        parts = numerics()
        ready = msgspec.structs.replace(server.ready, weights_version=version, numerics=parts)
        server.ready = ready
        server.announce(WeightsChanged(version, parts.get("weights", "")))

    updates.on_change = announce
