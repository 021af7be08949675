"""Driver process, which talks to Ray: python -m quire.engine.ranks.ray.driver, started by a core.

It holds a placement group with one bundle per rank. Each bundle has an actor that runs a node agent
(engine/ranks/node_agent.py); the rank is the actor's child process. When this process ends for
whatever reason, Ray ends the actors and the group. This process ends with the core.
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
from quire.engine.ranks.messages import Stream
from quire.engine.ranks.ray.actor import RankActor
from quire.engine.ranks.ray.room import Resources, Room, advice, lack, room_for
from quire.engine.ranks.ray.starter import Go, Host, RayOrder, Trouble, driver_side
from quire.engine.wire.child import NO_START, begin_child

logger = logging.getLogger("quire")

LOOK_S = 0.2  # between two checks of the core's connection and of Ray
LOG_S = 10.0  # between two log lines while waiting for resources
CONNECT_S = 5.0  # timeout of the connection test to a Ray cluster
NO_CLUSTER = "start one with `ray start --head`, or name one by ray_address or RAY_ADDRESS"


class CoreDisconnected(Exception):
    """The core has closed its connection, so the driver ends."""


class Driver:
    """Driver of a core's Ray actors. order: resources to reserve. core: connection to the core."""

    def __init__(self, order: RayOrder, core: socket.socket) -> None:
        self._order, self._core = order, Stream(core, driver_side())
        self._actors: list[Any] = []  # references; without one, Ray ends an actor

    def run(self) -> None:
        """Run the ranks in actors until CoreDisconnected. Raises QuireError if an actor ends or
        fails."""
        connect(self._order.address)
        self.post(Host(get_node_ip_address()))
        go = self._go()
        group = self._find_room()
        try:
            self._watch(self._start(group, go))
        finally:
            with contextlib.suppress(RayError):
                remove_placement_group(group)  # ends its actors, too

    def post(self, message: Host | Trouble) -> None:
        with contextlib.suppress(OSError):  # the next read detects a closed connection
            self._core.send(message)

    def _go(self) -> Go:
        while (messages := self._core.receive()) is not None:
            if messages:
                return messages[0]
        raise CoreDisconnected

    def _find_room(self) -> Any:
        """Wait until Ray has reserved a bundle for each rank; return the placement group. Raises
        ConfigError after wait_s, which names the lacking resources."""
        order, began_s = self._order, time.monotonic()
        room = room_for(
            _all_of_nodes(), order.num_ranks, order.num_cores, order.device, order.num_threads
        )
        logger.info("ray: %s for the ranks", room)
        group, logged_s = placement_group(room.bundles, strategy="PACK"), began_s
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
            if now_s - logged_s > LOG_S:
                logged_s = now_s
                logger.warning(
                    "ray: waiting for resources, for %.0f s so far: %s.",
                    now_s - began_s,
                    _lack(room),
                )
        return group

    def _start(self, group: Any, go: Go) -> dict[Any, int]:
        """Start an actor for each rank. Return each rank by the Ray reference to the result of its
        actor's `keep`, which is ready when the rank ends."""
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
        """Wait until the first actor ends. Raises EngineError with its reason."""
        while True:
            self._check_core()
            done, _ = ray.wait(list(ends), timeout=LOOK_S)
            if not done:
                continue
            where = f"the Ray actor of rank {ends[done[0]]} of {len(ends)}"
            try:
                end_text = ray.get(done[0])
            except RayTaskError as error:
                raise EngineError(f"{where} failed: {error.cause}") from None
            except RayActorError as error:
                why = str(error).strip().splitlines()[-1]
                raise EngineError(f"{where} has ended: {why}") from None
            raise EngineError(f"{where} has ended: {end_text}")

    def _check_core(self) -> None:
        """Raise CoreDisconnected if the core has closed its connection."""
        if select.select([self._core.socket], [], [], 0.0)[0] and self._core.receive() is None:
            raise CoreDisconnected


def connect(address: str | None) -> None:
    """Connect to a running Ray cluster. Raises ConfigError if there is none, or it is unusable."""
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
    except ConnectionError:  # its message is about Ray's own command line
        where = "on this machine" if address == "auto" else f"at {address}"
        raise ConfigError(f"no Ray cluster was found {where}; {NO_CLUSTER}.") from None
    except (RuntimeError, ValueError) as error:  # such as another version of Ray or Python
        raise ConfigError(f"Ray at {address!r} cannot be used: {error}") from None


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"a Ray address is HOST:PORT, such as 10.0.0.1:6379; got {address!r}.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise ConfigError(f"no Ray cluster answers at {address} ({error}); {NO_CLUSTER}.") from None


def _all_of_nodes() -> list[Resources]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _lack(room: Room) -> str:
    """Describe the resources that are requested, present and free in the cluster."""
    free = ray.available_resources()
    return lack(room, _all_of_nodes(), [free])


def main() -> int:
    """Connect to Ray, reserve resources, start the ranks and watch them; return the exit status."""
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
    except CoreDisconnected:
        return 0
    except QuireError as error:
        driver.post(Trouble(type(error).__name__, str(error)))
    except Exception as error:
        logger.debug("Ray failed", exc_info=error)
        driver.post(Trouble("EngineError", f"Ray failed: {type(error).__name__}: {error}"))
    finally:
        ray.shutdown()
    return NO_START


def _silence_ray() -> None:
    """Discard Ray's output to both standard streams; log lines still reach standard error."""
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
