"""The identity of cached blocks: the model and every setting that changes their bits."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.base.settings.config import config_from_flat
from quire.engine.connectors import identity
from quire.engine.start.build import make_scheduler
from quire.models.checkpoint.source import resolve_model
from quire.ops.weights.formats import variants
from quire.runner.build import build_runner
from quire.runner.setup.built import BuiltRunner
from tests.support.kernels.kernel_speeds import keep_figures, own_figures
from tests.support.models.reference_checkpoints import checkpoint


@pytest.fixture(scope="module")
def built() -> BuiltRunner:
    path = str(checkpoint("llama"))
    settings = {"dtype": "float32", "max_model_len": 32, "kv_cache_memory_bytes": 1 << 20}
    return build_runner(config_from_flat(model=path, **settings), resolve_model(path))


def fingerprint(built: BuiltRunner, **changes: Any) -> bytes:
    source = resolve_model(str(checkpoint("llama")))
    return make_scheduler(dataclasses.replace(built, **changes), source).memory.names.fingerprint


def test_settings_that_change_bits_change_the_fingerprint(built: BuiltRunner) -> None:
    fixed = dataclasses.replace(built.config, deterministic=True)
    hashed = dataclasses.replace(built.config.cache, prefix_caching_hash_algo="blake2b")
    int8 = dataclasses.replace(built.config.cache, kv_cache_dtype="int8")
    found = [
        fingerprint(built),
        fingerprint(built, config=fixed),
        fingerprint(built, config=dataclasses.replace(built.config, cache=int8)),
        fingerprint(built, config=dataclasses.replace(built.config, cache=hashed)),
        fingerprint(built, kv_scales={0: (0.5, 1.0)}),
        fingerprint(built, kv_scales={0: (1.0, 0.5)}),
        fingerprint(built, backend_name="another"),
    ]
    assert len(set(found)) == len(found)


@pytest.mark.skipif(len(variants()) < 2, reason="this CPU runs one instruction set")
def test_instruction_set_of_floats_changes_the_fingerprint(
    built: BuiltRunner, tmp_path: Path
) -> None:
    """Instruction sets round differently, except for integers."""
    found = []
    with own_figures(tmp_path):
        for faster in ({}, {"float32": variants()[0]}, {"int8": variants()[0]}):
            keep_figures(faster)
            found.append(fingerprint(built))
    assert found[0] == found[2] != found[1]


def test_settings_that_keep_bits_keep_the_fingerprint(built: BuiltRunner) -> None:
    eager = dataclasses.replace(built.config, enforce_eager=True, compilation="piecewise")
    assert fingerprint(built, config=eager) == fingerprint(built)
    lfu = dataclasses.replace(
        built.config.cache, eviction_policy="lfu", prefix_caching_hash_algo="sha256_cbor"
    )
    config = dataclasses.replace(built.config, cache=lfu)
    assert fingerprint(built, config=config) == fingerprint(built)


def test_layout_version_is_part_of_the_gpu_int8_fingerprint(
    built: BuiltRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    int8 = dataclasses.replace(built.config.cache, kv_cache_dtype="int8")
    config = dataclasses.replace(built.config, cache=int8)

    def found() -> list[bytes]:
        return [
            fingerprint(built, device=torch.device("cuda")),
            fingerprint(built, device=torch.device("cuda"), config=config),
        ]

    before = found()
    monkeypatch.setattr(identity, "GPU_INT8_LAYOUT", 99)
    after = found()
    assert before[0] == after[0] and before[1] != after[1]
