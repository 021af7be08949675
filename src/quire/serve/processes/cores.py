"""What each of several cores (`data_parallel_size`) gets of a machine: its settings, CPUs, memory
and GPUs. All are dealt out once, so that a core that is started anew gets what it had.

Some things are shared as they are: a directory or store of KV blocks, which engines of one model
may share; packed weights, which all map from one file. `kv_host_gb` is each core's own.
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
class CorePlace:
    """One of num_cores. cpus: that it may run on, all if empty; environment: of its process; model:
    its name where a server has several."""

    number: int = 0
    num_cores: int = 1
    cpus: frozenset[int] = frozenset()
    environment: Mapping[str, str] = field(default_factory=dict)
    model: str = ""

    @property
    def name(self) -> str:
        """What logs and errors call it."""
        if self.model:
            return f"the engine of model {self.model}"
        return "the engine" if self.num_cores == 1 else f"core {self.number}"

    def config(self, engine: EngineConfig) -> EngineConfig:
        """Return the settings of this core: each keeps a record of its own."""
        if self.num_cores == 1 or engine.record is None:
            return engine
        return dataclasses.replace(engine, record=str(Path(engine.record) / f"core-{self.number}"))

    def bind(self, pid: int) -> None:
        """Bind a process that has just been started, before it has threads."""
        if self.cpus:
            with contextlib.suppress(OSError):  # it has ended; or a container forbids it
                os.sched_setaffinity(pid, self.cpus)


ALONE = CorePlace()


def core_places(engine: EngineConfig) -> list[CorePlace]:
    """Deal out this machine among the cores. Raise ConfigError if there are too few GPUs."""
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
        CorePlace(number, num, cpus, shared | gpus[number])
        for number, cpus in enumerate(share_cores(num))
    ]


def gpu_shares(
    engine: EngineConfig, environment: Mapping[str, str], devices: Path
) -> list[dict[str, str]]:
    """Return the variables that show each core its own GPUs, one for each of its ranks on this
    machine; none on a machine without GPUs, or where Ray deals them out. Raise ConfigError if there
    are too few."""
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
