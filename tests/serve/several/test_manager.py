"""How the supervisor handles models that do not load; no process is started."""

import socket
from pathlib import Path

import pytest

from quire.serve.processes.children import Child, CoreChild
from quire.serve.several import residency as residency_file
from quire.serve.several.manager import ModelManager
from quire.serve.several.messages import FAILED, LOADED, LOADING
from quire.serve.several.residency import Residency
from quire.serve.supervisor import bind_unix


def _never() -> None:
    raise AssertionError("the model must not be started")


def test_failing_model_uses_one_slot_of_its_listen_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No core accepts its connection, and further connections would soon be refused."""
    monkeypatch.setattr(residency_file, "RETRY_S", 0.0)
    core = CoreChild(Child("a", _never, False), tmp_path / "core.sock", tmp_path / "heartbeat")
    residency = Residency(["a"])
    with bind_unix(tmp_path / "keeper.sock") as listener, bind_unix(core.path) as cores:
        listener.listen()
        cores.listen(1)
        manager = ModelManager(residency, {"a": core}, listener)
        manager.begin()
        for number in range(10):
            assert residency.models["a"].state == LOADING and core.child.due_s == 0.0
            manager.bury(core.child, 1)
            assert residency.models["a"].state == FAILED
            residency.request("a", (1, number), residency.models["a"].since_s)
            manager.look([])
        taken, _ = cores.accept()
        with taken:
            taken.send(b"ready")
            manager.look(manager.fds())
        assert residency.models["a"].state == LOADED
        manager.close()


def test_model_with_a_full_listen_queue_fails(tmp_path: Path) -> None:
    core = CoreChild(Child("a", _never, False), tmp_path / "core.sock", tmp_path / "heartbeat")
    residency = Residency(["a"])
    with bind_unix(tmp_path / "keeper.sock") as listener, bind_unix(core.path) as cores:
        listener.listen()
        cores.listen(0)
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(core.path))
            manager = ModelManager(residency, {"a": core}, listener)
            manager.begin()
            assert residency.models["a"].state == FAILED and core.child.due_s is None
            assert "socket" in residency.models["a"].why
            manager.close()
