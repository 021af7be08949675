"""Start ranks from settings, and let them load a model together.

The core starts the ranks before anything else: they import modules while it resolves the model.
"""

import ctypes
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import SimpleQueue

from quire.base import errors
from quire.base.errors import ConfigError, EngineError, QuireError, RankLost
from quire.base.settings.config import EngineConfig
from quire.base.settings.parallel import ParallelConfig
from quire.engine.executors.loaded import LoadedElsewhere
from quire.engine.observability.heartbeat import expected_step_s
from quire.engine.ranks.consistency import different, facts_of
from quire.engine.ranks.executor import RankExecutor
from quire.engine.ranks.messages import (
    Beat,
    Begin,
    Failed,
    FromRank,
    Joined,
    Loaded,
    Loading,
    PoolMinimum,
)
from quire.engine.ranks.node import Node, NodeStarter
from quire.engine.ranks.processes import RankProcesses, RankStart
from quire.engine.ranks.rank_set import Listener, RankSet
from quire.engine.ranks.ray.starter import RayStarter
from quire.engine.ranks.remote import RankStarter, RemoteRanks
from quire.engine.wire.spawn import spin_settings
from quire.models.checkpoint.source import ModelSource
from quire.ops.host.threads import share_cores

logger = logging.getLogger("quire")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class LoadedRanks:
    """Ranks with a loaded model. model: as the answering rank reports it, with a `spec` of all
    stages and the copy rate of all ranks. executor: runs plans on all ranks."""

    model: LoadedElsewhere
    executor: RankExecutor


class Ranks:
    """Ranks of one core, from their start to `load`."""

    def __init__(self, config: EngineConfig, starter: RankStarter | None = None) -> None:
        """Start the ranks. starter: starts them on other machines; None: as the settings say.
        Raises ConfigError for more ranks than devices, and on machines other than machine 0."""
        self._num = config.parallel.num_ranks
        self._received = _MessageQueue()
        self._unread = [deque[FromRank]() for _ in range(self._num)]  # unread messages by rank
        level = logging.getLevelName(logger.getEffectiveLevel()).lower()
        if starter is None and config.parallel.distributed_executor_backend == "ray":
            starter = RayStarter(config, level)
        elif starter is None and config.parallel.nnodes > 1:
            if (number := config.parallel.node_rank) > 0:
                raise ConfigError(
                    f"node_rank={number} only runs ranks, through `quire serve`; engines and"
                    " servers are on machine 0."
                )
            devices = cuda_devices(config, config.parallel.num_ranks // config.parallel.nnodes)
            starter = NodeStarter(Node.of(config, devices), level)
        if starter is None:
            self._processes = _start_here(config, level, self._received)
        else:
            self._processes = RankSet(RemoteRanks(config, starter, level), self._received)

    def load(
        self, config: EngineConfig, source: ModelSource, progress: Progress | None
    ) -> LoadedRanks:
        """Let the ranks load the model. If one fails, end all ranks and raise its error."""
        try:
            return self._load(config, source, progress)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._processes.close()

    def _load(
        self, config: EngineConfig, source: ModelSource, progress: Progress | None
    ) -> LoadedRanks:
        num, shares = self._num, self._processes.shares()
        begins = [Begin(config, source, rank, *share) for rank, share in enumerate(shares)]
        self._processes.link.send_each(begins)
        self._compare(facts_of(config, source), self._from_each(Joined, progress))
        while True:
            found = self._from_each((PoolMinimum, Loaded), progress)
            if all(isinstance(each, Loaded) for each in found):
                break
            values = [each.values for each in found if isinstance(each, PoolMinimum)]
            self._processes.link.send(
                PoolMinimum(tuple(map(min, *values)) if num > 1 else values[0])
            )
        models = [each.model for each in found if isinstance(each, Loaded)]
        return self._loaded(config, models)

    def _loaded(self, config: EngineConfig, models: list[LoadedElsewhere]) -> LoadedRanks:
        num_stages, answering = (
            config.parallel.pipeline_parallel_size,
            config.parallel.answering_rank,
        )
        # All ranks copy their layers' part of a block at once. Ranks without blocks have rate 0.
        rates = [each.copy_bytes_per_s for each in models if each.copy_bytes_per_s > 0]
        rate = num_stages * min(rates, default=0.0)
        spec = replace(models[answering].spec, stage=0, num_stages=1)
        model = replace(models[answering], spec=spec, copy_bytes_per_s=rate)
        processes = self._processes
        executor = RankExecutor(
            processes,
            self._num,
            rate,
            num_stages=num_stages,
            idles=model.is_async,
            expected_s=max(map(_expected_step_s, models)),
        )
        if self._num > 1 and not config.disable_log_stats:
            for rank, each in enumerate(models):
                logger.info("rank %d: %s", rank, each.memory.describe())
        processes.link.set_listener(executor.steps)
        return LoadedRanks(model, executor)

    def _from_each(
        self, kinds: type | tuple[type, ...], progress: Progress | None
    ) -> list[FromRank]:
        """Return the next message of each rank; wait for them. Loading reports go to `progress`.
        Raises the error that a rank reports. kinds: expected types of the messages."""
        unread = self._unread
        while not all(unread):
            rank, message = self._received.messages.get()
            if isinstance(message, RankLost):
                raise message
            if isinstance(message, Failed):
                raise self._failure(rank, message)
            if isinstance(message, Loading):
                if rank == 0 and progress is not None:
                    progress(message.done, message.total)
                continue
            unread[rank].append(message)
        found = [messages.popleft() for messages in unread]
        assert all(isinstance(message, kinds) for message in found), found
        return found

    def _failure(self, rank: int, failed: Failed) -> QuireError:
        """Return a rank's error, as the class that the rank raised."""
        where = f" (on rank {rank} of {self._num})" if self._num > 1 else ""
        kind = getattr(errors, failed.kind, EngineError)
        known = isinstance(kind, type) and issubclass(kind, QuireError)
        return (kind if known else EngineError)(failed.message + where)

    def _compare(self, here: dict[str, str], joined: list[FromRank]) -> None:
        for rank, message in enumerate(joined):
            assert isinstance(message, Joined)
            if wrong := different(here, message.facts):
                raise ConfigError(
                    f"rank {rank} of {self._num} has another {wrong} than this process; start all"
                    " with the same version, settings and files."
                )


def _expected_step_s(model: LoadedElsewhere) -> float:
    return expected_step_s(model.config, model.device_type, model.memory.weights_bytes)


class _MessageQueue:
    """Queue of the ranks' messages during loading, filled by the thread that watches the ranks."""

    def __init__(self) -> None:
        self.messages: SimpleQueue[tuple[int, FromRank | RankLost]] = SimpleQueue()

    def hear(self, rank: int, message: FromRank) -> None:
        if not isinstance(message, Beat):  # from ranks that have loaded already
            self.messages.put((rank, message))

    def lose(self, error: RankLost) -> None:
        self.messages.put((-1, error))

    def tick(self) -> None:
        pass


@dataclass(frozen=True)
class StageSockets:
    """A rank's sockets. before: receives rows from the previous stage; None in the first stage.
    next_stage: sends rows to the next stage; None in the last stage."""

    before: socket.socket | None
    next_stage: socket.socket | None

    @property
    def arguments(self) -> list[str]:
        """Command-line arguments that give the rank its sockets."""
        ends = {"--before": self.before, "--next-stage": self.next_stage}
        return [
            part
            for name, end in ends.items()
            if end is not None
            for part in (name, str(end.fileno()))
        ]

    @property
    def fds(self) -> tuple[int, ...]:
        return tuple(end.fileno() for end in (self.before, self.next_stage) if end is not None)

    def close(self) -> None:
        for end in (self.before, self.next_stage):
            if end is not None:
                end.close()


def stage_sockets(parallel: ParallelConfig) -> list[StageSockets]:
    """Connect each rank with the rank of the same index in the next stage."""
    num, in_stage = parallel.num_ranks, parallel.tensor_parallel_size
    pairs = [socket.socketpair() for _ in range(num - in_stage)]
    none: list[socket.socket | None] = [None] * in_stage
    before = [*none, *(after for _, after in pairs)]
    next_stage = [*(first for first, _ in pairs), *none]
    return [StageSockets(*ends) for ends in zip(before, next_stage, strict=True)]


def _start_here(config: EngineConfig, log_level: str, listener: Listener) -> RankSet:
    """Start the ranks as child processes of this process."""
    group_fds = [
        os.memfd_create(f"quire-stage-{stage}")
        for stage in range(config.parallel.pipeline_parallel_size)
    ]
    links = stage_sockets(config.parallel)
    try:
        ranks = RankSet(RankProcesses(_starts(config, group_fds, links), log_level), listener)
        ranks.wait()  # until the children have inherited their descriptors
        return ranks
    finally:
        for fd in group_fds:
            os.close(fd)
        for each in links:
            each.close()


def _starts(
    config: EngineConfig, group_fds: list[int], links: list[StageSockets]
) -> list[RankStart]:
    num, in_group = config.parallel.num_ranks, config.parallel.tensor_parallel_size
    environment = {**os.environ, **spin_settings(os.environ)}
    devices = cuda_devices(config, num)
    cores = share_cores(num) if not devices and num > 1 else [None] * num
    starts = []
    for rank in range(num):
        fd = group_fds[rank // in_group]
        more = {"CUDA_VISIBLE_DEVICES": devices[rank]} if devices else {}
        arguments = ["--group", str(fd), *links[rank].arguments]
        fds = (fd, *links[rank].fds)
        starts.append(RankStart(arguments, environment | more, cores[rank], fds))
    return starts


def cuda_devices(config: EngineConfig, is_requested: int) -> list[str]:
    """Return the CUDA devices for `is_requested` ranks, one each; an empty list if ranks compute on
    CPUs.
    Raises ConfigError if there are too few devices."""
    if config.device == "cpu" or (config.device == "auto" and not _has_driver()):
        return []
    import torch  # counts GPUs; imported only where there is a driver

    num = torch.cuda.device_count()
    if num == 0 and config.device == "auto":
        return []
    if is_requested > num:
        parallel = config.parallel
        of = "" if parallel.nnodes == 1 else f" on each of {parallel.nnodes} machines"
        raise ConfigError(
            f"tensor_parallel_size={parallel.tensor_parallel_size} x"
            f" pipeline_parallel_size={parallel.pipeline_parallel_size} needs {is_requested} CUDA"
            f" devices{of}, and torch sees {num}; lower them, or use device='cpu'."
        )
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (visible or [str(index) for index in range(num)])[:is_requested]


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
