"""Tables of `quire fit`: GGUF files of a model, and formats that fit a shorter request."""

from pathlib import Path

import pytest

from quire.base.settings.config import config_from_flat
from quire.models.checkpoint.source import resolve_model
from quire.tools.sizing.alternatives import GGUF_KINDS
from quire.tools.sizing.fit import DoesNotFit, fit
from tests.support.models.checkpoints import write_checkpoint
from tests.support.models.gguf_writer import Q8_0, convert
from tests.tools.test_fit import GIB, SOME_BYTES, fitted, on_cpu


def test_predicted_gguf_sizes_equal_real_files(tmp_path: Path) -> None:
    """Compare the predicted sizes with those of real files in the same formats."""
    folder = write_checkpoint(tmp_path / "a", "llama").directory
    plan = fitted(resolve_model(str(folder)), SOME_BYTES, dtype="bfloat16")
    rows = {row.weights: row for row in plan.gguf_files}
    assert list(rows) == [f"GGUF {name}" for name in GGUF_KINDS]
    file = convert(folder, tmp_path / "model.gguf", Q8_0)
    found = fitted(resolve_model(str(file)), SOME_BYTES, dtype="bfloat16")
    assert rows["GGUF Q8_0"].weights_bytes == found.memory.weights_bytes
    assert (
        rows["GGUF Q4_K"].weights_bytes == rows["GGUF Q8_0"].weights_bytes
    )  # rows are not a multiple of the block size
    large = fit(config_from_flat(), resolve_model("shape:qwen3-0.6b"), on_cpu(64 * GIB)).gguf_files
    sizes = [row.weights_bytes for row in large]
    assert sizes[0] > sizes[1] > sizes[2] < sizes[3] and all(row.longest for row in large)
    assert not fit(config_from_flat(), resolve_model("shape:opt-13b"), on_cpu(64 * GIB)).gguf_files


def test_error_lists_formats_that_fit_a_shorter_request() -> None:
    """The error for a maximum length that does not fit lists the lengths that fit."""
    source = resolve_model("shape:llama-3.1-8b")
    with pytest.raises(DoesNotFit) as caught:
        fit(config_from_flat(), source, on_cpu(20 * GIB))
    rows = {(row.weights, row.kv): row for row in caught.value.formats}
    plain, small = rows["bfloat16", "auto"], rows["int4", "int8"]
    assert 4096 < plain.longest < small.longest < 131_072
    assert 0 < plain.usual < small.usual
    for row in (plain, small):
        settings = {"quantization": None if row is plain else "int4", "kv_cache_dtype": row.kv}
        config = config_from_flat(max_model_len=row.longest, **settings)
        assert fit(config, source, on_cpu(20 * GIB)).memory.max_model_len == row.longest
    with pytest.raises(DoesNotFit) as caught:
        fit(config_from_flat(), source, on_cpu(2 * GIB))
    assert not any(row.longest for row in caught.value.formats)
