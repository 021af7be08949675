"""docs/use/model-table.md is true for every architecture and feature. See `matrix.py`."""

from pathlib import Path
from typing import Any

import pytest

from quire.models.registry import MODELS
from quire.ops.host.native import core
from tests.models.matrix import (
    FEATURES,
    TinyCheckpoint,
    demo_losses,
    read_losses,
    read_page,
    result,
    write_tiny,
)

TESTED_ELSEWHERE = (  # by tests of the feature alone
    "exact", "reference", "torch", "chunks", "swap", "recompute", "batch", "triton", "int8",
    "int4", "fp8", "kv",
)  # fmt: skip
NEEDS_CORE = ("cpu", "int8", "int4", "fp8", "kv")


def cases() -> list[Any]:
    return [
        pytest.param(
            t,
            name,
            marks=[] if t == feature.quick and name not in TESTED_ELSEWHERE else [pytest.mark.slow],
        )
        for t in sorted(MODELS)
        for name, feature in FEATURES.items()
    ]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyCheckpoint]:
    """Return checkpoints by type, each written at its first use."""
    return {}


@pytest.mark.parametrize(("model_type", "name"), cases())
def test_each_result_matches_the_page(
    model_type: str,
    name: str,
    checkpoints: dict[str, TinyCheckpoint],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if name in NEEDS_CORE and core() is None:
        pytest.skip("the C++ core is not built")
    if model_type not in checkpoints:
        folder: Path = tmp_path_factory.mktemp(model_type)
        checkpoints[model_type] = write_tiny(folder, model_type)
    found = result(checkpoints[model_type], FEATURES[name])
    assert found == read_page()[model_type][name], "run python -m tests.models.matrix"


def test_the_page_lists_all_types_and_features() -> None:
    page = read_page()
    assert list(page) == sorted(MODELS), "run python -m tests.models.matrix"
    for row in page.values():
        assert list(row) == list(FEATURES)
    quick = [feature.quick for feature in FEATURES.values()]
    assert set(quick) <= set(MODELS) and len(set(quick)) == len(quick), "two features share a type"


@pytest.mark.slow
@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
def test_demo_losses_by_format_match_the_page() -> None:
    """The sampled texts differ between runs. The differences between formats hardly do."""
    losses, stated = demo_losses(5_000), read_losses()
    assert stated.keys() == losses.keys()
    for name, more in stated.items():
        assert abs(losses[name] - losses["float32"] - more) < 0.004 + 0.5 * abs(more), name
