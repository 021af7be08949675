"""Start of a Python module as a child process, which dies with its parent."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping

import msgspec

from quire.base.settings.secrets import KEY_VARIABLES, reveal_secret

KILL_S = 5.0  # wait for a killed child to end
# Spins of OpenMP's threads before they sleep; GNU's default is thirty times as many. The core
# shares its processors with the API process. Measured: no slower alone, not starved in company.
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
    """Start a module as a child (engine/wire/child.py) that dies with the calling thread. It has
    its own process group, so that Ctrl-C reaches only this process.

    Args:
        config: Sent as JSON to the child's standard input, the only place with unmasked secrets.
        fds: File descriptors that the child inherits.
        environment: The child's environment; None: this process's. API keys are removed.
        stderr: As in `Popen`.
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
    with contextlib.suppress(BrokenPipeError):  # the child has died; its exit status shows it
        process.stdin.write(msgspec.json.encode(config, enc_hook=reveal_secret))
        process.stdin.close()
    return process


def spin_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the OpenMP variables of a computing child; none if the environment sets them."""
    is_set = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environment.keys()
    return {} if is_set else {"GOMP_SPINCOUNT": SPIN_COUNT}


def end_child(process: "subprocess.Popen[bytes]", wait_s: float) -> None:
    """Wait up to wait_s for a child to end by itself, then kill it."""
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a device driver may block its end
            process.wait(KILL_S)


def _without_keys(environment: dict[str, str] | None) -> dict[str, str]:
    """Return a child's environment without API keys, which its configuration contains."""
    given = os.environ if environment is None else environment
    return {name: value for name, value in given.items() if name not in KEY_VARIABLES}
