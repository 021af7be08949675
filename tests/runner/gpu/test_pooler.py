"""Steps of pooling models as graphs: no step is launched kernel by kernel after the warm-up."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, PoolingParams
from quire.ops.kernels.launch import INTERPRETED
from quire.runner import memory_plan
from quire.runner.gpu import graphs, sizes
from quire.runner.steps import PlainStep
from tests.runner.gpu.test_kernel_ops import devices  # noqa: F401 (a fixture)
from tests.support.cases import slow_but
from tests.support.models.checkpoints import random_tokens
from tests.support.models.pooling_checkpoints import pooling_checkpoint
from tests.support.runner.late_device import on_the_host

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="the stand-in's memory is the CPU's"),
    pytest.mark.usefixtures("devices"),
]

IDS = random_tokens(19, 5, 1)
RAW = PoolingParams(use_activation=False)
KINDS = {
    "last token": ("embed", "LAST"),
    "mean": ("embed", "MEAN"),
    "first token": ("embed", "CLS"),
    "classes": ("classify", "LAST"),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counter[str]:
    """Count the steps launched directly, and the steps replayed. One mixed size saves time."""
    counted: Counter[str] = Counter()
    for kind, name in ((graphs.Recorded, "replayed"), (PlainStep, "direct")):
        first = kind.first

        def counting(step: Any, shape: Any, name: str = name, first: Any = first) -> Any:
            counted[name] += 1
            return first(step, shape)

        monkeypatch.setattr(kind, "first", counting)
    for place, name in (
        (sizes, "MIXED_TOKENS"), (sizes, "WARM_TOKENS"), (sizes, "WARM_TOKENS_OF_ALL"),
        (memory_plan, "MIXED_TOKENS"),
    ):  # fmt: skip
        monkeypatch.setattr(place, name, (16,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return counted


def pooled(model: str, kind: str, backend: str, **settings: Any) -> list[np.ndarray]:
    """Return the pooled prompts, which are computed in chunks."""
    path = str(pooling_checkpoint(model, num_layers=1))
    with LLM(
        path, dtype="float32", max_num_batched_tokens=16, max_num_seqs=2,
        block_size=4, kv_cache_memory_bytes=1 << 20, disable_log_stats=True, device="cpu",
        attention_backend=backend, pooler_config={"seq_pooling_type": kind}, **settings,
    ) as llm:  # fmt: skip
        prompts = [{"prompt_token_ids": each} for each in IDS]
        return [each.outputs.data for each in llm.encode(prompts, RAW, use_tqdm=False)]


@pytest.mark.parametrize("name", slow_but(KINDS, "mean"))
def test_warm_up_records_every_step_of_pooling(name: str, launched: Counter[str]) -> None:
    model, kind = KINDS[name]
    found = pooled(model, kind, "triton", graph_warmup=True)
    assert launched["direct"] == 0 and launched["replayed"] >= 2
    with on_the_host():
        expected = pooled(model, kind, "torch")
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_graphs_and_direct_launches_give_equal_bits(launched: Counter[str]) -> None:
    """This includes steps with fewer rows and tokens than the graph holds."""
    found = pooled("embed", "MEAN", "triton", graph_warmup=True)
    direct = pooled("embed", "MEAN", "triton", enforce_eager=True)
    assert launched["direct"] > 0
    assert all(np.array_equal(*pair) for pair in zip(found, direct, strict=True))
