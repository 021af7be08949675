"""`quire port` names the nearest architecture, lists differences, and writes a class skeleton."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from quire.base.errors import ConfigError, ModelError
from quire.cli.commands.port import lines
from quire.models import registry
from quire.models.load.loading import load_model
from quire.spec.model_spec import load_spec
from quire.tools.port.nearest import Checkpoint, Nearest, find_nearest, read_checkpoint
from quire.tools.port.skeleton import TINY, class_name, module_name, write_skeleton
from tests.support.cases import slow_but
from tests.support.commands import run
from tests.support.models.checkpoints import random_tokens, write_checkpoint
from tests.support.models.paged_forward import CPU, run_paged

TOKENS = random_tokens(20)


def renamed(folder: Path, variant: str, model_type: str, **fields: Any) -> Path:
    """Write a checkpoint of a variant under the name of another type."""
    write_checkpoint(folder, variant)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"model_type": model_type} | fields
    path.write_text(json.dumps(config))
    return folder


def foreign(folder: Path, model_type: str) -> Path:
    """Write a tiny checkpoint of a type for which quire has no class."""
    known = transformers.AutoConfig.for_model(model_type).to_dict()
    sizes = {name: size for name, size in TINY.items() if name in known and name != "head_dim"}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(model_type, **sizes, **tokens)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


_NEAREST: dict[str, Nearest] = {}  # by the checkpoint's config and shapes


def nearest(checkpoint: Checkpoint) -> Nearest:
    """Compare with all architectures, once for each content of a checkpoint."""
    key = f"{json.dumps(checkpoint.config, sort_keys=True)} {checkpoint.shapes}"
    if key not in _NEAREST:
        _NEAREST[key] = find_nearest(checkpoint)
    return _NEAREST[key]


def nearest_of(folder: Path) -> Nearest:
    return nearest(read_checkpoint(folder))


def imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


def logits(folder: Path) -> torch.Tensor:
    spec = load_spec(folder)
    model = load_model(folder, spec, torch.float64, CPU)
    return run_paged(model, spec, TOKENS, [[20]], backend="reference", dtype=torch.float64)[0]


@pytest.mark.parametrize("variant", slow_but(["qwen2", "gemma2", "gpt_neox"], "gpt_neox"))
def test_renamed_architecture_gives_a_class_that_runs(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "ours", variant)
    folder = renamed(tmp_path / "model", variant, "fable-2")
    checkpoint = read_checkpoint(folder)
    found = nearest(checkpoint)
    assert (found.model_type, found.fields, found.tensors) == (variant, (), ())
    files = write_skeleton(checkpoint, found, tmp_path / "out")
    assert [path.name for path in files] == ["fable_2.py", "test_fable_2.py", "pyproject.toml"]
    made = imported(files[0], monkeypatch)
    monkeypatch.setitem(registry.MODELS, "fable-2", made.Fable2)
    assert torch.equal(logits(folder), logits(tmp_path / "ours"))


def test_stablelm_is_nearest_to_llama(tmp_path: Path) -> None:
    found = nearest_of(foreign(tmp_path, "stablelm"))
    assert found.model_type == "llama"
    assert {field.name for field in found.fields} == {"rope_parameters", "layer_norm_eps"}
    rope, eps = sorted(found.fields, key=lambda field: field.name, reverse=True)
    assert rope.is_refused and "partial_rotary_factor is 0.25" in rope.ours
    assert eps.value == 1e-5 and eps.ours == "llama reads rms_norm_eps"
    assert {(each.name, each.theirs, each.ours) for each in found.tensors} == {
        ("model.layers.N.input_layernorm.bias", (32,), None),
        ("model.layers.N.post_attention_layernorm.bias", (32,), None),
        ("model.norm.bias", (32,), None),
    }


def test_starcoder2_is_nearest_to_qwen2(tmp_path: Path) -> None:
    found = nearest_of(foreign(tmp_path, "starcoder2"))
    assert found.model_type == "qwen2", "which has biases of queries, keys and values"
    assert {"norm_epsilon", "use_bias"} <= {field.name for field in found.fields}
    names = {each.name: each for each in found.tensors}
    assert names["model.layers.N.mlp.c_fc.weight"].theirs == (40, 32)
    assert names["model.layers.N.mlp.gate_proj.weight"].theirs is None
    assert names["model.layers.N.self_attn.o_proj.bias"].count == 3


def test_open_fields_and_tensors_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = foreign(tmp_path / "model", "stablelm")
    checkpoint = read_checkpoint(folder)
    files = write_skeleton(checkpoint, nearest(checkpoint), tmp_path / "out")
    made = imported(files[0], monkeypatch)
    monkeypatch.setitem(registry.MODELS, "stablelm", made.Stablelm)
    with pytest.raises(ModelError, match="rope_parameters is .*; the class for stablelm does not"):
        logits(folder)
    made.OPEN_FIELDS.clear()
    with pytest.raises(ModelError, match=r"no place yet for model.layers.N.input_layernorm.bias, "):
        logits(folder)


@pytest.mark.slow
def test_written_test_compares_with_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails with the skeleton and passes with a correct class."""
    folder = foreign(tmp_path / "model", "stablelm")
    checkpoint = read_checkpoint(folder)
    files = write_skeleton(checkpoint, nearest(checkpoint), tmp_path / "out")
    made = imported(files[0], monkeypatch)
    tests = imported(files[1], monkeypatch)
    with pytest.raises(ModelError, match="the class for stablelm does not read it yet"):
        tests.test_it_is_equal(tmp_path / "tiny", monkeypatch)
    # Once the config is that of a Llama, the class is correct.
    write_checkpoint(tmp_path / "llama", "llama")
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    made.OPEN_FIELDS.clear()
    made.OPEN_TENSORS.clear()
    tests.TYPE, tests.TINY = "llama", {n: v for n, v in config.items() if n != "model_type"}
    tests.test_it_is_equal(tmp_path / "right", monkeypatch)


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(renamed(tmp_path / "model", "gpt_neox", "fable-2"))
    out = tmp_path / "out"
    out.mkdir()
    (out / "test_fable_2.py").write_text("mine")
    with pytest.raises(ConfigError, match="has test_fable_2.py already; nothing is overwritten"):
        write_skeleton(checkpoint, nearest(checkpoint), out)
    assert [path.name for path in out.iterdir()] == ["test_fable_2.py"]


def test_config_alone_finds_the_nearest_architecture(tmp_path: Path) -> None:
    folder = renamed(tmp_path, "gpt_neox", "fable")
    (folder / "model.safetensors").unlink()
    found = nearest_of(folder)
    assert found.model_type == "gpt_neox" and not found.tensors
    assert "by config.json alone" in next(lines(read_checkpoint(folder), found))


def test_sizes_under_other_names_are_matched(tmp_path: Path) -> None:
    folder = renamed(tmp_path, "llama", "fable")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["d_model"] = config.pop("hidden_size")
    path.write_text(json.dumps(config))
    found = nearest_of(folder)
    assert found.model_type == "llama" and found.is_same


def test_supported_and_invalid_checkpoints_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "llama", "llama")
    with pytest.raises(
        ConfigError, match="type 'llama' are supported already; compare .* `quire verify"
    ):
        read_checkpoint(tmp_path / "llama")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="has no config.json"):
        read_checkpoint(tmp_path / "empty")


def test_command_writes_the_skeleton(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = foreign(tmp_path / "model", "stablelm")
    capsys.readouterr()
    status, out, err = run(capsys, "port", str(folder), "--out", str(tmp_path / "out"))
    assert (status, err) == (0, "")
    assert out.startswith("stablelm is nearest to llama: 12 of 15 tensor names are the same")
    assert f"written: {tmp_path}/out/stablelm.py" in out


@pytest.mark.slow
def test_command_overwrites_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ("port", str(foreign(tmp_path / "model", "stablelm")), "--out", str(tmp_path / "out"))
    status, _, _ = run(capsys, *command)
    assert status == 0
    written = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    status, _, err = run(capsys, *command)
    assert status == 1 and "nothing is overwritten" in err
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == written


def test_module_and_class_names_are_valid() -> None:
    assert [module_name(each) for each in ("a-b", "3d", "class")] == [
        "a_b",
        "model_3d",
        "model_class",
    ]
    assert class_name("fable_x-2") == "FableX2"
