"""Resources of a Ray cluster that ranks need, and error texts for a cluster with too few."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Resources = Mapping[str, float]


@dataclass(frozen=True)
class Room:
    """Bundles of a placement group, one per rank. kind: CPU or GPU. each: number per bundle."""

    kind: str
    each: int
    num_ranks: int

    @property
    def bundles(self) -> list[dict[str, float]]:
        return [{self.kind: float(self.each)} for _ in range(self.num_ranks)]

    def __str__(self) -> str:
        return f"{self.num_ranks} x {self.each} {self.kind}"


def room_for(
    nodes: Sequence[Resources], num_ranks: int, num_cores: int, device: str, threads: int | None
) -> Room:
    """Return the resources that an engine's ranks need.

    A rank gets one GPU if the device is "cuda", or "auto" and the cluster has GPUs. Otherwise it
    gets `threads` CPUs; None: an even share of the cluster's CPUs.

    nodes: total resources of each node. num_cores: engine cores with num_ranks ranks each."""
    if device == "cuda" or (device == "auto" and any(node.get("GPU", 0) >= 1 for node in nodes)):
        return Room("GPU", 1, num_ranks)
    if threads is not None:
        return Room("CPU", threads, num_ranks)
    cpus = [int(node.get("CPU", 0)) for node in nodes]
    each = max(cpus, default=1)
    while each > 1 and sum(num // each for num in cpus) < num_ranks * num_cores:
        each -= 1
    return Room("CPU", max(each, 1), num_ranks)


def lack(room: Room, nodes: Sequence[Resources], free: Sequence[Resources]) -> str:
    """Describe the requested resources, the cluster's total resources and the free ones."""

    def amounts(all_of: Sequence[Resources]) -> str:
        numbers = [f"{node.get(room.kind, 0):g}" for node in all_of]
        return " + ".join(numbers) or "0"

    return (
        f"{room} {'is' if room.num_ranks == 1 else 'are'} requested, and the cluster's"
        f" {len(nodes)} node{'s have' if len(nodes) != 1 else ' has'} {amounts(nodes)}, of which"
        f" {amounts(free)} are free"
    )


def advice(room: Room) -> str:
    """Return a hint for the user of a cluster with too few resources."""
    fewer = "Use fewer ranks, add nodes or end other work on the cluster"
    if room.kind == "GPU":
        return f"{fewer}, or use device='cpu'."
    return f"{fewer}; QUIRE_NUM_THREADS sets the number of CPUs of a rank."
