"""Programs that compile kernels, each a process of its own, since kernels that are interpreted
cannot be compiled."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

CPU_S = 1200  # of a program; its compilers' processes are counted apart


def compiled(program: str, *arguments: str, cpu_s: int = CPU_S) -> Any:
    """Return the JSON that `tests.support.kernels.PROGRAM` prints. It may take so much CPU time, so
    that a busy machine stops no program."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", f"tests.support.kernels.{program}", *arguments],
        env=environment, capture_output=True, text=True, preexec_fn=_limit_to(cpu_s),
    )  # fmt: skip
    assert run.returncode == 0, f"{program} ended with {run.returncode}: {run.stderr[-2000:]}"
    return json.loads(run.stdout.splitlines()[-1])


def _limit_to(cpu_s: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
