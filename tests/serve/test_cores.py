"""The share of a machine that each of several cores gets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.base.errors import ConfigError
from quire.base.settings.config import EngineConfig, config_from_flat
from quire.ops.host.threads import usable_cores
from quire.runner.memory_plan import MEMORY_VARIABLE, available_cpu_bytes
from quire.serve.processes.cores import ALONE, CUDA_VARIABLE, CoreShare, core_shares, gpu_shares


def settings(num: int = 2, **more: object) -> EngineConfig:
    return config_from_flat(model="demo", data_parallel_size=num, **more)


def test_single_core_gets_no_share() -> None:
    assert core_shares(settings(1)) == [ALONE]
    assert not ALONE.cpus and not ALONE.environment and ALONE.name == "the engine"
    alone = settings(1, record="there")
    assert ALONE.config(alone) is alone


def test_cores_share_memory_and_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    all_shares = core_shares(settings(2, device="cpu"))
    assert [share.name for share in all_shares] == ["core 0", "core 1"]
    given = [int(share.environment[MEMORY_VARIABLE]) for share in all_shares]
    assert given[0] == given[1] and 0.4 < given[0] / available_cpu_bytes() < 0.6
    threads = [int(share.environment["QUIRE_NUM_THREADS"]) for share in all_shares]
    assert threads == [max(1, usable_cores() // 2)] * 2
    all_cpus = os.sched_getaffinity(0)
    assert all_shares[0].cpus | all_shares[1].cpus == all_cpus
    monkeypatch.setenv("QUIRE_NUM_THREADS", "3")
    assert "QUIRE_NUM_THREADS" not in core_shares(settings(2))[0].environment


def test_memory_share_bounds_the_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMORY_VARIABLE, "1000")
    assert available_cpu_bytes() == 1000
    monkeypatch.setenv(MEMORY_VARIABLE, "much")
    with pytest.raises(ConfigError, match="number of bytes, got 'much'"):
        available_cpu_bytes()


def test_each_core_has_its_own_recording() -> None:
    share = CoreShare(1, 2)
    assert share.config(settings(2, record="there")).record == "there/core-1"
    assert share.config(settings(2)).record is None


def test_process_runs_on_its_bound_cpus() -> None:
    cpu = min(os.sched_getaffinity(0))
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    CoreShare(0, 2, frozenset([cpu])).bind(process.pid)
    assert os.sched_getaffinity(process.pid) == {cpu}
    process.communicate(b"\n")
    CoreShare(0, 2, frozenset([cpu])).bind(process.pid)  # too late, but no error


def test_gpus_are_assigned_to_cores(tmp_path: Path) -> None:
    def shares(config: EngineConfig, **environment: str) -> list[str]:
        found = gpu_shares(config, environment, tmp_path)
        return [each.get(CUDA_VARIABLE, "-") for each in found]

    assert shares(settings(2)) == ["-", "-"], "there are none"
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert shares(settings(2)) == ["0", "1"]
    assert shares(settings(2, device="cpu")) == ["-", "-"]
    assert shares(settings(2), CUDA_VISIBLE_DEVICES="5, GPU-7") == ["5", "GPU-7"]
    assert shares(settings(2), CUDA_VISIBLE_DEVICES="-1") == ["-", "-"]
    with pytest.raises(
        ConfigError, match="data_parallel_size=4 .* needs 4 GPUs, but only 3 are visible"
    ):
        shares(settings(4))
