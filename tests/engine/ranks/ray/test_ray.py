"""Ranks on a Ray cluster of two nodes, which are processes of this machine.

Ray is not among what `make test` installs: pip install "quire[ray]" first. Covers
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
    """The second node. The first one is the same for all tests."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.delenv("QUIRE_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    node = cluster.add_node(**NODE)
    yield node
    wait_until(lambda: not found(), "all processes of ranks have gone")
    if node in cluster.list_all_nodes():
        cluster.remove_node(node)


def found(*kinds: str) -> list[int]:
    """Processes of ranks, actors and drivers, wherever they are."""
    kinds = kinds or ("rank_main", "RankActor", "ray_driver")
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return sorted(pid for pid in pids if any(kind in command_of(pid) for kind in kinds))


def command_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def test_all_answers_are_those_of_one_process() -> None:
    answers = answers_of(text_checkpoint("llama"), 120, **RAY)
    assert answers.answers == alone("llama", 120, ()).answers


def test_stages_on_two_nodes() -> None:
    settings = RAY | {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    answers = answers_of(text_checkpoint("llama"), 120, **settings)
    assert answers.answers == alone("llama", 120, ()).answers


@pytest.mark.parametrize(
    ("kind", "number", "said"),
    [
        ("rank_main", signal.SIGKILL, r"has ended \(signal 9\)"),
        ("RankActor", signal.SIGKILL, "Ray actor or machine has ended"),
        ("RankActor", signal.SIGSTOP, "Ray actor sent no heartbeat"),
        ("ray_driver", signal.SIGKILL, r"process that connects to Ray has ended \(signal 9\)"),
        ("raylet", signal.SIGKILL, "has lost its node"),
    ],
)
def test_what_ends_is_missed(node: Any, kind: str, number: signal.Signals, said: str) -> None:
    with LLM(str(checkpoint("llama")), **COMMON, **RAY) as llm:
        ranks, core = found("rank_main"), llm.engine.client.core
        assert len(ranks) == 2
        raylet = node.all_processes["raylet"][0].process.pid
        kill(raylet if kind == "raylet" else found(kind)[-1], number)
        began = time.monotonic()
        wait_until(lambda: core.rest_s() == 0.0, "it is missed", SOON_S)
        assert time.monotonic() - began < SOON_S
        with pytest.raises(EngineError, match=said):
            core.step()
        wait_until(lambda: not any(map(is_running, ranks)), "all ranks have gone")


def test_too_few_resources_are_named_and_given_back() -> None:
    settings = RAY | {"tensor_parallel_size": 4, "node_wait_s": 2.0}
    with pytest.raises(ConfigError) as raised:
        LLM(str(checkpoint("llama")), **COMMON, **settings)
    said = r"node_wait_s=2 s: 4 x 1 CPU are requested, and the cluster.s \d nodes have 1 \+ 1"
    assert re.search(said, str(raised.value))  # Ray counts a node that died for a while
    with LLM(str(checkpoint("llama")), **COMMON, **RAY):
        pass


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:9", "no Ray cluster answers at 127.0.0.1:9"),
        ("ray://127.0.0.1:10001", "one for clients from outside"),
        ("here", "a Ray address is HOST:PORT"),
    ],
)
def test_an_address_where_nobody_is(address: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(str(checkpoint("llama")), **COMMON, **RAY, ray_address=address)


def test_a_server_starts_anew_and_leaves_nothing(cluster: Cluster) -> None:
    arguments = ["--distributed-executor-backend", "ray", "--ray-address", cluster.address]
    server = Server(
        str(text_checkpoint("llama")), "-tp", "2", "--restart-engine", *arguments, is_fork=False
    )
    try:
        before = found()
        kill(found("RankActor")[0], signal.SIGKILL)
        server.wait_for_line("Ray actor or machine has ended")
        wait_until(lambda: server.get("/ready") == 200 and len(found()) == 5, "it is back")
        assert not set(before) & set(found())
        [core] = [p for p, c in children_of(server.process.pid).items() if "core_main" in c]
        kill(core, signal.SIGKILL)
        wait_until(lambda: len(found()) == 5 and server.get("/ready") == 200, "it is back again")
    finally:
        server.process.terminate()
        server.process.wait()
