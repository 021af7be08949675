"""Names of models are resolved to directories."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from quire.base.errors import ModelError, ModelNotFound
from quire.base.settings.config import ModelConfig
from quire.engine.start.text import build_text_side
from quire.models.checkpoint.source import CONFIG_ONLY, ModelSource, resolve_model, shape_names
from quire.models.registry import model_class
from quire.spec.model_spec import load_spec
from quire.tools.bench.tokens import LocalTokens
from tests.support.models.quick import slow_if_large


def test_a_directory_is_resolved(tmp_path: Path) -> None:
    source = resolve_model(str(tmp_path))
    assert (source.directory, source.load_format, source.name) == (tmp_path, "auto", tmp_path.name)


def test_the_demo_model_is_resolved() -> None:
    source = resolve_model("demo")
    assert source.directory.name == "demo"
    assert source.name == "demo"


@pytest.mark.parametrize("name", shape_names())
def test_shapes_are_valid_configs(name: str) -> None:
    source = resolve_model(f"shape:{name}")
    assert (source.load_format, source.name) == ("dummy", f"shape:{name}")
    spec = load_spec(source.directory)
    assert model_class(spec.model_type)
    assert spec.num_heads % spec.num_kv_heads == 0


# Millions of parameters, as published.
SIZES = {
    "qwen3-0.6b": 596,
    "qwen3-1.7b": 1720,
    "qwen3-4b": 4022,
    "qwen3-8b": 8191,
    "qwen3-30b-a3b": 30532,
    "qwen3-next-80b-a3b": 80_000,
    "qwen3.5-0.8b": 752,  # without the vision tower
    "llama-3.1-8b": 8030,
    "llama-3.2-1b": 1236,
    "llama-3.2-3b": 3213,
    "llama-13b": 13016,
    "qwen2.5-0.5b": 494,
    "qwen2.5-1.5b": 1544,
    "qwen2.5-7b": 7616,
    "mistral-7b": 7242,
    "gemma2-2b": 2614,
    "gemma3-1b": 1000,
    "olmo2-7b": 7299,
    "phi4-mini": 3836,
    "mixtral-8x7b": 46703,
    "deepseek-v2-lite": 15706,
    "gpt-oss-20b": 20915,
    "opt-125m": 125,
    "opt-1.3b": 1316,
    "opt-13b": 12853,
    "opt-66b": 65_719,
    "opt-175b": 175_000,
    "gpt2": 124,
}


def test_sizes_of_all_shapes_are_known() -> None:
    assert sorted(SIZES) == shape_names()


@pytest.mark.parametrize("name", slow_if_large(SIZES))
def test_shapes_have_the_published_size(name: str) -> None:
    import torch

    from quire.models.load.loading import model_bytes
    from quire.models.registry import make_model

    spec = load_spec(resolve_model(f"shape:{name}").directory)
    model = make_model(spec, torch.int8, torch.device("meta"))
    assert model_bytes(model) / 1e6 == pytest.approx(SIZES[name], rel=0.01)


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ModelError, match="no shape 'huge'; the shapes are deepseek-v2-lite,"):
        resolve_model("shape:huge")


@pytest.mark.parametrize("name", ["/no/such/place", "./nowhere", "a/b/c", "~/nothing-here"])
def test_a_missing_directory_is_refused(name: str) -> None:
    with pytest.raises(ModelNotFound, match="no directory .*`demo`"):
        resolve_model(name)


def test_a_file_is_refused_as_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelNotFound, match="is a file"):
        resolve_model(str(file))


def test_hub_downloads_are_limited_to_listed_patterns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = []

    def download(name: str, **options: object) -> str:
        calls.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = resolve_model("owner/some-model", "v2", progress=False)
    assert (source.directory, source.name) == (tmp_path, "owner/some-model")
    ((name, options),) = calls
    assert (name, options["revision"]) == ("owner/some-model", "v2")
    assert "*.safetensors" in options["allow_patterns"]
    assert not any(p.endswith((".bin", ".py", "*")) for p in options["allow_patterns"])
    with options["tqdm_class"](total=3) as bar:
        assert bar.disable
    resolve_model("owner/some-model", files=CONFIG_ONLY)
    assert calls[1][1]["allow_patterns"] == ["config.json"]


def test_a_separate_tokenizer_is_downloaded_without_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For a server's front end (--tokenizer) and for `quire bench serve --tokenizer`."""
    fetched: list[list[str]] = []

    def download(name: str, **options: Any) -> str:
        fetched.append(options["allow_patterns"])
        return str(resolve_model("demo").directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    text = build_text_side(ModelConfig(tokenizer="owner/text"), ModelSource(tmp_path, "auto", "m"))
    assert text.tokenizer is not None
    assert LocalTokens("owner/text").encode("Hello!") == text.tokenizer.encode("Hello!")
    assert len(fetched) == 2
    for patterns in fetched:
        assert "*.json" in patterns and "*.safetensors" not in patterns


def test_an_unreachable_hub_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **options: object) -> str:
        raise LocalEntryNotFoundError("the hub cannot be reached\nmore text")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelNotFound, match="did not return it: the hub cannot be reached.*`demo`"):
        resolve_model("owner/some-model")


def test_importing_the_module_does_not_import_torch() -> None:
    unwanted = "{'torch', 'huggingface_hub'} & set(sys.modules)"
    code = f"import sys, quire.models.checkpoint.source; assert not {unwanted}"
    subprocess.run([sys.executable, "-c", code], check=True)
