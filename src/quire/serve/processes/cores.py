"""Division of a machine among several cores (`data_parallel_size`): settings, CPUs, memory and
GPUs. It happens once, so a restarted core gets the same share as before.

Engines of one model may share a directory or store of KV blocks. All cores map packed weights from
one file. Each core has its own `kv_host_gb`.
"""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire.base.errors import ConfigError
from quire.base.settings.config import EngineConfig

CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
DEVICES = Path("/dev")


@dataclass(frozen=True)
class CoreShare:
    """One core's share of the machine."""

    number: int = 0
    num_cores: int = 1
    cpus: frozenset[int] = frozenset()  # CPUs that it may run on; all if empty
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of its process
    model: str = ""  # name of its model on a server with several models

    @property
    def name(self) -> str:
        """The core's name in logs and errors."""
        if self.model:
            return f"the engine of model {self.model}"
        return "the engine" if self.num_cores == 1 else f"core {self.number}"

    def config(self, engine: EngineConfig) -> EngineConfig:
        """Return the settings of this core, with a directory of its own for its recording."""
        if self.num_cores == 1 or engine.record is None:
            return engine
        return dataclasses.replace(engine, record=str(Path(engine.record) / f"core-{self.number}"))

    def bind(self, pid: int) -> None:
        """Bind a process to the core's CPUs, before the process starts threads."""
        if self.cpus:
            with contextlib.suppress(OSError):  # the process has ended, or a container forbids it
                os.sched_setaffinity(pid, self.cpus)


ALONE = CoreShare()


def core_shares(engine: EngineConfig) -> list[CoreShare]:
    """Divide this machine among the cores. Raise ConfigError if there are too few GPUs."""
    num = engine.parallel.data_parallel_size
    if num == 1:
        return [ALONE]
    from quire.ops.host.threads import is_number_given, share_cores, usable_cores
    from quire.runner.memory_plan import MEMORY_VARIABLE, available_cpu_bytes

    shared = {MEMORY_VARIABLE: str(available_cpu_bytes() // num)}
    if not is_number_given():
        num_computing = num * engine.parallel.num_ranks
        shared["QUIRE_NUM_THREADS"] = str(max(1, usable_cores() // num_computing))
    gpus = gpu_shares(engine, os.environ, DEVICES)
    return [
        CoreShare(number, num, cpus, shared | gpus[number])
        for number, cpus in enumerate(share_cores(num))
    ]


def gpu_shares(
    engine: EngineConfig, environment: Mapping[str, str], devices: Path
) -> list[dict[str, str]]:
    """Return for each core the variables that select its GPUs, one per rank on this machine. There
    are none on a machine without GPUs, or with Ray, which assigns GPUs itself. Raise ConfigError if
    there are too few GPUs."""
    parallel = engine.parallel
    num = parallel.data_parallel_size
    given = environment.get(CUDA_VARIABLE)
    if given is None:
        gpus = [str(i) for i in range(len(list(devices.glob("nvidia[0-9]*"))))]
    else:
        gpus = [name.strip() for name in given.split(",") if name.strip() not in ("", "-1")]
    if engine.device == "cpu" or not gpus or parallel.distributed_executor_backend == "ray":
        return [{} for _ in range(num)]
    each = -(-parallel.num_ranks // parallel.nnodes)
    if len(gpus) < num * each:
        raise ConfigError(
            f"data_parallel_size={num} with {each} devices for each core needs {num * each} GPUs,"
            f" but only {len(gpus)} are visible; lower it, or use device=cpu."
        )
    return [{CUDA_VARIABLE: ",".join(gpus[i * each : (i + 1) * each])} for i in range(num)]
