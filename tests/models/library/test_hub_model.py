"""Models of the hub: choice, download, resume after a kill, offline, damage, full disk, typos."""

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from quire.base.errors import ModelError, ModelNotFound
from quire.models.checkpoint.source import CONFIG_ONLY, resolve_model
from quire.models.library import hub_model
from quire.models.library.hub import PARTIAL
from tests.support.processes.servers import wait_until
from tests.support.serve.fake_hub import FakeHub, running_hub, use_hub

REPO = "org/tiny-GGUF"
GIB = 1 << 30


def contents(text: str, size: int = 5000) -> bytes:
    return (b"GGUF" + text.encode()) * (size // (4 + len(text)))


FILES = {
    "README.md": b"a model",
    "tiny-Q4_K_M.gguf": contents("q4", 4000),
    "tiny-Q8_0.gguf": contents("q8", 8000),
    "tiny-mmproj-F16.gguf": contents("images", 3000),
    "big/tiny-Q5_K_M-00001-of-00002.gguf": contents("5a"),
    "big/tiny-Q5_K_M-00002-of-00002.gguf": contents("5b"),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    with running_hub() as hub:
        hub.repos[REPO] = dict(FILES)
        use_hub(monkeypatch, hub, str(tmp_path / "hf"))
        yield hub


def with_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(hub_model, "machine_memory_bytes", lambda: num_bytes)


def test_the_best_file_for_the_machine_is_downloaded_once(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing else is downloaded. The second call sends no request."""
    with_memory(monkeypatch, GIB)
    with caplog.at_level(logging.INFO, "quire"):
        source = resolve_model(REPO)
    assert source.directory.read_bytes() == FILES["tiny-Q8_0.gguf"]
    assert (source.name, source.directory.name) == (REPO, "tiny-Q8_0.gguf")
    assert "Q8_0 (8.0 kB): the best quality that takes less than a quarter" in caplog.text
    [download] = hub.downloads()
    assert "tiny-Q8_0.gguf" in download
    hub.requests.clear()
    with_memory(monkeypatch, 8000)  # the downloaded file is chosen again if it fits at all
    assert resolve_model(f"{REPO}:q8_0").directory == source.directory
    assert resolve_model(f"hf.co/{REPO}:tiny-Q8_0.gguf").directory == source.directory
    assert hub.requests == []


def test_a_small_machine_gets_a_small_file_or_an_error(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_memory(monkeypatch, 8000)
    assert resolve_model(REPO).directory.name == "tiny-Q4_K_M.gguf"
    with_memory(monkeypatch, 1000)
    hub.repos["org/other"] = dict(FILES)
    with pytest.raises(ModelError, match="no GGUF file of org/other fits.* Q4_K_M, needs 4.0 kB"):
        resolve_model("org/other")


def test_all_parts_of_a_split_model_are_downloaded(hub: FakeHub) -> None:
    path = resolve_model(f"{REPO}:Q5_K_M").directory
    assert path.name.endswith("00001-of-00002.gguf")
    assert sorted(each.name for each in path.parent.iterdir()) == [
        "tiny-Q5_K_M-00001-of-00002.gguf",
        "tiny-Q5_K_M-00002-of-00002.gguf",
    ]


def test_a_wrong_quantisation_lists_the_files(hub: FakeHub) -> None:
    with pytest.raises(ModelNotFound, match=r"no GGUF file 'Q3'; it has Q8_0 \(8.0 kB\), Q5_K_M"):
        resolve_model(f"{REPO}:Q3")


def test_safetensors_files_are_preferred_to_gguf_files(hub: FakeHub) -> None:
    hub.repos["org/plain"] = {
        "config.json": b"{}",
        "model.safetensors": contents("weights"),
        "original/model.safetensors": contents("again"),
        "code.py": b"pass",
        "plain-Q8_0.gguf": contents("q8"),
    }
    source = resolve_model("org/plain")
    assert {path.name for path in source.directory.iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    assert (source.directory / "model.safetensors").read_bytes() == contents("weights")
    assert resolve_model("org/plain", files=CONFIG_ONLY).directory == source.directory
    assert resolve_model("org/plain:Q8_0").directory.name == "plain-Q8_0.gguf"
    assert resolve_model("org/plain").directory == source.directory


def test_a_config_within_a_gguf_file_needs_a_download(hub: FakeHub) -> None:
    with pytest.raises(ModelNotFound, match=f"`quire pull {REPO}` or append one of Q8_0"):
        resolve_model(REPO, files=CONFIG_ONLY)


PULL = "import sys; from quire.models.checkpoint.source import resolve_model as r; r(sys.argv[1])"


def test_a_download_continues_after_a_kill(hub: FakeHub, tmp_path: Path) -> None:
    hub.hold_after = 2000
    variables = os.environ | hub.variables(str(tmp_path / "hf"))
    command = [sys.executable, "-c", PULL, f"{REPO}:Q8_0"]
    process = subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL)
    folder = tmp_path / "hf" / "hub"
    wait_until(lambda: any(hub.downloads()))
    process.send_signal(signal.SIGKILL)
    process.wait()
    [partial] = folder.rglob(f"*{PARTIAL}")
    with partial.open("wb") as file:  # bytes that were not on the disk at the kill
        file.write(FILES["tiny-Q8_0.gguf"][:1500])
    hub.hold_after = None
    hub.released.set()
    assert resolve_model(f"{REPO}:Q8_0").directory.read_bytes() == FILES["tiny-Q8_0.gguf"]
    assert hub.downloads()[-1].endswith("bytes=1500-")
    assert not [*folder.rglob(f"*{PARTIAL}")]


def test_a_damaged_file_never_enters_the_cache(hub: FakeHub, tmp_path: Path) -> None:
    hub.damaged.add("tiny-Q8_0.gguf")
    with pytest.raises(ModelError, match="does not have its checksum.*was removed; download"):
        resolve_model(f"{REPO}:Q8_0")
    assert not [path for path in (tmp_path / "hf").rglob("*") if "Q8_0" in path.name]
    hub.damaged.clear()
    assert resolve_model(f"{REPO}:Q8_0").directory.read_bytes() == FILES["tiny-Q8_0.gguf"]


def test_a_refresh_finds_damage_on_the_disk(hub: FakeHub) -> None:
    path = resolve_model(f"{REPO}:Q8_0").directory
    path.resolve().write_bytes(bytes(8000))
    with pytest.raises(ModelError, match="does not have its checksum"):
        resolve_model(f"{REPO}:Q8_0", refresh=True)
    again = resolve_model(f"{REPO}:Q8_0", refresh=True).directory
    assert again.read_bytes() == FILES["tiny-Q8_0.gguf"]


def test_a_full_disk_prevents_the_download(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 5000, 5000))
    with pytest.raises(ModelError, match=r"needs 8.0 kB more of disk.*5.0 kB free.*HF_HOME"):
        resolve_model(f"{REPO}:Q8_0")
    assert hub.downloads() == []


def test_offline_only_local_files_are_used(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_model(f"{REPO}:Q4_K_M").directory
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert resolve_model(f"{REPO}:Q4_K_M").directory == path
    assert resolve_model(REPO).directory == path
    with pytest.raises(ModelNotFound, match=r"not on this machine.*of org/tiny-GGUF: Q4_K_M"):
        resolve_model(f"{REPO}:Q8_0")
    with pytest.raises(ModelNotFound, match="did not return it"):
        resolve_model("org/none")
    assert hub.requests == []


def test_wrong_and_gated_names_are_reported(hub: FakeHub) -> None:
    with pytest.raises(ModelNotFound, match=f"has no such model.* Did you mean {REPO}"):
        resolve_model("orga/tiny-gguf")
    with pytest.raises(ModelNotFound, match="has no revision 'v9'"):
        resolve_model(REPO, "v9")
    hub.gated.add("org/closed")
    with pytest.raises(ModelNotFound, match="gated model: accept its conditions at http"):
        resolve_model("org/closed")
