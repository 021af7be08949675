"""Memory for media: the plan has room for the slots and for encoding; `quire fit` reports both."""

import dataclasses
from typing import Any

import pytest

from quire.base.errors import OutOfMemory
from quire.base.settings.config import config_from_flat
from quire.cli.commands.fit import _lines, as_data
from quire.models.checkpoint.source import resolve_model
from quire.models.load.packing import model_bytes
from quire.runner import build
from quire.runner.derive import derive_config
from quire.runner.memory_plan import largest_item, workspace_of
from quire.runner.setup.preview import preview_runner
from quire.runner.warm.conditions import can_save_start
from quire.spec.media_families import EncoderSize
from quire.spec.model_spec import load_spec
from quire.tools.devices import Device
from quire.tools.sizing.fit import fit
from tests.support.models.reference_checkpoints import checkpoint
from tests.support.runner.media_engine import SETTINGS, WIDTH, Engine, vision_models

FREE = 6 << 20
PER_TOKEN = 5  # numbers of the fake tower
SLOTS = 3000
LENGTH = SETTINGS["max_model_len"]


def config_of(**settings: Any) -> Any:
    given = SETTINGS | {"encoder_cache_tokens": SLOTS, "weight_cache": "off"} | settings
    return config_from_flat(model=str(checkpoint("llama")), **given)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 4), ("float64", 8)])
def test_workspace_holds_slots_and_the_larger_of_step_and_encoding(dtype: str, size: int) -> None:
    spec = load_spec(checkpoint("llama"))
    with vision_models():
        encoder = preview_runner(config_of(), source()).encoder
    assert encoder is not None
    assert encoder == EncoderSize(WIDTH, PER_TOKEN)
    for per_token in (1, 100_000):
        encoder = EncoderSize(WIDTH, per_token)
        config = derive_config(config_of(dtype=dtype), spec, "cpu")
        step, slots = workspace_of(config, spec), SLOTS * WIDTH * size
        found = workspace_of(config, dataclasses.replace(spec, encoder=encoder))
        assert found == max(step, LENGTH * per_token * size) + slots


@pytest.mark.parametrize(
    ("settings", "max_tokens", "expected"),
    [
        ({}, None, LENGTH),
        ({"max_model_len": "auto"}, None, 128),
        ({"encoder_cache_tokens": 20}, None, 20),
        ({}, 16, 16),
        ({}, 500, LENGTH),
    ],
)
def test_largest_item_fits_prompt_and_cache(
    settings: dict[str, Any], max_tokens: int | None, expected: int
) -> None:
    assert (
        largest_item(config_of(**settings), EncoderSize(WIDTH, PER_TOKEN, max_tokens), 128)
        == expected
    )


def test_pool_gets_the_memory_beyond_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "available_cpu_bytes", lambda: FREE)
    settings = {"kv_cache_memory_bytes": None, "max_num_seqs": 40, "encoder_cache_tokens": 20_000}
    engine = Engine(**settings)
    memory, model = engine.built.memory, engine.model
    slots = model.encoder_memory
    assert slots.shape == (20_000, WIDTH) and slots.element_size() == 8
    assert memory.weights_bytes == model_bytes(model)
    assert memory.workspace_bytes >= slots.nbytes
    assert memory.weights_bytes + memory.workspace_bytes + memory.pool_bytes <= FREE
    few = Engine(**settings | {"encoder_cache_tokens": 64}).built.memory
    assert memory.pool_bytes < few.pool_bytes
    with pytest.raises(OutOfMemory, match="exceed the free memory"):
        Engine(**settings | {"encoder_cache_tokens": 30_000})


def test_fit_reports_the_memory_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "available_cpu_bytes", lambda: FREE)
    with vision_models():
        config = config_of()
        found = fit(config, source(), Device("here", "cpu", FREE))
        built = build.build_runner(config, source())
    assert found.memory == built.memory
    assert found.encoder_cache_bytes == built.runner.model.encoder_memory.nbytes
    assert found.encoding_bytes == LENGTH * PER_TOKEN * 8
    data = as_data(found)
    assert data["encoder_cache_bytes"] == SLOTS * WIDTH * 8
    assert data["encoding_bytes"] == LENGTH * PER_TOKEN * 8
    lines = [line for line in _lines(found) if "enco" in line]
    assert len(lines) == 2 and "64 tokens" in lines[0] and "3,000 tokens" in lines[1]
    text = fit(config, source(), Device("here", "cpu", FREE))
    assert not text.encoder_cache_bytes and not [each for each in _lines(text) if "enco" in each]


def test_model_with_a_tower_has_no_start_without_torch() -> None:
    engine = Engine(dtype="float32", attention_backend="auto")
    assert not can_save_start(engine.built.spec)
    assert can_save_start(load_spec(checkpoint("llama")))


def source() -> Any:
    return resolve_model(str(checkpoint("llama")))
