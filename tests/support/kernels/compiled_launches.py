"""Compile kernels in parallel and launch them, on a driver that accepts all launches.

    python -m tests.support.kernels.compiled_launches

Prints JSON: how many kernels were compiled and launched within `compiling` and after it, and by
which threads. A process of its own, since kernels that are interpreted cannot be compiled. Nothing
needs a GPU.
"""

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from quire.ops.kernels import gate, norm
from quire.ops.kernels.launch import compiling

COUNTS: Counter[str] = Counter()
THREADS: set[str] = set()


class Utils:
    """Loads nothing."""

    def load_binary(self, *_: Any) -> tuple[int, ...]:
        return 1, 7, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448, "multiprocessor_count": 132}


class Launcher:
    """Counts launches."""

    def __init__(self, *_: Any) -> None: ...

    def __call__(self, *_: Any) -> None:
        COUNTS["launched"] += 1


class Driver:
    """A device of compute capability 9.0."""

    utils, launcher_cls = Utils(), Launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 1


def launch_all() -> None:
    """Some launches, of which some are of the same compiled kernel."""
    for dtype in (torch.float32, torch.bfloat16):
        for num_rows in (2, 3, 16, 17):
            x = torch.zeros(num_rows, 64, dtype=dtype)
            norm.rms_norm(x, torch.ones(64, dtype=dtype), 1e-6)
            gate.silu_mul(x)


def main() -> None:
    driver.set_active(Driver())  # type: ignore[arg-type]
    runtime = triton.knobs.runtime
    runtime.jit_post_compile_hook = lambda **_: COUNTS.update(["compiled"])
    compile_ = triton.compiler.compiler.compile

    def noting(*its: Any, **named: Any) -> Any:
        THREADS.add(threading.current_thread().name)
        return compile_(*its, **named)

    triton.compiler.compile = noting
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(2, "compiler") as executor, compiling(executor):
        launch_all()
    found["ahead"] = dict(COUNTS)
    COUNTS.clear()
    launch_all()
    found["after"] = dict(COUNTS)
    found["threads"] = sorted({name.partition("_")[0] for name in THREADS})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
