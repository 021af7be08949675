"""Only an engine of the same model hits cached blocks. Any change of the model's config, or of the
stored format, leads to a miss."""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from quire.models.outline import outline
from quire.models.registry import make_model
from quire.ops.host.native import core
from quire.spec.model_spec import ModelSpec, parse_spec
from tests.serve.test_host_tier import PARAMS, PROMPTS
from tests.support.cases import slow_but
from tests.support.models.checkpoints import VARIANTS
from tests.support.models.reference_checkpoints import checkpoint

Path_ = tuple[str, ...]
ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False,
        "mscale": 1.0, "mscale_all_dim": 0.5,
    },
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    name: {"model_type": model_type} | config for name, (model_type, config) in VARIANTS.items()
} | {
    f"rope {name}": {"model_type": "qwen3"}
    | VARIANTS["qwen3"][1]
    | {"rope_parameters": rope | {"rope_theta": 1e4}}
    for name, rope in ROPES.items()
}


class Watched(dict[str, Any]):
    """A config that records which keys are read, also of its inner dictionaries."""

    def __init__(self, values: dict[str, Any], seen: set[Path_], path: Path_ = ()) -> None:
        inner = {
            key: Watched(value, seen, (*path, key)) if isinstance(value, dict) else value
            for key, value in values.items()
        }
        super().__init__(inner)
        self._seen, self._path = seen, path

    def _note(self, key: str) -> None:
        self._seen.add((*self._path, key))

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._note(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        for key in super().__iter__():
            self._note(key)
            yield key

    def keys(self) -> Any:
        return list(self)

    def items(self) -> Any:
        return [(key, self[key]) for key in self]


def fields_read(config: dict[str, Any]) -> set[Path_]:
    """Return the paths that are read while a model is built, from its config to its layers."""
    seen: set[Path_] = set()
    spec = parse_spec(Watched(config, seen))
    make_model(spec, torch.float32, torch.device("meta"))
    outline(spec)
    return seen


def changed(config: dict[str, Any], path: Path_, value: Any = "another") -> dict[str, Any]:
    """Return the config with another value at a path."""
    key, *rest = path
    if rest:
        inner = config.get(key)
        return config | {key: changed(inner if isinstance(inner, dict) else {}, tuple(rest), value)}
    return config | {key: value}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_field_read_is_part_of_the_identity(name: str) -> None:
    config = CONFIGS[name]
    fields = fields_read(config)
    sizes = {("num_hidden_layers",), ("n_layer",)}
    assert fields & sizes, fields
    assert len(fields) > 12
    spec = parse_spec(config)
    identities = {path: replaced(spec, changed(config, path)).identity for path in fields}
    assert spec.identity not in identities.values()
    assert len(set(identities.values())) == len(identities)
    assert parse_spec(dict(reversed(config.items()))).identity == spec.identity


def replaced(spec: ModelSpec, config: dict[str, Any]) -> ModelSpec:
    """Return the same spec with another raw config, including fields that parsing ignores."""
    return dataclasses.replace(spec, raw=config)


@pytest.mark.parametrize(
    "name", [field.name for field in dataclasses.fields(ModelSpec) if field.name != "encoder"]
)  # the encoder follows from other fields
def test_every_spec_field_is_part_of_the_identity(name: str) -> None:
    spec = parse_spec(CONFIGS["qwen3_moe"])
    assert dataclasses.replace(spec, **{name: {"other": 1}}).identity != spec.identity


# ---- engines ---------------------------------------------------------------------------------

MOE_CHANGES: dict[str, Any] = {
    "rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    "rope scaling": {"rope_parameters": ROPES["linear"] | {"rope_theta": 10000.0}},
    "rope factor": {"rope_parameters": ROPES["linear"] | {"rope_theta": 10000.0, "factor": 3.0}},
    "norm": {"rms_norm_eps": 0.5},
    "experts per token": {"num_experts_per_tok": 2},
    "weights of experts": {"norm_topk_prob": False},
    "window": {"use_sliding_window": True, "sliding_window": 5},
}
OPT_CHANGES = {"activation": {"activation_function": "gelu"}}
GPT2_CHANGES = {
    "activation": {"activation_function": "relu"},
    "norm": {"layer_norm_epsilon": 0.1},
    "scale": {"scale_attn_weights": False},
    "scale by layer": {"scale_attn_by_inverse_layer_idx": True},
}
CHANGES = {"qwen3_moe": MOE_CHANGES, "opt": OPT_CHANGES, "gpt2": GPT2_CHANGES}


def copied(folder: Path, architecture: str, parent: str, changes: dict[str, Any]) -> Path:
    """Copy the checkpoint to a directory of the same name; the weights keep their times."""
    target = folder / parent / "model"
    shutil.copytree(checkpoint(architecture), target)
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return target


def run(model: Path, directory: Path, **settings: Any) -> tuple[int, list[int]]:
    """Return the number of cached tokens, and the output tokens."""
    few: dict[str, Any] = {"max_model_len": 64, "block_size": 4, "dtype": "float32"}
    few |= {"kv_disk_dir": str(directory), "disable_log_stats": True}
    with LLM(str(model), **(few | settings)) as llm:
        (output,) = llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False)
    return output.num_cached_tokens or 0, list(output.outputs[0].token_ids)


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
@pytest.mark.parametrize("architecture", slow_but(CHANGES, "gpt2"))
def test_changed_config_misses_the_cache(architecture: str, tmp_path: Path) -> None:
    """It hits neither the blocks of the first config nor those of another changed one."""
    first, same = (copied(tmp_path, architecture, parent, {}) for parent in "ab")
    assert run(first, tmp_path / "kv")[0] == 0
    assert run(same, tmp_path / "kv")[0] > 0
    for name, change in CHANGES[architecture].items():
        other = copied(tmp_path, architecture, name, change)
        cached, tokens = run(other, tmp_path / "kv")
        assert cached == 0, name
        assert tokens == run(other, tmp_path / "empty" / name)[1], name


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
def test_changed_weights_of_equal_size_and_time_miss_the_cache(tmp_path: Path) -> None:
    first, other = (copied(tmp_path, "gpt2", parent, {}) for parent in "ab")
    run(first, tmp_path / "kv")
    file = other / "model.safetensors"
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[len(data) // 3 | 1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert run(other, tmp_path / "kv")[0] == 0
    assert run(first, tmp_path / "kv")[0] > 0


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
def test_blocks_of_another_layout_are_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint("gpt2")
    run(model, tmp_path / "kv")
    assert run(model, tmp_path / "kv")[0] > 0
    monkeypatch.setattr("quire.engine.connectors.identity.BLOCK_LAYOUT", 1)
    assert run(model, tmp_path / "kv")[0] == 0


SETTINGS: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"block_size": 8},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    {"attention_backend": "torch"},
    {"load_format": "dummy"},
]


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
def test_other_settings_miss_the_cache(tmp_path: Path) -> None:
    """Each setting hits only its own blocks."""
    model = copied(tmp_path, "qwen3", "a", {})
    run(model, tmp_path / "kv")
    for settings in SETTINGS:
        assert run(model, tmp_path / "kv", **settings)[0] == 0, settings
        assert run(model, tmp_path / "kv", **settings)[0] > 0, settings
