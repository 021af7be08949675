"""Models of Ollama and LM Studio: found by their names, listed, and never trusted."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ModelNotFound
from quire.models.checkpoint.source import resolve_model
from quire.models.library.local import MODEL_LAYER, local_models

DATA = b"GGUF data"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def ollama(folder: Path, name: str, **changes: Any) -> Path:
    """Write a model as Ollama stores it; name: HOST/OWNER/NAME/TAG."""
    digest = hashlib.sha256(DATA).hexdigest()
    blob = folder / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(DATA)
    layer = {"mediaType": MODEL_LAYER, "digest": f"sha256:{digest}", "size": len(DATA)} | changes
    template = {"mediaType": "application/vnd.ollama.image.template", "digest": "", "size": 1}
    manifest = folder / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"layers": [layer, template]}))
    return blob


def test_ollama_models_are_found_and_listed_by_name(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home / ".ollama" / "models"
    blob = ollama(folder, "registry.ollama.ai/library/llama3.2/latest")
    ollama(folder, "registry.ollama.ai/me/mine/1b")
    ollama(folder, "hf.co/org/repo/Q4_0")
    for name in ("llama3.2", "llama3.2:latest", "me/mine:1b", "hf.co/org/repo:Q4_0"):
        source = resolve_model(name)
        assert (source.directory, source.name, source.load_format) == (blob, name, "auto")
    listed = ["hf.co/org/repo:Q4_0", "llama3.2:latest", "me/mine:1b"]
    assert sorted(each.name for each in local_models()) == listed
    other = home / "elsewhere"
    monkeypatch.setenv("OLLAMA_MODELS", str(other))
    assert resolve_model("llama3.2").directory == blob
    mine = ollama(other, "registry.ollama.ai/library/llama3.2/latest")
    assert resolve_model("llama3.2").directory == mine


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"digest": "sha256:../../../etc/passwd"}, "is not a valid manifest"),
        ({"size": "many"}, "is not a valid manifest"),
        ({"size": 10**12}, "is missing or incomplete. Run `ollama pull broken`"),
        ({"digest": f"sha256:{'0' * 64}"}, "is missing or incomplete"),
        ({"mediaType": "other"}, "has 0 files of weights"),
    ],
)
def test_broken_manifests_are_refused(home: Path, changes: dict[str, Any], message: str) -> None:
    ollama(home / ".ollama" / "models", "registry.ollama.ai/library/broken/latest", **changes)
    with pytest.raises(ModelNotFound, match=message):
        resolve_model("broken")
    assert local_models() == []


@pytest.mark.parametrize("text", ["", "[]", '{"layers": 3}', "[" * 5000])
def test_files_that_are_no_manifests_are_refused(home: Path, text: str) -> None:
    manifest = home / ".ollama/models/manifests/registry.ollama.ai/library/bad/latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(text)
    with pytest.raises(ModelNotFound, match="is not a valid manifest"):
        resolve_model("bad")


def test_names_that_leave_the_folder_are_refused(home: Path) -> None:
    ollama(home / ".ollama" / "models", "registry.ollama.ai/library/llama3.2/latest")
    for name in ("../llama3.2", "llama3.2:../latest", "a/../library/llama3.2", ":latest"):
        with pytest.raises(ModelNotFound):
            resolve_model(name)


def test_lm_studio_models_are_found_and_listed_by_name(home: Path) -> None:
    folder = home / ".lmstudio" / "models" / "pub" / "tiny-GGUF"
    folder.mkdir(parents=True)
    for name in ("tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf", "mmproj-tiny-F16.gguf"):
        (folder / name).write_bytes(DATA)
    assert resolve_model("pub/tiny-GGUF:q4_k_m").directory == folder / "tiny-Q4_K_M.gguf"
    source = resolve_model("pub/tiny-GGUF")
    assert (source.directory, source.name) == (folder / "tiny-Q8_0.gguf", "pub/tiny-GGUF")
    assert resolve_model(str(folder)).directory == folder / "tiny-Q8_0.gguf"
    names = [each.name for each in local_models()]
    assert names == ["pub/tiny-GGUF:Q8_0", "pub/tiny-GGUF:Q4_K_M"]
