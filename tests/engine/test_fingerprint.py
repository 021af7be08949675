"""What makes cached blocks another engine's: its model and all that changes their bits."""

import dataclasses
from typing import Any

import pytest

from quire.base.config import config_from_flat
from quire.engine.build import make_scheduler
from quire.models.source import resolve_model
from quire.runner.build import BuiltRunner, build_runner
from tests.serve.checkpoints import checkpoint


@pytest.fixture(scope="module")
def built() -> BuiltRunner:
    path = str(checkpoint("llama"))
    settings = {"dtype": "float32", "max_model_len": 32, "kv_cache_memory_bytes": 1 << 20}
    return build_runner(config_from_flat(model=path, **settings), resolve_model(path))


def fingerprint(built: BuiltRunner, **changes: Any) -> bytes:
    source = resolve_model(str(checkpoint("llama")))
    return make_scheduler(dataclasses.replace(built, **changes), source).fingerprint


def test_what_changes_the_bits_of_blocks_changes_their_names(built: BuiltRunner) -> None:
    fixed = dataclasses.replace(built.config, deterministic=True)
    int8 = dataclasses.replace(built.config.cache, kv_cache_dtype="int8")
    found = [
        fingerprint(built),
        fingerprint(built, config=fixed),
        fingerprint(built, config=dataclasses.replace(built.config, cache=int8)),
        fingerprint(built, kv_scales={0: (0.5, 1.0)}),
        fingerprint(built, kv_scales={0: (1.0, 0.5)}),
        fingerprint(built, backend_name="another"),
    ]
    assert len(set(found)) == len(found)


def test_what_does_not_leaves_them(built: BuiltRunner) -> None:
    eager = dataclasses.replace(built.config, enforce_eager=True, compilation="piecewise")
    assert fingerprint(built, config=eager) == fingerprint(built)
