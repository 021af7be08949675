"""Ranks that node agents run and that connect over a network.

Covers `engine/ranks/remote.py`, `engine/ranks/node_agent.py`, `engine/ranks/launch.py`.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

import quire.engine.start.build
from quire import LLM
from quire.base.errors import ConfigError, EngineError, RankLost
from quire.base.settings.config import EngineConfig, config_from_flat
from quire.engine.ranks.launch import Ranks
from quire.models.checkpoint.source import resolve_model
from tests.support.engine.remote_ranks import LocalStarter
from tests.support.engine.scenarios import COMMON, alone, answers_of
from tests.support.models.reference_checkpoints import checkpoint, text_checkpoint
from tests.support.processes.servers import children_of, is_running, kill, wait_until

SOON_S = 8.0  # two seconds without a heartbeat; the rest is for a busy machine
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
Starters = list[LocalStarter]


@pytest.fixture
def starters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starters]:
    """Run the ranks of multi-rank engines under node agents; yield the starters of the agents."""
    made: Starters = []

    def start(config: EngineConfig) -> Ranks | None:
        if config.parallel.num_ranks == 1:
            return None
        made.append(LocalStarter(config))
        return Ranks(config, made[-1])

    monkeypatch.setattr(quire.engine.start.build, "start_ranks", start)
    yield made
    for starter in made:
        assert all(process.poll() is not None for process in starter.processes)


def ranks_of(starter: LocalStarter) -> list[int]:
    """Return the rank process of each node agent."""
    found = [children_of(process.pid) for process in starter.processes]
    return [pid for each in found for pid, command in each.items() if "rank_main" in command]


def config(**settings: Any) -> EngineConfig:
    return config_from_flat(model=str(checkpoint("llama")), **(COMMON | TWO | settings))


def test_lost_machine_is_detected_and_all_ranks_end(starters: Starters) -> None:
    with LLM(str(checkpoint("llama")), **COMMON, **TWO) as llm:
        [starter] = starters
        ranks, core = ranks_of(starter), llm.engine.client.core
        assert len(ranks) == 2
        starter.processes[1].kill()  # the kernel then kills its rank
        began = time.monotonic()
        wait_until(lambda: core.rest_s() == 0.0, "the loss is detected", SOON_S)
        with pytest.raises(EngineError, match="node agent or machine has ended"):
            core.step()
        assert time.monotonic() - began < SOON_S
        assert f"rank 1 of 2 (process {ranks[1]} on 127.0.0.1)" in str(core._death)
        wait_until(lambda: not any(map(is_running, ranks)), "all ranks have ended")


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [(2, 1), (1, 2), (2, 2)], ids=lambda sizes: "tensor {} stages {}".format(*sizes)
)
def test_outputs_match_a_single_process(starters: Starters, sizes: tuple[int, int]) -> None:
    tensor, stages = sizes
    found = answers_of(
        text_checkpoint("llama"), 120, tensor_parallel_size=tensor, pipeline_parallel_size=stages
    )
    [starter] = starters
    assert len(starter.processes) == tensor * stages
    assert found.answers == alone("llama", 120, ()).answers
    assert found.num_masked > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_agent", "number", "message"),
    [
        (False, signal.SIGKILL, r"has ended \(signal 9\)"),
        (False, signal.SIGSTOP, "was stopped"),
        (True, signal.SIGSTOP, "its node agent sent no heartbeat for 2 s"),
    ],
)
def test_ended_or_stopped_ranks_and_agents_are_detected(
    starters: Starters, is_agent: bool, number: signal.Signals, message: str
) -> None:
    with LLM(str(checkpoint("llama")), **COMMON, **TWO) as llm:
        [starter] = starters
        ranks, core = ranks_of(starter), llm.engine.client.core
        kill(starter.processes[0].pid if is_agent else ranks[0], number)
        began = time.monotonic()
        wait_until(lambda: core.rest_s() == 0.0, "the loss is detected", SOON_S)
        assert time.monotonic() - began < SOON_S
        with pytest.raises(EngineError, match=message):
            core.step()
    wait_until(lambda: not any(map(is_running, ranks)), "all ranks have ended")


def test_missing_rank_is_named() -> None:
    made = config()
    starter = LocalStarter(made, wait_s=3.0, absent=1)
    ranks = Ranks(made, starter)
    message = r"rank 1 of 2 did not connect to 127\.0\.0\.1:\d+ within 3 s"
    with pytest.raises(EngineError, match=message):
        ranks.load(made, resolve_model(made.model.model), None)
    assert starter.processes[0].poll() is not None


def test_errors_of_the_starter_are_raised_unchanged() -> None:
    class CannotHost(LocalStarter):
        def host(self) -> str:
            raise ConfigError("there is no room")

    class FailsLater(LocalStarter):
        def start(self, *_: Any) -> None:
            self._end.send(b"x")

        def take_news(self) -> None:
            raise EngineError("all has ended")

    made = config()
    for kind, error, message in (
        (CannotHost, ConfigError, "there is no room"),
        (FailsLater, EngineError, "all has ended"),
    ):
        with pytest.raises(error, match=message):
            Ranks(made, kind(made)).load(made, resolve_model(made.model.model), None)


NODE = """
import os, subprocess, sys
from tests.support.engine.remote_ranks import KEEP
keeper = subprocess.Popen([sys.executable, "-c", KEEP, *sys.argv[1:]], stdin=0)
print(keeper.pid, flush=True)
keeper.wait()
"""


def test_node_agent_ends_with_its_node_and_with_the_core() -> None:
    class Nodes(LocalStarter):
        """Node agents are grandchildren of this process."""

        def start(self, core: Any, secret: bytes) -> None:
            command = [sys.executable, "-c", NODE, core.host, str(core.port), "0", "False"]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = subprocess.Popen(command, text=True, **pipes)
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(secret.hex() + "\n")
            process.stdin.close()
            self.processes.append(process)
            self.agent_pid = int(process.stdout.readline())

    made = config(tensor_parallel_size=1, distributed_executor_backend="mp")
    starter = Nodes(made)
    ranks = Ranks(made, starter)
    assert ranks._processes.shares()[0][0] == 1  # the rank has connected
    starter.processes[0].kill()
    with pytest.raises(RankLost, match="has lost its node"):
        ranks.load(made, resolve_model(made.model.model), None)
    wait_until(lambda: not is_running(starter.agent_pid), "the node agent has ended")

    ranks = Ranks(made, starter := Nodes(made))
    ranks._processes.shares()
    ranks.close()
    wait_until(lambda: not is_running(starter.agent_pid), "the node agent has ended")
    for pipe in (each.stdout for each in starter.processes):
        assert pipe is not None
        pipe.close()
