"""Compile kernels in parallel and launch them, on a driver that notes launches and runs none.

    python -m tests.support.kernels.compiled_launches

Prints JSON: how many kernels were compiled and launched within `compiling` and after it, and by
which threads. A process of its own, since kernels that are interpreted cannot be compiled. Nothing
needs a GPU.
"""

import hashlib
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import driver

from quire.ops.kernels import gate, norm
from quire.ops.kernels.launch import compiling

# Sizes of the grid, stream, number of the machine code, two options, facts, arguments.
Launch = tuple[Any, ...]
COUNTS: Counter[str] = Counter()
THREADS: set[str] = set()


class _Utils:
    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        number = int.from_bytes(hashlib.sha256(kernel).digest()[:6])
        return 1, number, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10, "multiprocessor_count": 132}


class StubDriver(DriverBase):
    """Driver of one device. launches: what has been launched."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)
        self.launches: list[Launch] = []
        self.utils, launches = _Utils(), self.launches

        class Launcher(CudaLauncher):
            """Triton's launcher, up to its call into the driver."""

            def __init__(self, src: Any, metadata: Any) -> None:
                self.num_ctas = metadata.num_ctas
                self.global_scratch_size = metadata.global_scratch_size
                self.global_scratch_align = metadata.global_scratch_align
                self.profile_scratch_size = metadata.profile_scratch_size
                self.profile_scratch_align = metadata.profile_scratch_align
                self.launch_cooperative_grid = metadata.launch_cooperative_grid
                self.launch_pdl = metadata.launch_pdl

            def launch(self, *given: Any) -> None:
                scratch, hooks, arguments = given[7:9], given[10:13], given[13:]
                assert scratch == (None, None) and len(hooks) == 3
                launches.append((*given[:7], given[9], *arguments))

        self.launcher_cls = Launcher

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 5


def use(capability: int = 90) -> StubDriver:
    """Install a new driver and return it."""
    made = StubDriver(capability)
    driver.set_active(made)
    return made


def launch_all() -> None:
    """Some launches, of which some are of the same compiled kernel."""
    for dtype in (torch.float32, torch.bfloat16):
        for num_rows in (2, 3, 16, 17):
            x = torch.zeros(num_rows, 64, dtype=dtype)
            norm.rms_norm(x, torch.ones(64, dtype=dtype), 1e-6)
            gate.silu_mul(x)


def main() -> None:
    made = use()
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
    assert not made.launches
    COUNTS.clear()
    launch_all()
    found["after"] = dict(COUNTS) | {"launched": len(made.launches)}
    found["threads"] = sorted({name.partition("_")[0] for name in THREADS})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
