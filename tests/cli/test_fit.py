"""`quire fit`: text and JSON, this machine and others, and refused input."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from quire.cli import machine
from quire.models.checkpoint.source import resolve_model
from tests.structure.test_house import ROOT
from tests.support.commands import run
from tests.support.models.checkpoints import write_checkpoint

MIB = 1 << 20


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status, out, err = run(capsys, "fit", "--json", *arguments)
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", list)


def test_text_report_has_memory_and_request_counts(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(
        capsys, "fit", "shape:mistral-7b", "--device", "h100-nvl", "--max-model-len", "4K"
    )
    assert (status, err) == (0, "")
    for line in (
        "name               shape:mistral-7b (mistral, bfloat16)",
        "device             H100-NVL: 93.58 GiB, of which 92% may be used",
        "weights            13.49 GiB (bfloat16 13.49 GiB)",
        "KV                 128.0 KiB per token, 2.0 MiB per block in 32 layers with a window of",
        "requests that fit at once (max_num_seqs 256, max_model_len 4,096)",
        "with other formats (requests of 4,096 tokens)",
        "tokens each  512  2,048  4,096",
    ):
        assert line in out
    assert "GPUs from 8.9 on" in out and "warnings" not in out
    assert max(map(len, out.splitlines())) <= 100


def test_json_figures_are_consistent(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "demo", "--dtype", "float32", "--max-model-len", "256")
    assert found["device"]["kind"] == "cpu" and found["device"]["memory_bytes"] > MIB
    assert found["model"] == {"name": "demo", "type": "llama", "dtype": "float32"}
    assert found["settings"]["max_model_len"] == 256
    (group,), pool = found["kv"]["groups"], found["pool"]
    assert group["block_bytes"] == 16 * found["kv"]["bytes_per_token"]
    assert pool["bytes"] == group["block_bytes"] * pool["blocks"][0]
    assert pool["tokens"] == 16 * pool["blocks"][0]
    assert found["weights"]["bytes"] == sum(found["weights"]["formats"].values())
    assert found["requests"][-1]["length"] == 256
    assert len(found["alternatives"]) in (2, 6) and found["warnings"] == []


def test_documented_figures_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    """The page on GPUs has the pool sizes, and the page on models the output of a run."""
    table = (ROOT / "docs" / "start" / "gpu.md").read_text("utf-8")
    rows = re.findall(r"^\| 8B \| `([^`]+)` \| ([\d,]+) \|$", table, re.MULTILINE)
    assert len(rows) == 3
    for flags, tokens in rows:
        words = "fit", "shape:qwen3-8b", "--device", "rtx4090", *shlex.split(flags)
        _, out, _ = run(capsys, *words)
        assert f"= {tokens} tokens in" in out
    page = (ROOT / "docs" / "use" / "models.md").read_text("utf-8")
    command = re.search(r"^quire (fit .*)$", page, re.MULTILINE)
    block = re.search(r"^```\n(model\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert command and block
    _, out, _ = run(capsys, *shlex.split(command[1]))
    assert set(block[1].splitlines()) <= set(out.splitlines())


def test_auto_length_is_the_longest_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["shape:llama-3.1-8b", "--device", "20GiB"]
    status, _, err = run(capsys, "fit", *arguments)
    assert status == 1
    assert "one request of 131,072 tokens" in err and "--max-model-len auto" in err
    assert "with --max-model-len auto these fit:\n  weights   KV " in err
    assert re.search(r"\n  int4      int8 +5\.\d+ GiB +[\d,]+ +\d+$", err, re.MULTILINE)
    found = figures(capsys, *arguments, "--max-model-len", "auto")
    length, tokens = found["settings"]["max_model_len"], found["pool"]["tokens"]
    assert length % 16 == 0 and length == tokens - 16
    assert found["requests"][-1] == {"length": length, "at_once": 1, "by_memory": 1}


def test_settings_are_read_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "quire.yaml"
    path.write_text("model: shape:qwen3-0.6b\ndevice: cpu\nkv-cache-memory-bytes: 64M\nport: 1\n")
    found = figures(capsys, "--config", str(path), "--max_model_len", "auto")
    assert found["model"]["name"] == "shape:qwen3-0.6b"
    assert found["pool"]["bytes"] <= 64 * MIB < found["pool"]["bytes"] + 2 * MIB


def test_config_file_may_be_the_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shape = resolve_model("shape:qwen3-0.6b").directory / "config.json"
    (tmp_path / "config.json").write_text(shape.read_text())
    alone = figures(capsys, str(tmp_path / "config.json"), "--device", "l4")
    assert alone["model"]["name"] == tmp_path.name and alone["warnings"] == []
    assert alone["pool"] == figures(capsys, "shape:qwen3-0.6b", "--device", "l4")["pool"]


@pytest.mark.parametrize(
    ("variant", "limited"), [("qwen2_windows", "a window of 6"), ("llama4", "chunks of 7")]
)
def test_groups_with_windows_or_chunks_show_their_limit(
    variant: str, limited: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, variant)
    status, out, _ = run(capsys, "fit", str(tmp_path), "--device", "cpu")
    assert status == 0
    assert "in 1 layer: " in out and f"in 2 layers with {limited}: " in out


def test_groups_of_states_show_bytes_per_state(capsys: pytest.CaptureFixture[str]) -> None:
    """A state has 16 x 128 x 128 numbers and inputs of a convolution, regardless of the tokens."""
    pool = "--kv-cache-memory-bytes", "1000000000", "--max-model-len", "4096"
    command_line = "shape:qwen3.5-0.8b", "--device", "cpu", *pool
    status, out, _ = run(capsys, "fit", *command_line)
    assert status == 0
    assert "12.0 KiB per token, 192.0 KiB per block in 6 layers: " in out
    assert "19.3 MiB per state in 18 layers: 24 states" in out
    assert figures(capsys, *command_line)["kv"]["bytes_per_token"] == 12 * 1024


def test_warnings_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    status, out, _ = run(capsys, "fit", str(tmp_path), "--device", "cpu")
    assert status == 0
    assert "warnings\n  ! only the config was checked" in out


def test_gpu_of_this_machine_is_the_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = {"name": "NVIDIA H200", "memory.total": "143771 MiB"}
    monkeypatch.setattr(machine, "gpus", lambda: [gpu])
    for device in ([], ["--device", "cuda"], ["--device", "auto"]):
        found = figures(capsys, "demo", *device)["device"]
        assert found == {
            "name": "this machine's NVIDIA H200",
            "kind": "cuda",
            "memory_bytes": 143_771 * MIB,
        }
    assert figures(capsys, "demo", "--device", "CPU")["device"]["kind"] == "cpu"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--device", "H1000"], "there is no device 'H1000'; known are cpu"),
        (["demo", "--device", "cuda"], "nvidia-smi lists no GPU on this machine"),
        (["./nowhere"], "there is no directory ./nowhere"),
        (["shape:nothing"], "there is no shape 'nothing'"),
        (["demo", "--max-model-len", "1M"], "more than the model supports"),
        (["shape:opt-13b", "--device", "8GB"], "does not fit a GPU of 8GB with 7,629 MiB. "),
        (["demo", "--block-size", "0"], "block_size must be from 1 to 256"),
    ],
)
def test_invalid_input_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    status, out, err = run(capsys, "fit", *arguments)
    assert (status, out) == (1, "")
    assert err.startswith("quire: ") and message in err
