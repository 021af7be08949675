"""Ranks on several machines without Ray: `quire serve --node-rank 1` and an engine in this process.

Covers `engine/ranks/node.py`, `engine/ranks/messages.py` and `engine/ranks/consistency.py`.
"""

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from quire import LLM
from quire.base.errors import ConfigError, EngineError, RankLost
from quire.base.settings.config import config_from_flat
from quire.base.settings.parallel import ParallelConfig
from quire.engine.ranks.connections import Address, AuthenticatingListener
from quire.engine.ranks.consistency import contradictions, given_settings_of
from quire.engine.ranks.node import Node, rank_token, ranks_of_node
from quire.engine.ranks.node_agent import (
    CORE_ENDED,
    CORE_LOST,
    LEFT,
    Ending,
    RankAssignment,
    run_rank,
)
from quire.engine.ranks.rank_set import RankSet
from quire.engine.ranks.remote import RemoteRanks
from tests.support.engine.scenarios import COMMON, NUM_ASKED, alone, answers_of
from tests.support.models.reference_checkpoints import checkpoint, text_checkpoint
from tests.support.processes.forks import ForkedPopen
from tests.support.processes.servers import children_of, is_running, wait_until

SECRET = "a secret of this test, and of no other"
StartNode = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        found: int = sock.getsockname()[1]
        return found


@pytest.fixture
def nodes(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartNode]:
    """Starts other machines: nodes(model, 1, "-tp", "2"); their output is in their `log`."""
    monkeypatch.setenv("QUIRE_RANK_TOKEN", SECRET)
    monkeypatch.setenv("QUIRE_NUM_THREADS", "1")
    started: list[subprocess.Popen[str]] = []

    def start(model: Path, number: int, *more: str, **environment: str) -> Any:
        log = tmp_path / f"node {len(started)}"
        command = [
            sys.executable, "-m", "quire.cli.main", "serve", str(model), "--nnodes", "2",
            "--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port", str(port),
            *more,
        ]  # fmt: skip
        with log.open("w") as file:
            process = ForkedPopen(
                command, stderr=file, text=True, env={**os.environ, **environment}
            )
        process.log = log  # type: ignore[attr-defined]
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def log_of(node: Any) -> str:
    text: str = node.log.read_text()
    return text


def engine(model: Path, port: int, **settings: Any) -> LLM:
    two = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": port}
    return LLM(str(model), **(COMMON | {"tensor_parallel_size": 2} | two | settings))


def test_two_machines_match_one_process_and_end_together(nodes: StartNode, port: int) -> None:
    model = text_checkpoint("llama")
    node = nodes(model, 1, "-tp", "2")
    settings = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": port}
    found = answers_of(model, 120, 3, tensor_parallel_size=2, **settings)
    first, second = (alone("llama", 120, ()).answers[i : i + 3] for i in (0, NUM_ASKED))
    assert found.answers == first + second
    assert node.wait(20) == 0
    assert "runs ranks 1 of 2" in log_of(node) and "the core has ended" in log_of(node)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4, 1), (2, 2), (1, 2)], ids=str)
def test_ranks_are_distributed_to_machines(
    nodes: StartNode, port: int, sizes: tuple[int, int]
) -> None:
    model, (tensor, stages) = text_checkpoint("llama"), sizes
    node = nodes(model, 1, "-tp", str(tensor), "-pp", str(stages))
    settings = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": port}
    found = answers_of(
        model, 120, tensor_parallel_size=tensor, pipeline_parallel_size=stages, **settings
    )
    assert found.answers == alone("llama", 120, ()).answers
    assert node.wait(20) == 0


@pytest.mark.slow
def test_lost_machine_stops_the_engine(nodes: StartNode, port: int) -> None:
    model = checkpoint("llama")
    node = nodes(model, 1, "-tp", "2")
    with engine(model, port) as llm:
        core = llm.engine.client.core
        ranks = [pid for pid, what in children_of(node.pid).items() if "rank_main" in what]
        assert len(ranks) == 1
        node.kill()
        wait_until(lambda: core.rest_s() == 0.0, "the loss is detected", 2.8)
        with pytest.raises(EngineError, match="rank 1 of 2.* its node or machine has ended"):
            core.step()
        wait_until(lambda: not is_running(ranks[0]), "its rank has ended")


@pytest.mark.slow
def test_machine_with_restart_engine_serves_the_next_core(nodes: StartNode, port: int) -> None:
    model = checkpoint("llama")
    node = nodes(model, 1, "-tp", "2", "--restart-engine")
    for _ in range(2):
        with engine(model, port) as llm:
            assert llm.generate([[5, 6, 7]], use_tqdm=False)[0].outputs[0].token_ids
    assert node.poll() is None
    assert log_of(node).count("the core has ended") >= 1
    node.terminate()
    assert node.wait(20) == 0


@pytest.mark.slow
def test_second_machine_with_the_same_node_rank_is_rejected(nodes: StartNode, port: int) -> None:
    model = checkpoint("llama")
    first = nodes(model, 1, "-tp", "2")
    with engine(model, port):
        second = nodes(model, 1, "-tp", "2")
        assert second.wait(20) == 1
        assert "has refused rank 1 of this machine: this rank is running already" in log_of(second)
        assert first.poll() is None


def test_engine_runs_only_on_machine_0(nodes: StartNode, port: int) -> None:
    with pytest.raises(ConfigError, match="node_rank=1 only runs ranks"):
        engine(checkpoint("llama"), port, node_rank=1)


def test_machine_without_the_secret_is_rejected(nodes: StartNode, port: int) -> None:
    model = checkpoint("llama")
    node = nodes(model, 1, "-tp", "2", QUIRE_RANK_TOKEN="another secret, as long")
    with pytest.raises(EngineError, match="rank 1 of 2 did not connect to 127.0.0.1"):
        engine(model, port, node_wait_s=8.0)
    assert node.wait(20) == 1
    assert "secret" in log_of(node)


def test_machine_without_a_core_reports_the_address(nodes: StartNode, port: int) -> None:
    node = nodes(checkpoint("llama"), 1, "-tp", "2", "--node-wait-s", "0.6")
    assert node.wait(20) == 1
    assert f"no core connected to 127.0.0.1:{port} within 0.6 s" in log_of(node)


class NoStarter:
    """Leaves it to the test to run the ranks."""

    keeper, wait_s, port = "node", 30.0, 0
    secret: bytes | None = SECRET.encode()

    def __init__(self) -> None:
        self.core: SimpleQueue[Address] = SimpleQueue()
        self._news, self._end = socket.socketpair()

    def host(self) -> str:
        return "127.0.0.1"

    def start(self, core: Address, secret: bytes) -> None:
        self.core.put(core)

    def fileno(self) -> int:
        return self._news.fileno()

    def take_news(self) -> None:
        raise AssertionError("there is none")

    def close(self) -> None:
        self._news.close()
        self._end.close()


class Losses:
    """A listener that collects lost ranks."""

    def __init__(self) -> None:
        self.found: SimpleQueue[RankLost] = SimpleQueue()
        self.lose = self.found.put

    def hear(self, rank: int, message: Any) -> None:
        raise AssertionError("no rank was started")

    def tick(self) -> None:
        pass


@dataclass
class Core:
    ranks: RankSet
    transport: RemoteRanks
    losses: Losses
    address: Address
    pool: ThreadPoolExecutor

    def run_rank(self, number: int, **more: Any) -> "Future[Ending]":
        """Run a rank on a thread, and wait until it has connected."""
        assignment = RankAssignment(number, **more)
        future = self.pool.submit(run_rank, self.address, SECRET.encode(), assignment)
        rank = self.transport.ranks[number]
        wait_until(lambda: rank.here is not None, "the rank has connected", 10)
        return future

    def refusal(self, number: int, **more: Any) -> str:
        """Return the reason for which a rank is rejected."""
        with pytest.raises(ConfigError) as raised:
            run_rank(self.address, SECRET.encode(), RankAssignment(number, **more))
        return str(raised.value)


@pytest.fixture
def core() -> Iterator[Core]:
    """A core of three ranks that never all connect, so none is started."""
    starter, losses = NoStarter(), Losses()
    config = config_from_flat(model="a", tensor_parallel_size=3, max_model_len=96)
    transport = RemoteRanks(config, starter, "warning")
    ranks = RankSet(transport, losses)
    with ThreadPoolExecutor() as pool:
        yield Core(ranks, transport, losses, starter.core.get(timeout=10), pool)
        ranks.close()


def test_rank_with_different_settings_is_rejected_with_the_difference(
    core: Core, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank with equal settings may then connect. Settings that a machine was not given come from
    machine 0."""
    other = config_from_flat(model="a", max_model_len=50, dtype="float32", device="cpu")
    given_settings = given_settings_of(other, ["model", "max_model_len", "device", "host"])
    assert given_settings == {"model": '"a"', "max_model_len": "50"}
    assert "max_model_len is 50 there and 96 on machine 0; start" in core.refusal(
        1, settings=given_settings
    )
    other = config_from_flat(model="a", kv_store=("redis://user:hunter2@cache",))
    given_settings = given_settings_of(other, ["kv_store"])
    refused = core.refusal(1, settings=given_settings)
    assert 'kv_store is ["redis://user:***@cache"] there and [] on machine 0; start' in refused
    unset = core.refusal(1, settings={"revision": '"main"'})
    assert 'revision is "main" there and not set on machine 0; start' in unset
    assert "no rank 5 of 3: machine 0 was started with tensor_parallel_size=3" in core.refusal(5)
    ending = core.run_rank(1, settings={"model": '"a"'})
    assert "running already by 127.0.0.1; is its node_rank another" in core.refusal(1)
    core.ranks.close()  # the core's thread has logged everything
    assert ending.result(10) == Ending(CORE_ENDED)
    lines = [record.getMessage() for record in caplog.records]
    assert "rank 1 of the machine 127.0.0.1 was refused: max_model_len is 50" in lines[0]
    assert sum("was refused" in line for line in lines) == 5


def test_secrets_of_machines_are_compared_but_not_shown() -> None:
    one, two = (
        config_from_flat(model="a", kv_store=(f"redis://user:{word}@cache",)) for word in ("x", "y")
    )
    given = given_settings_of(one, ["kv_store"])
    assert contradictions(one, given) == ""
    assert contradictions(two, given) == "kv_store has a different secret there than on machine 0"
    assert hashlib.sha256(b'["redis://user:x@cache"]').hexdigest()[:16] not in str(given)


def test_machine_shutdown_is_reported_to_the_other_ranks(core: Core) -> None:
    leaving = threading.Event()
    first, other = core.run_rank(0, leaving=leaving), core.run_rank(1)
    leaving.set()
    assert first.result(10) == Ending(LEFT)
    why = "rank 0 of 3 (on 127.0.0.1) was stopped, because its machine was shut down"
    assert str(core.losses.found.get(timeout=10)) == why
    assert other.result(10) == Ending(f"{CORE_ENDED}: {why}")


def test_lost_core_is_distinguished_from_an_ended_one() -> None:
    core_listener = AuthenticatingListener(
        "127.0.0.1", SECRET.encode(), lambda arrival: arrival.socket.close()
    )
    assert run_rank(core_listener.address, SECRET.encode(), RankAssignment(0)) == Ending(CORE_LOST)
    core_listener.close()


def test_ranks_of_each_node() -> None:
    two = {"nnodes": 2, "master_addr": "a", "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    found = [ranks_of_node(ParallelConfig(**two, node_rank=number)) for number in (0, 1)]
    assert found == [[0, 1], [2, 3]]


def test_rank_token_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_from_flat(nnodes=2, master_addr="127.0.0.1", tensor_parallel_size=2)
    for short in ("", "short"):
        monkeypatch.setenv("QUIRE_RANK_TOKEN", short)
        with pytest.raises(ConfigError, match=r"QUIRE_RANK_TOKEN.*openssl rand -hex 32"):
            Node.of(config, [])
    monkeypatch.setenv("QUIRE_RANK_TOKEN", SECRET)
    assert rank_token() == SECRET.encode()
