"""Ranks whose keepers are processes of this machine, which reach the core as others would."""

import os
import socket
import subprocess
import sys

from quire.base.settings.config import EngineConfig
from quire.engine.ranks.connections import Address
from tests.support.processes.forks import ForkedPopen

KEEP = """
import sys
from quire.engine.ranks.connections import Address
from quire.engine.ranks.node_agent import RankAssignment, run_rank
host, port, rank, has_before = sys.argv[1:]
secret = bytes.fromhex(sys.stdin.readline())
run_rank(Address(host, int(port)), secret, RankAssignment(int(rank), has_before == "True"))
"""


class LocalStarter:
    """absent: ranks whose node agents do not connect."""

    agent_name = "node agent"
    secret: bytes | None = None
    port = 0

    def __init__(self, config: EngineConfig, wait_s: float = 60.0, absent: int = 0) -> None:
        parallel = config.parallel
        self.wait_s = wait_s
        self._in_stage = parallel.tensor_parallel_size
        self._num = parallel.num_ranks - absent
        self._news, self._end = socket.socketpair()
        self.processes: list[subprocess.Popen[str]] = []

    def host(self) -> str:
        return "127.0.0.1"

    def start(self, core: Address, secret: bytes) -> None:
        for rank in range(self._num):
            place = [str(rank), str(rank >= self._in_stage)]
            process = ForkedPopen(
                [sys.executable, "-c", KEEP, core.host, str(core.port), *place],
                stdin=subprocess.PIPE,
                text=True,
                env={**os.environ, "QUIRE_NUM_THREADS": "1"},
            )
            assert process.stdin is not None
            process.stdin.write(secret.hex() + "\n")
            process.stdin.close()
            self.processes.append(process)

    def fileno(self) -> int:
        return self._news.fileno()

    def take_news(self) -> None:
        raise AssertionError("there is none")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self._news.close()
        self._end.close()
