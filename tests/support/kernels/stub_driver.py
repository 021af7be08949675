"""A driver for Triton that launches nothing: kernels are compiled for Hopper, and launches noted.

`use` installs it for the process, which must not run Triton's interpreter.
"""

import hashlib
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

Launch = tuple[Any, ...]  # sizes of the grid, stream, number of the machine code, arguments


class _Utils:
    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        number = int.from_bytes(hashlib.sha256(kernel).digest()[:6])
        return 1, number, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10, "multiprocessor_count": 132}


class StubDriver(DriverBase):
    """Driver of one device. launches: what has been launched."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.utils, launches = _Utils(), self.launches

        class Launcher:
            def __init__(self, src: Any, metadata: Any) -> None: ...

            def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any):
                launches.append((x, y, z, stream, function, *rest[4:]))

        self.launcher_cls = Launcher

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 5


def use() -> StubDriver:
    """Install a new driver and return it."""
    made = StubDriver()
    driver.set_active(made)
    return made
