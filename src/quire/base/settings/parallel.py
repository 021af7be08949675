"""Settings that spread a model over several devices and machines, with vLLM's names.

    data_parallel_size cores, each with
        pipeline_parallel_size stages, each some of the layers, with
            tensor_parallel_size ranks, each a part of every layer of the stage

A rank is a process with a device of its own. Ranks are numbered stage by stage.
"""

from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.base.settings.fields import setting

BACKENDS = "auto", "uni", "mp", "ray"


@dataclass(frozen=True)
class ParallelConfig:
    """The division of one model among devices."""

    tensor_parallel_size: int = setting(1, "devices that share each layer")
    pipeline_parallel_size: int = setting(
        1, "pipeline stages: parts of the model's layers, each on its own devices"
    )
    data_parallel_size: int = setting(1, "replicas of the model, each with its own scheduler")
    enable_expert_parallel: bool = setting(
        False, "place whole experts on each device, instead of a part of every expert"
    )
    decode_context_parallel_size: int = setting(
        1, "devices of a tensor-parallel group that divide the KV blocks of each sequence"
    )
    distributed_executor_backend: str = setting(
        "auto",
        "how ranks start: `uni` in the engine's process, `mp` on this machine, `ray` on a cluster;"
        " `auto` is `uni` for one rank, else `mp`",
        choices=BACKENDS,
    )
    nnodes: int = setting(1, "number of machines that hold ranks, without Ray")
    node_rank: int = setting(
        0, "number of this machine; machine 0 answers requests, the others hold ranks"
    )
    master_addr: str | None = setting(
        None, "address of machine 0 that the other machines can reach"
    )
    master_port: int = setting(29501, "TCP port of machine 0 for the other machines")
    ray_address: str | None = setting(
        None, "Ray cluster, as HOST:PORT; by default this machine's cluster"
    )
    node_wait_s: float = setting(
        300.0, "how long the start waits for other machines and their devices", unit="seconds"
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
                f"nnodes={self.nnodes} is for ranks without Ray, which finds the machines itself;"
                " remove nnodes, or distributed_executor_backend=ray."
            )
        if self.nnodes > 1:
            self._check_nodes()
        if self.ray_address is not None and self.distributed_executor_backend != "ray":
            raise ConfigError(
                f"ray_address={self.ray_address!r} needs Ray; add distributed_executor_backend=ray,"
                " or remove ray_address."
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
        """Raise ConfigError if the machines cannot share the ranks."""
        if self.num_ranks % self.nnodes:
            raise ConfigError(
                f"nnodes={self.nnodes} must divide the {self.num_ranks} ranks of"
                f" tensor_parallel_size={self.tensor_parallel_size} x pipeline_parallel_size="
                f"{self.pipeline_parallel_size}: every machine holds the same number."
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
        """Return the number of ranks per core."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def answering_rank(self) -> int:
        """Return the rank that reports results of steps: the first of the last stage."""
        return self.num_ranks - self.tensor_parallel_size

    @property
    def has_rank_processes(self) -> bool:
        """Return whether ranks run in other processes than the engine's."""
        backend = self.distributed_executor_backend
        return self.num_ranks > 1 or backend not in ("auto", "uni")
