"""The supervisor's handling of models that do not load; no process is started."""

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
    raise AssertionError("nobody starts it")


def test_a_model_that_never_loads_takes_one_place_of_its_listener(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No core takes its connection, and more than one would soon be refused."""
    monkeypatch.setattr(residency_file, "RETRY_S", 0.0)
    core = CoreChild(Child("a", _never, False), tmp_path / "core.sock", tmp_path / "heartbeat")
    residency = Residency(["a"])
    with bind_unix(tmp_path / "keeper.sock") as listener, bind_unix(core.path) as cores:
        listener.listen()
        cores.listen(1)
        keeper = ModelManager(residency, {"a": core}, listener)
        keeper.begin()
        for number in range(10):
            assert residency.models["a"].state == LOADING and core.child.due_s == 0.0
            keeper.bury(core.child, 1)
            assert residency.models["a"].state == FAILED
            residency.request("a", (1, number), residency.models["a"].since_s)
            keeper.look([])
        taken, _ = cores.accept()
        with taken:
            taken.send(b"ready")
            keeper.look(keeper.fds())
        assert residency.models["a"].state == LOADED
        keeper.close()


def test_a_model_whose_listener_is_full_has_failed(tmp_path: Path) -> None:
    core = CoreChild(Child("a", _never, False), tmp_path / "core.sock", tmp_path / "heartbeat")
    residency = Residency(["a"])
    with bind_unix(tmp_path / "keeper.sock") as listener, bind_unix(core.path) as cores:
        listener.listen()
        cores.listen(0)
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(core.path))
            keeper = ModelManager(residency, {"a": core}, listener)
            keeper.begin()
            assert residency.models["a"].state == FAILED and core.child.due_s is None
            assert "socket" in residency.models["a"].why
            keeper.close()
