"""Set up all tests: one thread per process, compiled modules, and a terminal's signals.

The models here are tiny. Threads that wait for each other on a busy machine make their tests ten
times slower. Tests start hundreds of processes. Each would compile all modules that it imports if
Python is set to write no bytecode. Engines keep their caches in a directory of the test run. A test
run that is started in the background (`&`, nohup) ignores SIGINT or SIGHUP, and its processes
would, too.
"""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
import time

import pytest

BEGAN_S = time.monotonic()

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if "QUIRE_TEST_CACHE" not in os.environ:  # the first process of the run
    os.environ["QUIRE_TEST_CACHE"] = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp("-quire-cache")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

for _number, _default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _default)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shard", metavar="K/N", help="only each Nth test, from the Kth (1 to N): for N processes"
    )

    parser.addoption(
        "--most-s", type=float, metavar="SECONDS", help="skip the tests that are left after so long"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the workers of `-n auto`: one more than cores, as tests also wait for servers."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_runtest_setup(item: pytest.Item) -> None:
    most_s = item.config.getoption("--most-s")
    if most_s is not None and time.monotonic() - BEGAN_S > most_s:
        pytest.skip(f"the {most_s:.0f} s of this run are over")


def pytest_collection() -> None:
    """Turn garbage collection off while modules are imported and thousands of tests are made: it
    would look through them again and again."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Let no garbage collection look through all tests again, and seldom through what they keep:
    modules, models, checkpoints. The end of the process frees everything: nanobind reports what is
    left."""
    gc.freeze()
    atexit.register(gc.unfreeze)
    gc.enable()
    gc.set_threshold(700, 10, 100)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Neighbours go to different processes: they take alike long. All that is asked for is run by
    exactly one of them."""
    given = config.getoption("--shard")
    if not given:
        return
    number, _, count = given.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--shard is K/N with K from 1 to N, such as 2/8, got {given!r}.")
    mine = items[int(number) - 1 :: int(count)]
    kept = set(mine)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = mine
