"""`quire verify` as a command: exit status, report and requirements."""

import json
from pathlib import Path

import pytest

from quire.tools.verify import theirs, verify
from tests.support.commands import run
from tests.support.models.checkpoints import write_checkpoint

QUICK = ("--quantization", "none", "--attention-backend", "reference", "--tokens", "2")


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten prompts, since one of the ways takes a step for each prompt token."""
    monkeypatch.setattr(verify, "RANDOM_TOKENS", 16)


def test_equal_models_exit_with_status_0(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "model", "llama")
    capsys.readouterr()
    report = tmp_path / "report.json"
    status, out, err = run(capsys, "verify", str(tmp_path / "model"), *QUICK, "--json", str(report))
    assert status == 0
    assert out.startswith("equal within rounding: 9 ways to compute\nversions\n")
    assert "plain, float64, reference, KV auto, at once" in err, "progress is shown"
    assert json.loads(report.read_text())["verdict"] == "equal within rounding"


def test_different_models_exit_with_status_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "model", "llama")
    write_checkpoint(tmp_path / "other", "llama3_rope")
    status, out, _ = run(
        capsys, "verify", str(tmp_path / "model"), *QUICK, "--against", str(tmp_path / "other")
    )
    assert status == 1
    assert "layer 0: attention, or the norm before it, from token 1 (plain, float64" in out


def test_failed_comparisons_exit_with_status_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, "llama")
    for arguments, message in (
        (("--tokens", "-1"), "--tokens must be at least 0, got -1"),
        (("--tokens", "128"), "and 128 more exceed the model's limit of 128"),
        (("--prompt", "hello"), "has no tokenizer; remove --prompt"),
        (("--against", "/no/such"), "there is no directory /no/such"),
    ):
        status, _, err = run(capsys, "verify", str(tmp_path), *QUICK, *arguments)
        assert status == 2 and message in err, err
    monkeypatch.setattr(theirs, "is_available", lambda: False)
    status, _, err = run(capsys, "verify", str(tmp_path))
    assert status == 2 and 'not installed: pip install "quire[transformers]"' in err
