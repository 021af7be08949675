"""`quire doctor` on this machine, and on machines with problems."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from quire.cli import machine
from quire.cli.commands import doctor
from quire.ops.host import fast_cores, native
from quire.ops.host.fast_cores import CoreSpeeds
from quire.ops.weights.formats import variants
from quire.serve.python.llm import LLM
from tests.support.commands import run
from tests.support.kernels.kernel_speeds import keep_figures, own_figures
from tests.support.models.checkpoints import write_checkpoint


def facts(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status, out, err = run(capsys, "doctor", "--json", *arguments)
    assert err == ""
    return json.loads(out) | {"status": status}


def problems(found: dict[str, Any]) -> str:
    return " ".join(f"{p['what']}: {p['advice']}" for p in found["problems"])


def test_report_covers_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "doctor", "--device", "cpu")
    assert (status, err) == (0, "")
    for text in ("python  ", "usable cores", "torch", "C++ core", "attention", "problems"):
        assert text in out
    assert "sequences of 2,048)" in out


def test_json_has_the_settings_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, "demo", "--device", "cpu", "--dtype", "float32")
    assert found["status"] == 0
    assert found["cpu"]["usable cores"] == len(os.sched_getaffinity(0))
    assert 0 < found["memory"]["available bytes"] < found["memory"]["total bytes"]
    assert found["packages"]["torch"] == found["torch"]["version"]
    model = found["model"]
    assert (model["name"], model["device"], model["dtype"]) == ("demo", "cpu", "float32")
    assert (model["sequences at once"], model["max_model_len"]) == (64, 2048)
    assert 64 <= model["tokens per step"] <= 256


def test_core_speeds_are_shown_with_the_chosen_cores(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = CoreSpeeds("1 of 2 cores, with 71% of the speed", {0: 99.6e9, 2: 40e9}, frozenset({0}))
    monkeypatch.setattr(fast_cores, "core_speeds", lambda: found)
    cores = facts(capsys, "--device", "cpu")["cores of quire serve"]
    assert cores["chosen"] == found.reason
    assert (cores["GFLOP/s of CPU 0"], cores["GFLOP/s of CPU 2"]) == (100, 40)


@pytest.mark.skipif(len(variants()) < 2, reason="this CPU runs one instruction set")
def test_kernel_choices_are_shown_with_figures_and_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default, other = variants()[-1], variants()[0]
    with own_figures(tmp_path):
        kernels = facts(capsys, "--device", "cpu")["kernels"]  # no saved figures: measured
        (path,) = (tmp_path / "quire/kernels").iterdir()
        assert f"kept in {path}" in kernels["measured"]
        keep_figures({"int8": other})
        kernels = facts(capsys, "--device", "cpu")["kernels"]
        assert kernels["int8"].startswith(f"{other}: 3.00 times as fast as {default} (")
        assert f"{other} 900 and 10" in kernels["int8"]
        assert kernels["bfloat16"].startswith(f"{default}: none is 1.1 times as fast (")
        monkeypatch.setenv("QUIRE_CPU_VARIANT", default)
        kernels = facts(capsys, "--device", "cpu")["kernels"]
        assert kernels["int8"].startswith(f"{default}: as QUIRE_CPU_VARIANT says (")
        monkeypatch.setenv("QUIRE_CPU_VARIANT", "avx1024")
        found = facts(capsys, "--device", "cpu")
        assert found["status"] == 1 and "QUIRE_CPU_VARIANT=avx1024 is not available" in problems(
            found
        )


def test_given_settings_change_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--max-num-seqs 3 --max-num-batched-tokens 99 --attention-backend torch --device cpu"
    model = facts(capsys, "shape:qwen3-0.6b", *flags.split(), "--max-model-len", "512")["model"]
    assert (model["sequences at once"], model["tokens per step"]) == (3, 99)
    assert (model["attention"], model["max_model_len"]) == ("torch", 512)
    small = "--kv-cache-memory-bytes 1M --device cpu --max-model-len auto --dtype float32"
    assert facts(capsys, *small.split())["model"]["max_model_len"] < 2048


def test_planned_weights_equal_those_of_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """A packed tied head holds a copy of the weights, which neither files nor shapes show."""
    flags = ("shape:opt-125m", "--device", "cpu")
    planned = facts(capsys, *flags)["model"]["memory plan"].split(",")[0]
    with LLM("shape:opt-125m", device="cpu", disable_log_stats=True) as llm:
        assert llm.engine.memory.describe().startswith(f"memory: {planned},")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/nowhere", "model /nowhere: there is no directory"),
        ("--kv-cache-memory-bytes 1M --device cpu --dtype float32", "max_model_len=auto"),
        ("--block-size 0", "block_size must be from 1 to 256"),
    ],
)
def test_impossible_models_are_reported(
    capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    found = facts(capsys, *line.split())
    assert found["status"] == 1
    assert message in problems(found)


@pytest.fixture
def able_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace this machine's CPU by one without problems."""
    able = machine.Cpu("Able CPU", 64, 64, None, ("avx2", "avx512f", "avx512_bf16"))
    monkeypatch.setattr(machine, "cpu", lambda: able)


@pytest.mark.usefixtures("able_cpu")
def test_invalid_weight_files_are_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Missing files are not a problem if all are missing: they may not have been downloaded yet."""
    write_checkpoint(tmp_path, "llama", max_shard_size="30KB")
    capsys.readouterr()  # discard the progress output
    line = (str(tmp_path), "--device", "cpu")
    assert facts(capsys, *line)["problems"] == []
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    assert f"{shards[1]} cannot be read" in problems(facts(capsys, *line))
    shards[1].unlink()
    found = facts(capsys, *line)
    assert found["status"] == 1 and f"lacks {shards[1].name}" in problems(found)
    assert facts(capsys, *line, "--load-format", "dummy")["problems"] == []
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    assert facts(capsys, *line)["problems"] == []


def test_problems_of_a_machine_are_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = machine.Cpu("Old CPU", 64, 64, 0.5, ("avx2",))
    gpu = {"name": "H200", "memory.total": "1 MiB", "driver_version": "1", "compute_cap": "9.0"}
    monkeypatch.setattr(machine, "cpu", lambda: old)
    monkeypatch.setattr(machine, "gpus", lambda: [gpu])
    monkeypatch.setattr(native, "INTERFACE_VERSION", -1)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    native.core.cache_clear()
    try:
        found = facts(capsys, "--device", "cpu")
    finally:
        native.core.cache_clear()
    shown = problems(found)
    assert found["status"] == 0
    assert "no AVX-512" in shown and "does not multiply bfloat16" in shown
    assert "built from other sources" in shown and "install g++" in shown
    assert "HF_HUB_OFFLINE is set" in shown
    assert found["gpu"]["0"]["name"] == "H200"
    if not found["torch"]["gpus"]:
        assert "there is a GPU, but this torch" in shown
    if found["torch"]["threads"] > 1:
        assert "set OMP_NUM_THREADS=1" in shown
    assert found["model"]["attention"] == "torch"


def test_missing_package_fails_the_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "dependencies", lambda: {"torch": None, "numpy": "2.0"})
    found = facts(capsys)
    assert found["status"] == 1
    assert "not installed: torch" in problems(found) and "pip install torch" in problems(found)
    assert "model" not in found
    status, out, _ = run(capsys, "doctor")
    assert status == 1 and "! not installed: torch" in out


def test_low_limit_of_open_files_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (256, 256))
    assert "only 256 files may be open: run: ulimit -n" in problems(facts(capsys))


def test_cpu_quota_of_a_control_group_is_read(tmp_path: Path) -> None:
    assert machine.cpu_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert machine.cpu_quota(tmp_path) is None
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("50000\n")
    assert machine.cpu_quota(tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert machine.cpu_quota(tmp_path) == 2.5


def test_memory_limit_of_a_control_group_is_read(tmp_path: Path) -> None:
    whole = machine.memory_bytes(tmp_path)
    assert whole > 1 << 20
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory_bytes(tmp_path) == whole
    (tmp_path / "memory.max").write_text("5000\n")
    assert machine.memory_bytes(tmp_path) == 5000


def test_gpus_are_read_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpus() == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.1, 9.0'\n")
    tool.chmod(0o755)
    assert machine.gpus() == [
        {
            "name": "NVIDIA H200",
            "memory.total": "143771 MiB",
            "driver_version": "570.1",
            "compute_cap": "9.0",
        }
    ]
