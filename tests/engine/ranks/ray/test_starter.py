"""Errors if Ray is not installed or does not respond. test_ray.py runs a cluster."""

import importlib.util
from typing import Any

import pytest

from quire import LLM
from quire.base.errors import ConfigError, EngineError, MissingDependency
from quire.engine.ranks.ray import starter as ray_starter
from quire.engine.ranks.ray.starter import RayStarter
from tests.engine.ranks.test_remote import config
from tests.support.engine.scenarios import COMMON
from tests.support.models.reference_checkpoints import checkpoint

RAY: dict[str, Any] = {"distributed_executor_backend": "ray"}
# Replaces the driver: sends a message to the core and exits.
DRIVER = """
import argparse, socket, sys
from quire.engine.ranks.ray import starter as ray_starter
parser = argparse.ArgumentParser()
parser.add_argument("--socket", type=int)
parser.add_argument("--log-level")
sock = socket.socket(fileno=parser.parse_args().socket)
"""


def test_missing_ray_error_gives_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r'pip install "quire\[ray\]"'):
        LLM(str(checkpoint("llama")), **COMMON, **RAY)


def test_exited_or_failing_driver_raises_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    module = tmp_path / "driver_that_ends.py"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = ray_starter.start_child

    def start(name: str, *rest: Any) -> Any:
        return started("driver_that_ends", *rest)

    monkeypatch.setattr(ray_starter, "start_child", start)
    trouble = 'ray_starter._core_side().encode(ray_starter.Trouble("ConfigError", "no room"))'
    for program, kind, message in (
        ("sys.exit(7)", EngineError, r"has ended \(exit status 7\)"),
        (f"sock.sendall({trouble})", ConfigError, "no room"),
    ):
        module.write_text(f"{DRIVER}{program}\n")
        starter = RayStarter(config(**RAY), "warning")
        with pytest.raises(kind, match=message):
            starter.host()
        starter.close()
