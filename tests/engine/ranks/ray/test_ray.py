"""Ranks on a Ray cluster of two nodes, which are processes of this machine.

`make test` does not install Ray: run pip install "quire[ray]" first. Covers
`engine/ranks/ray/starter.py`, `engine/ranks/ray/driver.py`, `engine/ranks/ray/actor.py`.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray", reason='needs pip install "quire[ray]"')

from ray.cluster_utils import Cluster

from quire import LLM
from quire.base.errors import ConfigError, EngineError
from tests.support.engine.scenarios import COMMON, alone, answers_of
from tests.support.models.reference_checkpoints import checkpoint, text_checkpoint
from tests.support.processes.servers import Server, children_of, is_running, kill, wait_until

pytestmark = pytest.mark.slow

SOON_S = 2.8
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80_000_000}
RAY: dict[str, Any] = {"distributed_executor_backend": "ray", "tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    yield cluster
    cluster.shutdown()


@pytest.fixture(autouse=True)
def node(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The second node; all tests share the first one."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.delenv("QUIRE_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    node = cluster.add_node(**NODE)
    yield node
    wait_until(lambda: not rank_processes(), "all rank processes have ended")
    if node in cluster.list_all_nodes():
        cluster.remove_node(node)


def rank_processes(*kinds: str) -> list[int]:
    """Return the processes of ranks, actors and drivers on both nodes."""
    kinds = kinds or ("rank_main", "RankActor", "ray_driver")
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return sorted(pid for pid in pids if any(kind in command_of(pid) for kind in kinds))


def command_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def test_outputs_match_a_single_process() -> None:
    answers = answers_of(text_checkpoint("llama"), 120, **RAY)
    assert answers.answers == alone("llama", 120, ()).answers


def test_stages_on_two_nodes_match_a_single_process() -> None:
    settings = RAY | {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    answers = answers_of(text_checkpoint("llama"), 120, **settings)
    assert answers.answers == alone("llama", 120, ()).answers


@pytest.mark.parametrize(
    ("kind", "number", "message"),
    [
        ("rank_main", signal.SIGKILL, r"has ended \(signal 9\)"),
        ("RankActor", signal.SIGKILL, "Ray actor or machine has ended"),
        ("RankActor", signal.SIGSTOP, "Ray actor sent no heartbeat"),
        ("ray_driver", signal.SIGKILL, r"process that connects to Ray has ended \(signal 9\)"),
        ("raylet", signal.SIGKILL, "has lost its node"),
    ],
)
def test_end_of_any_process_is_detected(
    node: Any, kind: str, number: signal.Signals, message: str
) -> None:
    with LLM(str(checkpoint("llama")), **COMMON, **RAY) as llm:
        ranks, core = rank_processes("rank_main"), llm.engine.client.core
        assert len(ranks) == 2
        raylet = node.all_processes["raylet"][0].process.pid
        kill(raylet if kind == "raylet" else rank_processes(kind)[-1], number)
        began = time.monotonic()
        wait_until(lambda: core.rest_s() == 0.0, "the loss is detected", SOON_S)
        assert time.monotonic() - began < SOON_S
        with pytest.raises(EngineError, match=message):
            core.step()
        wait_until(lambda: not any(map(is_running, ranks)), "all ranks have ended")


def test_missing_resources_are_named_and_released() -> None:
    settings = RAY | {"tensor_parallel_size": 4, "node_wait_s": 2.0}
    with pytest.raises(ConfigError) as raised:
        LLM(str(checkpoint("llama")), **COMMON, **settings)
    message = r"node_wait_s=2 s: 4 x 1 CPU are requested, and the cluster.s \d nodes have 1 \+ 1"
    assert re.search(message, str(raised.value))  # Ray counts a node that died for a while
    with LLM(str(checkpoint("llama")), **COMMON, **RAY):
        pass


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:9", "no Ray cluster answers at 127.0.0.1:9"),
        ("ray://127.0.0.1:10001", "one for clients from outside"),
        ("here", "a Ray address is HOST:PORT"),
    ],
)
def test_unusable_ray_address_is_rejected(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(checkpoint("llama")), **COMMON, **RAY, ray_address=address)


def test_server_restarts_its_engine_and_leaves_no_process(cluster: Cluster) -> None:
    arguments = ["--distributed-executor-backend", "ray", "--ray-address", cluster.address]
    server = Server(
        str(text_checkpoint("llama")), "-tp", "2", "--restart-engine", *arguments, is_fork=False
    )
    try:
        before = rank_processes()
        kill(rank_processes("RankActor")[0], signal.SIGKILL)
        server.wait_for_line("Ray actor or machine has ended")
        wait_until(
            lambda: server.get("/ready") == 200 and len(rank_processes()) == 5,
            "the engine has restarted",
        )
        assert not set(before) & set(rank_processes())
        [core] = [p for p, c in children_of(server.process.pid).items() if "core_main" in c]
        kill(core, signal.SIGKILL)
        wait_until(
            lambda: len(rank_processes()) == 5 and server.get("/ready") == 200,
            "the engine has restarted again",
        )
    finally:
        server.process.terminate()
        server.process.wait()
