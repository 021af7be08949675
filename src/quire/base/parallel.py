"""How one model is spread over several devices and machines, in vLLM's words.

    data_parallel_size cores, each with
        pipeline_parallel_size stages, each some of the layers, with
            tensor_parallel_size ranks, each a part of every layer of the stage

A rank is a process with a device of its own. Ranks are numbered stage by stage.
"""

from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.base.settings import setting

BACKENDS = "auto", "uni", "mp", "ray"


@dataclass(frozen=True)
class ParallelConfig:
    """One model on many devices."""

    tensor_parallel_size: int = setting(1, "devices that share each layer")
    pipeline_parallel_size: int = setting(1, "stages of consecutive layers, each on its devices")
    data_parallel_size: int = setting(1, "copies of the model, each with a scheduler of its own")
    enable_expert_parallel: bool = setting(
        False, "give each device whole experts of a mixture, instead of a part of each"
    )
    decode_context_parallel_size: int = setting(
        1, "devices, of those that share a layer, among which a sequence's blocks are dealt out"
    )
    distributed_executor_backend: str = setting(
        "auto",
        "who starts the ranks: mp on this machine (and those that join it by nnodes), ray on a"
        " cluster; uni: one, in the engine's process; auto is uni for one rank, else mp",
        choices=BACKENDS,
    )
    nnodes: int = setting(1, "machines that hold ranks, without Ray")
    node_rank: int = setting(0, "which of them this is; 0 serves, others only hold ranks")
    master_addr: str | None = setting(
        None, "address of machine 0 that the others reach it at; nothing listens on a network else"
    )
    master_port: int = setting(29501, "TCP port there")
    ray_address: str | None = setting(
        None, "the Ray cluster, as HOST:PORT; RAY_ADDRESS or the one of this machine if absent"
    )
    node_wait_s: float = setting(
        300.0, "how long the start waits for other machines, or for room on them", unit="s"
    )

    def __post_init__(self) -> None:
        for name in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "decode_context_parallel_size",
            "nnodes",
        ):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be at least 1, got {value!r}.")
        each, whole = self.decode_context_parallel_size, self.tensor_parallel_size
        if whole % each:
            raise ConfigError(
                f"decode_context_parallel_size={each} must divide tensor_parallel_size={whole}."
            )
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(
                f"node_rank must be from 0 to nnodes - 1 = {self.nnodes - 1}, got {self.node_rank}."
            )
        if self.distributed_executor_backend == "ray" and self.nnodes > 1:
            raise ConfigError(
                "distributed_executor_backend=ray finds the machines itself, and"
                f" nnodes={self.nnodes} is for ranks without Ray; remove one of them."
            )
        if self.nnodes > 1:
            self._check_nodes()
        if self.ray_address is not None and self.distributed_executor_backend != "ray":
            raise ConfigError(
                f"ray_address={self.ray_address!r} needs distributed_executor_backend=ray."
            )
        if not 0 < self.node_wait_s < float("inf"):
            raise ConfigError(
                f"node_wait_s must be a positive number of seconds, got {self.node_wait_s!r}."
            )
        if self.num_ranks > 1 and self.distributed_executor_backend == "uni":
            raise ConfigError(
                "distributed_executor_backend=uni is for one rank, but tensor_parallel_size x"
                f" pipeline_parallel_size is {self.num_ranks}; remove it."
            )

    def _check_nodes(self) -> None:
        """Raise ConfigError for machines that cannot share the ranks."""
        if self.num_ranks % self.nnodes:
            raise ConfigError(
                f"nnodes={self.nnodes} must divide the {self.num_ranks} ranks of"
                f" tensor_parallel_size={self.tensor_parallel_size} x"
                f" pipeline_parallel_size={self.pipeline_parallel_size}: all machines have the"
                " same number of ranks."
            )
        if self.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size={self.data_parallel_size} with nnodes={self.nnodes} is not"
                " supported: start one server on each machine, or use Ray."
            )
        if self.master_addr is None:
            raise ConfigError(
                f"nnodes={self.nnodes} needs master_addr: the address of machine 0 in the network"
                " that the machines share."
            )
        if not 0 < self.master_port < 65536:
            raise ConfigError(f"master_port must be from 1 to 65535, got {self.master_port}.")

    @property
    def num_ranks(self) -> int:
        """Return how many ranks compute the model together, for each core."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def answering_rank(self) -> int:
        """Return the rank that tells what steps gave: the first of the last stage."""
        return self.num_ranks - self.tensor_parallel_size

    @property
    def has_rank_processes(self) -> bool:
        """Tell whether the model is computed by other processes than the engine's."""
        backend = self.distributed_executor_backend
        return self.num_ranks > 1 or backend not in ("auto", "uni")
