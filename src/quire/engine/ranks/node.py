"""Ranks on several machines without Ray: the same command on each, with its own `--node-rank`.

    machine 0      core <-- RemoteRanks -- a child that runs machine 0's ranks (this module)
    machine 1 ...  `quire serve ... --node-rank 1`: runs ranks, and nothing else

All machines have the same secret, QUIRE_RANK_TOKEN, and the core's address. Like a Ray actor, a
node runs a node agent for each rank (engine/ranks/node_agent.py), each on its own thread.
"""

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from quire.base.errors import ConfigError, EngineError, QuireError
from quire.base.settings.config import EngineConfig
from quire.base.settings.parallel import ParallelConfig
from quire.engine.ranks.connections import Address, Unreachable
from quire.engine.ranks.consistency import given_settings_of
from quire.engine.ranks.node_agent import CORE_ENDED, LEFT, Ending, RankAssignment, run_rank
from quire.engine.ranks.rank_set import END_S
from quire.engine.wire.child import begin_child
from quire.engine.wire.spawn import end_child, start_child

logger = logging.getLogger("quire")

TOKEN = "QUIRE_RANK_TOKEN"
MIN_TOKEN_CHARS = 16
WELL = (CORE_ENDED, LEFT)
AGAIN_S = 0.5  # between two attempts to reach the core
LOG_S = 10.0  # between two log lines about an unreachable core


class Node(msgspec.Struct, frozen=True):
    """Ranks of one machine, and how they reach the core. in_stage: ranks of a stage. devices: CUDA
    device of each rank; empty on CPUs. settings: given settings, as JSON by name."""

    core: tuple[str, int]
    secret: bytes
    ranks: list[int]
    in_stage: int
    wait_s: float
    devices: list[str] = []
    settings: dict[str, str] = {}

    @classmethod
    def of(cls, config: EngineConfig, devices: list[str], given: Iterable[str] = ()) -> "Node":
        """Create this machine's node. given: names of settings given on this machine, which must
        equal machine 0's. Raises ConfigError if the environment has no secret."""
        parallel = config.parallel
        assert parallel.master_addr is not None, "checked by the settings"
        return cls(
            (parallel.master_addr, parallel.master_port),
            rank_token(),
            ranks_of_node(parallel),
            parallel.tensor_parallel_size,
            parallel.node_wait_s,
            devices,
            given_settings_of(config, given),
        )


def ranks_of_node(parallel: ParallelConfig) -> list[int]:
    """Return this machine's ranks. Machines have equal numbers of consecutive ranks."""
    each = parallel.num_ranks // parallel.nnodes
    return list(range(parallel.node_rank * each, (parallel.node_rank + 1) * each))


def rank_token() -> bytes:
    """Return the secret that all machines share. Raises ConfigError if it is missing or short."""
    token = os.environ.get(TOKEN, "")
    if len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(
            f"ranks on several machines need a secret of at least {MIN_TOKEN_CHARS} characters. Set"
            f" {TOKEN} to the same value on all of them (here it has {len(token)}). `openssl rand"
            " -hex 32` prints a suitable one."
        )
    return token.encode()


class NodeStarter:
    """Starter that runs this machine's ranks in a child; other machines' operators start theirs."""

    agent_name = "node"

    def __init__(self, node: Node, log_level: str) -> None:
        self.secret: bytes | None = node.secret
        self.wait_s, self.port = node.wait_s, node.core[1]
        self._node, self._log_level = node, log_level
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = -1

    def host(self) -> str:
        """See RankStarter."""
        return self._node.core[0]

    def start(self, core: Address, secret: bytes) -> None:
        """See RankStarter."""
        node = msgspec.structs.replace(self._node, core=(core.host, core.port))
        self._process = start_child("quire.engine.ranks.node", [], node, (), self._log_level)
        self._ended = os.pidfd_open(self._process.pid)
        logger.info(
            "waiting up to %g s at %s for the ranks of other machines; on each of them run the same"
            " command with its own --node-rank", self.wait_s, core,
        )  # fmt: skip

    def fileno(self) -> int:
        """See RankStarter."""
        return self._ended

    def take_news(self) -> None:
        """See RankStarter: the only news is the end of the child."""
        assert self._process is not None
        raise EngineError(
            f"the process that runs this machine's ranks has ended ({self._process.wait()})."
        )

    def close(self) -> None:
        """See RankStarter: the child ends with its connections to the core."""
        if self._process is None:
            return
        end_child(self._process, END_S)
        with contextlib.suppress(OSError):
            os.close(self._ended)


@dataclass
class _Outcomes:
    """Outcomes of a node's ranks: how each ended, and errors."""

    endings: dict[int, Ending] = field(default_factory=dict)
    errors: list[QuireError] = field(default_factory=list)


def run_ranks(node: Node, leaving: threading.Event) -> str:
    """Run the ranks of a node until they or the core end; return how they ended. leaving: set when
    this machine shuts down. Raises QuireError if the core is unreachable or refuses a rank."""
    outcomes = _Outcomes()

    def run_one(index: int, rank: int) -> None:
        visible = {"CUDA_VISIBLE_DEVICES": node.devices[index]} if node.devices else {}
        assignment = RankAssignment(rank, rank >= node.in_stage, visible, node.settings, leaving)
        try:
            outcomes.endings[rank] = run_rank(Address(*node.core), node.secret, assignment)
        except QuireError as error:
            outcomes.errors.append(error)

    threads = [
        threading.Thread(target=run_one, args=each, name=f"quire-rank-{each[1]}")
        for each in enumerate(node.ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if outcomes.errors:
        raise outcomes.errors[0]
    endings = outcomes.endings
    of_ranks = [f"rank {rank} {end.end_text}" for rank, end in endings.items() if end.of_rank]
    return "; ".join(of_ranks or dict.fromkeys(ending.end_text for ending in endings.values()))


def serve_node(
    config: EngineConfig, devices: list[str], given: Iterable[str], waits_for_next: bool
) -> int:
    """Run this machine's ranks for `quire serve --node-rank K`; return the exit status.

    given: names of the settings given on this machine. waits_for_next: whether to wait for the next
    core after a core has ended. The first SIGTERM or Ctrl-C notifies the core and ends the ranks; a
    second one ends at once. Raises QuireError if no core was reachable in time or one refused.
    """
    node, leaving = Node.of(config, devices, given), threading.Event()
    _leave_on_signal(leaving)
    names, core = ", ".join(map(str, node.ranks)), Address(*node.core)
    while True:
        logger.info(
            "this machine runs ranks %s of %d of the core at %s", names,
            config.parallel.num_ranks, core,
        )  # fmt: skip
        end_text = _run_when_reachable(node, leaving)
        logger.info("this machine's ranks have ended: %s", end_text)
        if not waits_for_next or leaving.wait(AGAIN_S):
            return 0 if end_text in WELL else 1


def _leave_on_signal(leaving: threading.Event) -> None:
    """Set `leaving` on the first SIGTERM or SIGINT, and restore the handlers for the second one."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def note(number: int, frame: object) -> None:
        leaving.set()
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, note)


def _run_when_reachable(node: Node, leaving: threading.Event) -> str:
    """Run the ranks of a node once a core is reachable; return how they ended. Raises EngineError
    after wait_s without a core, QuireError if a core refuses them."""
    began_s = logged_s = time.monotonic()
    while True:
        try:
            return run_ranks(node, leaving)
        except Unreachable as error:
            reason = error
        now_s = time.monotonic()
        if now_s - began_s > node.wait_s:
            raise EngineError(
                f"no core connected to {Address(*node.core)} within {node.wait_s:g} s ({reason});"
                " is the command with --node-rank 0 running there, with the same --master-addr and"
                " --master-port?"
            )
        if now_s - logged_s > LOG_S:
            logged_s = now_s
            logger.info("no core yet: %s", reason)
        if leaving.wait(AGAIN_S):
            return LEFT


def main() -> int:
    """Run the ranks of machine 0, as a child of its core."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log-level", default="warning")
    begin_child(parser.parse_args().log_level)
    node = msgspec.json.decode(sys.stdin.buffer.read(), type=Node)
    try:
        return 0 if run_ranks(node, threading.Event()) in WELL else 1
    except QuireError as error:
        logger.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
