"""`quire pull`, `list` and `rm` with a local hub and the folders of other programs.

Covers `cli/local/models.py` and `models/library/cache.py`.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.serve.processes.server_files import server_file
from tests.models.library.test_hub_model import FILES, REPO
from tests.models.library.test_local import ollama
from tests.support.commands import run
from tests.support.serve.fake_hub import FakeHub, running_hub, use_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    with running_hub() as hub:
        hub.repos[REPO] = dict(FILES)
        use_hub(monkeypatch, hub, str(tmp_path / "hf"))
        yield hub


def names(out: str) -> list[str]:
    return [line.split()[0] for line in out.splitlines()[1:]]


def test_pulled_models_are_listed_and_removed(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert names(run(capsys, "list")[1]) == ["demo"]
    for tag in ("Q8_0", "q4_k_m", "Q5_K_M"):
        status, out, _ = run(capsys, "pull", f"{REPO}:{tag}")
        assert status == 0 and Path(out.strip()).is_file()
    ollama(tmp_path / ".ollama/models", "registry.ollama.ai/library/llama3.2/1b")
    status, out, _ = run(capsys, "list")
    ours = [f"{REPO}:{tag}" for tag in ("Q4_K_M", "Q5_K_M", "Q8_0")]
    assert names(out) == [*ours, "llama3.2:1b", "demo"]
    listed = json.loads(run(capsys, "list", "--json")[1])
    assert [each["num_bytes"] for each in listed] == [
        4000 // 6 * 6, *[each["num_bytes"] for each in listed[1:]],
    ]  # fmt: skip
    assert all(Path(each["path"]).exists() for each in listed)

    status, out, _ = run(capsys, "rm", f"{REPO}:Q8_0")
    assert (status, out) == (0, f"removed {REPO}:Q8_0: 8.0 kB freed\n")
    assert names(run(capsys, "list")[1]) == [*ours[:2], "llama3.2:1b", "demo"]
    assert run(capsys, "rm", REPO)[0] == 0
    assert names(run(capsys, "list")[1]) == ["llama3.2:1b", "demo"]
    assert not [*(tmp_path / "hf").rglob("*.gguf")]


def test_removing_the_last_file_removes_its_repository(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run(capsys, "pull", f"{REPO}:Q8_0")
    assert run(capsys, "rm", f"{REPO}:q8_0")[0] == 0
    assert not [*(tmp_path / "hf" / "hub").glob("models--*")]


def test_unknown_foreign_and_served_models_are_not_removed(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ollama(tmp_path / ".ollama/models", "registry.ollama.ai/library/llama3.2/1b")
    run(capsys, "pull", f"{REPO}:Q8_0")
    cases = {
        "nothing": "there is no downloaded model 'nothing'; `quire list`",
        f"{REPO}:Q2_K": "there is no downloaded model",
        "llama3.2:1b": "belongs to Ollama",
        str(tmp_path): "is a file or directory of yours",
    }
    for name, message in cases.items():
        status, _, err = run(capsys, "rm", name)
        assert status == 1 and message in err
    with server_file("http://127.0.0.1:9", {"tiny": f"{REPO}:Q8_0"}):
        status, _, err = run(capsys, "rm", f"{REPO}:Q8_0")
    assert status == 1 and f"run `quire stop {os.getpid()}` first" in err
    assert f"{REPO}:Q8_0" in names(run(capsys, "list")[1])


def test_pull_suggests_a_similar_name(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "pull", "org/tiny-GUF")
    assert (status, out) == (1, "") and f"Did you mean {REPO}?" in err
