"""Starting a Python module as a child that dies with this process."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping

import msgspec

from quire.base.settings.secrets import KEY_VARIABLES, reveal_secret

KILL_S = 5.0  # for a killed child to end
# How long OpenMP's threads spin before they sleep (GNU's default is thirty times as long): the core
# shares its processors with the API process. Measured: no slower alone, and not starved in company.
SPIN_COUNT = "10000"


def start_child(
    module: str,
    arguments: list[str],
    config: object,
    fds: tuple[int, ...],
    log_level: str,
    environment: dict[str, str] | None = None,
    stderr: int | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a module as a child (engine/wire/child.py), tied to the calling thread.

    config: sent as JSON on its standard input, the one place where secrets are in the clear. fds:
    descriptors that it inherits. stderr: as `Popen` takes it.

    It is in a process group of its own, so that Ctrl-C reaches only this process.
    """
    command = [sys.executable, "-P", "-m", "quire.engine.wire.child", str(os.getpid()), module]
    process = subprocess.Popen(
        [*command, *arguments, "--log-level", log_level],
        stdin=subprocess.PIPE,
        stderr=stderr,
        pass_fds=fds,
        process_group=0,
        env=_without_keys(environment),
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has died; its exit status says so
        process.stdin.write(msgspec.json.encode(config, enc_hook=reveal_secret))
        process.stdin.close()
    return process


def spin_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a child that computes gets for OpenMP, unless the environment sets it."""
    is_set = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environment.keys()
    return {} if is_set else {"GOMP_SPINCOUNT": SPIN_COUNT}


def end_child(process: "subprocess.Popen[bytes]", wait_s: float) -> None:
    """Wait for a child to end by itself, then kill it."""
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it
            process.wait(KILL_S)


def _without_keys(environment: dict[str, str] | None) -> dict[str, str]:
    """Return a child's environment without the API keys, which it gets with its configuration."""
    given = os.environ if environment is None else environment
    return {name: value for name, value in given.items() if name not in KEY_VARIABLES}
