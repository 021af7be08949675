"""Media on a device that runs everything late, and replays steps of text as graphs."""

import pytest

from quire.ops.kernels.launch import INTERPRETED
from tests.runner.gpu.test_kernel_ops import devices  # noqa: F401 (a fixture)
from tests.support.runner.late_device import LateDevice, on_the_host
from tests.support.runner.media_engine import Engine, Found

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the stand-in's memory is the CPU's")

DEPTH = 5
SETTINGS = {"dtype": "float32", "max_num_seqs": 2, "pipeline_depth": DEPTH}


def answers(backend: str) -> tuple[Engine, dict[tuple[str, int], list[int]]]:
    engine = Engine(attention_backend=backend, **SETTINGS)
    for name in ("one", "two"):
        engine.add(name, max_tokens=4)
    found = engine.drive(DEPTH)
    num_replays = sum(graph.num_replays for graph in graphs_of(engine))
    assert num_replays == 0, "no graph holds the rows' items"
    engine.add("text", max_tokens=6)
    found |= engine.drive(DEPTH)
    return engine, tokens_of(found)


def graphs_of(engine: Engine) -> list:
    device = engine.runner.device
    return device.graphs if isinstance(device, LateDevice) else []


def tokens_of(found: Found) -> dict[tuple[str, int], list[int]]:
    return {key: [token for token, _ in pairs] for key, pairs in found.items()}


def test_items_are_encoded_and_read_long_after_their_step_is_planned(
    devices: list[LateDevice],  # noqa: F811
) -> None:
    engine, found = answers("triton")
    assert devices[-1].most_waiting >= DEPTH
    assert sum(graph.num_replays for graph in graphs_of(engine)) > 0, "text is replayed"
    with on_the_host():
        assert found == answers("torch")[1]
