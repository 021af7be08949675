"""Settings for several devices: conflicting ones are rejected."""

from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.base.settings.parallel import ParallelConfig

RAY = {"distributed_executor_backend": "ray"}
NODES = {"nnodes": 2, "master_addr": "127.0.0.1"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1, got 0"),
        (
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 3},
            "decode_context_parallel_size=3 must divide tensor_parallel_size=4",
        ),
        ({"ray_address": "a:1"}, "ray_address='a:1' needs Ray; add distributed_executor"),
        (RAY | {"node_wait_s": 0.0}, "node_wait_s must be a positive number of seconds, got 0.0"),
        (RAY | {"node_wait_s": float("inf")}, "node_wait_s must be a positive number"),
        ({"tensor_parallel_size": 3} | NODES, "nnodes=2 must divide the 3 ranks of tensor_par"),
        (NODES | {"tensor_parallel_size": 2, "master_addr": None}, "nnodes=2 needs master_addr"),
        (NODES | {"tensor_parallel_size": 2, "node_rank": 2}, "node_rank must be from 0 to nno"),
        (NODES | {"tensor_parallel_size": 2, "master_port": 0}, "master_port must be from 1"),
        (
            NODES | {"tensor_parallel_size": 2, "data_parallel_size": 2},
            "data_parallel_size=2 with nnodes=2 is not supported",
        ),
        (NODES | RAY | {"tensor_parallel_size": 2}, "nnodes=2 is for ranks without Ray"),
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "uni"},
            "distributed_executor_backend=uni is for one rank",
        ),
    ],
)
def test_conflicting_settings_are_rejected_with_their_values(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**settings)


def test_several_ranks_or_an_explicit_backend_need_rank_processes() -> None:
    assert not ParallelConfig().has_rank_processes
    for settings in (RAY, {"distributed_executor_backend": "mp"}, {"pipeline_parallel_size": 2}):
        assert ParallelConfig(**settings).has_rank_processes
    config = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    assert (config.num_ranks, config.answering_rank) == (6, 4)
