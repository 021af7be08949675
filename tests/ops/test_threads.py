"""The core's threads: their number, and calls from several threads and processes."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from quire.base.errors import ConfigError
from quire.ops.host import threads
from quire.ops.host.native import core
from quire.ops.linear import linear
from quire.ops.weights.pack import pack


@pytest.fixture
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_chosen", None)


def fake_machine(
    monkeypatch: pytest.MonkeyPatch, path: Path, siblings: list[str], quota: str
) -> None:
    monkeypatch.setattr(threads, "TOPOLOGY", path)
    monkeypatch.setattr(threads, "CGROUP", path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(len(siblings))), raising=False)
    (path / "cpu.max").write_text(quota)
    for cpu, names in enumerate(siblings):
        place = path / f"cpu{cpu}" / "topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(names)


@pytest.mark.parametrize(
    ("siblings", "quota", "wanted"),
    [
        (["0", "1", "2", "3"], "max 100000", 4),
        (["0,2", "1,3", "0,2", "1,3"], "max 100000", 2),
        (["0", "1", "2", "3"], "150000 100000", 2),
        (["0", "1"], "1000 100000", 1),
    ],
)
def test_number_of_threads_is_that_of_available_cores(
    siblings: list[str],
    quota: str,
    wanted: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plain_environment: None,
) -> None:
    fake_machine(monkeypatch, tmp_path, siblings, quota)
    assert threads.num_threads() == wanted


def test_environment_variables_set_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, plain_environment: None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7,2")
    assert threads.num_threads() == 7
    monkeypatch.setenv("QUIRE_NUM_THREADS", "3")
    assert threads.num_threads() == 7  # chosen once
    threads.set_num_threads(None)
    assert threads.num_threads() == 3


@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_invalid_numbers_of_threads_are_rejected(
    text: str, monkeypatch: pytest.MonkeyPatch, plain_environment: None
) -> None:
    monkeypatch.setenv("QUIRE_NUM_THREADS", text)
    with pytest.raises(ConfigError, match="QUIRE_NUM_THREADS"):
        threads.num_threads()
    with pytest.raises(ConfigError, match="at least 1"):
        threads.set_num_threads(0)


@pytest.fixture
def product() -> tuple[torch.Tensor, object, torch.Tensor]:
    if core() is None:
        pytest.skip("the C++ core was not built")
    generator = torch.Generator().manual_seed(0)
    weight = pack(torch.randn(300, 260, generator=generator), None)
    x = torch.randn(9, 260, generator=generator)
    return x, weight, linear(x, weight)


def test_calls_from_several_threads_do_not_interfere(
    product: tuple[torch.Tensor, object, torch.Tensor],
) -> None:
    x, weight, wanted = product
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: linear(x, weight), range(400)):
            assert torch.equal(found, wanted)


def test_forked_process_has_its_own_threads(
    product: tuple[torch.Tensor, object, torch.Tensor],
) -> None:
    x, weight, wanted = product
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(linear(x, weight), wanted) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_late_threads_never_work_on_another_phase(tmp_path: Path) -> None:
    """The program runs short phases on more threads than cores."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    root = Path(__file__).parents[2]
    program = tmp_path / "check"
    sources = [root / "tests" / "csrc" / "check_parallel.cpp", root / "csrc" / "parallel.cpp"]
    flags = ["-std=c++17", "-O2", f"-I{root / 'csrc'}", "-pthread", "-o", str(program)]
    subprocess.run([compiler, *flags, *map(str, sources)], check=True)
    done = subprocess.run([str(program), "100000"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "parallel: 100000 phases, 0 wrong\n")
