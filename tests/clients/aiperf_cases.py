"""aiperf: its load on chats and completions, with synthetic texts and a local tokenizer."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.given import Served

TOKENIZER = Path(__file__).parents[2] / "src" / "quire" / "demo"
NUM, NUM_TOKENS = 6, 8


def profile(server: Served, kind: str, out: Path, *flags: str) -> Any:
    """Send NUM requests of NUM_TOKENS output tokens each; return aiperf's report."""
    # fmt: off
    command = [
        str(Path(sys.executable).with_name("aiperf")), "profile", "--model", server.model,
        "--url", server.url.removesuffix("/v1"), "--endpoint-type", kind, "--streaming",
        "--tokenizer", str(TOKENIZER), "--synthetic-input-tokens-mean", "32",
        "--output-tokens-mean", str(NUM_TOKENS), "--request-count", str(NUM),
        "--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--ui-type", "none",
        "--artifact-dir", str(out), *flags,
    ]
    # fmt: on
    # aiperf refuses a directory as a tokenizer if the hub is switched off.
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, cwd=out.parent, env=env
    )
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    [report] = out.rglob("profile_export_aiperf.json")
    return json.loads(report.read_text())


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_all_requests_end_with_their_tokens(server: Served, tmp_path: Path, kind: str) -> None:
    found = profile(server, kind, tmp_path / "out", "--concurrency", "2")
    assert found["request_count"]["avg"] == NUM and not found["error_summary"]
    lengths = found["output_sequence_length"]
    assert lengths["min"] == lengths["max"] == NUM_TOKENS
    assert found["time_to_first_token"]["min"] > 0
