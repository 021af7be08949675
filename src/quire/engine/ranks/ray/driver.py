"""The process that talks to Ray: python -m quire.engine.ranks.ray.driver, started by a core.

It holds a placement group with a bundle for each rank, and in each an actor that keeps the rank
(engine/ranks/keeper.py): the rank is the actor's child. Ray ends the actors and the group when this
process ends, however it does; it ends with the core.
"""

import argparse
import contextlib
import logging
import os
import select
import socket
import sys
import time
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from quire.base.errors import ConfigError, EngineError, QuireError
from quire.engine.ranks.ray.actor import RankActor
from quire.engine.ranks.ray.room import Resources, Room, advice, lack, room_for
from quire.engine.ranks.ray.starter import Go, Host, RayOrder, Trouble, driver_side
from quire.engine.wire.child import NO_START, begin_child
from quire.engine.wire.wire import Stream

logger = logging.getLogger("quire")

LOOK_S = 0.2  # between two looks at the core's end and at Ray
TELL_S = 10.0  # between two lines about what is waited for
DIAL_S = 5.0
NO_CLUSTER = "start one with `ray start --head`, or name one by ray_address or RAY_ADDRESS"


class CoreGone(Exception):
    """The core has closed its end: all is to be ended."""


class Driver:
    """core: the connection to it."""

    def __init__(self, order: RayOrder, core: socket.socket) -> None:
        self._order, self._core = order, Stream(core, driver_side())
        self._actors: list[Any] = []  # Ray ends those that nobody holds

    def run(self) -> None:
        """Let actors keep the ranks until CoreGone. Raises QuireError if they do not any more."""
        connect(self._order.address)
        self.tell(Host(get_node_ip_address()))
        go = self._go()
        group = self._find_room()
        try:
            self._watch(self._start(group, go))
        finally:
            with contextlib.suppress(RayError):
                remove_placement_group(group)  # ends its actors, too

    def tell(self, message: Host | Trouble) -> None:
        with contextlib.suppress(OSError):  # its end tells
            self._core.send(message)

    def _go(self) -> Go:
        while (messages := self._core.receive()) is not None:
            if messages:
                return messages[0]
        raise CoreGone

    def _find_room(self) -> Any:
        """Wait until all ranks have a place. Raises ConfigError that says what is too little."""
        order, began_s = self._order, time.monotonic()
        room = room_for(
            _all_of_nodes(), order.num_ranks, order.num_cores, order.device, order.num_threads
        )
        logger.info("ray: %s for the ranks", room)
        group, told_s = placement_group(room.bundles, strategy="PACK"), began_s
        while not group.wait(LOOK_S):
            self._check_core()
            now_s = time.monotonic()
            if now_s - began_s > order.wait_s:
                has = _lack(room)
                remove_placement_group(group)
                raise ConfigError(
                    f"Ray found no free resources within node_wait_s={order.wait_s:g} s: {has}."
                    f" {advice(room)}"
                )
            if now_s - told_s > TELL_S:
                told_s = now_s
                logger.warning(
                    "ray: waiting for resources, for %.0f s so far: %s.",
                    now_s - began_s,
                    _lack(room),
                )
        return group

    def _start(self, group: Any, go: Go) -> dict[Any, int]:
        """Start the actors; returns what each will answer at its end."""
        actor: Any = ray.remote(RankActor)
        ends = {}
        for rank, bundle in enumerate(group.bundle_specs):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            one = actor.options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=place,
            ).remote()
            has_before = rank >= self._order.in_stage
            ends[one.keep.remote((go.host, go.port), go.secret, rank, has_before)] = rank
            self._actors.append(one)
        return ends

    def _watch(self, ends: dict[Any, int]) -> None:
        """Wait for the first that ends. Raises EngineError that says why."""
        while True:
            self._check_core()
            done, _ = ray.wait(list(ends), timeout=LOOK_S)
            if not done:
                continue
            where = f"the Ray actor of rank {ends[done[0]]} of {len(ends)}"
            try:
                how = ray.get(done[0])
            except RayTaskError as error:
                raise EngineError(f"{where} failed: {error.cause}") from None
            except RayActorError as error:
                why = str(error).strip().splitlines()[-1]
                raise EngineError(f"{where} has ended: {why}") from None
            raise EngineError(f"{where} has ended: {how}")

    def _check_core(self) -> None:
        """Raise CoreGone when it is."""
        if select.select([self._core.socket], [], [], 0.0)[0] and self._core.receive() is None:
            raise CoreGone


def connect(address: str | None) -> None:
    """Join a cluster that runs. Raises ConfigError if there is none."""
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    if "://" in address:
        raise ConfigError(
            f"the Ray address {address!r} is one for clients from outside; run quire on a machine"
            " of the cluster, and give HOST:PORT."
        )
    if address != "auto":
        _check_reachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError:  # whose words are about Ray's own command line
        where = "on this machine" if address == "auto" else f"at {address}"
        raise ConfigError(f"no Ray cluster was found {where}; {NO_CLUSTER}.") from None
    except (RuntimeError, ValueError) as error:  # such as another version of Ray or Python there
        raise ConfigError(f"Ray at {address!r} cannot be used: {error}") from None


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"a Ray address is HOST:PORT, such as 10.0.0.1:6379; got {address!r}.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), DIAL_S).close()
    except OSError as error:
        raise ConfigError(f"no Ray cluster answers at {address} ({error}); {NO_CLUSTER}.") from None


def _all_of_nodes() -> list[Resources]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _lack(room: Room) -> str:
    """Say what the cluster has now."""
    free = ray.available_resources()
    return lack(room, _all_of_nodes(), [free])


def main() -> int:
    """Connect, find room, start, watch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=int, required=True, help="descriptor of the connection")
    parser.add_argument("--log-level", default="warning")
    options = parser.parse_args()
    begin_child(options.log_level)
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=RayOrder)
    driver = Driver(order, socket.socket(fileno=options.socket))
    if options.log_level != "debug":
        _silence_ray()
    try:
        driver.run()
    except CoreGone:
        return 0
    except QuireError as error:
        driver.tell(Trouble(type(error).__name__, str(error)))
    except Exception as error:
        logger.debug("Ray failed", exc_info=error)
        driver.tell(Trouble("EngineError", f"Ray failed: {type(error).__name__}: {error}"))
    finally:
        ray.shutdown()
    return NO_START


def _silence_ray() -> None:
    """Let only this package's own lines through: Ray tells of itself on both streams."""
    ours = os.fdopen(os.dup(2), "w", buffering=1)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(ours)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
