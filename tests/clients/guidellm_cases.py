"""guidellm: benchmarks with made texts and a tokenizer of this machine."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.given import Served

TOKENIZER = Path(__file__).parents[2] / "src" / "quire" / "demo"
NUM, NUM_TOKENS = 6, 8
PROFILES = {"synchronous": "kind=synchronous", "concurrent": "kind=concurrent,streams=3"}


def benchmark(server: Served, profile: str, out: Path, *backend: str) -> Any:
    """Run NUM requests of NUM_TOKENS each; return the report's one benchmark."""
    target = server.url.removesuffix("/v1")
    made = f"kind=synthetic_text,prompt_tokens=32,output_tokens={NUM_TOKENS}"
    # fmt: off
    command = [
        str(Path(sys.executable).with_name("guidellm")), "run",
        "--backend", ",".join([f"kind=openai_http,target={target},model={server.model}", *backend]),
        "--profile", PROFILES[profile], "--constraint", f"kind=max_requests,count={NUM}",
        "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}", "--data", made,
        "--output", f"kind=json,path={out}", "--disable-console",
    ]
    # fmt: on
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=out.parent)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    [found] = json.loads(out.read_text())["benchmarks"]
    return found


def check(found: Any) -> None:
    """All requests have ended well, and their tokens are those that were asked for."""
    totals = found["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM, 0)
    counts = found["metrics"]["output_token_count"]["successful"]
    assert counts["mean"] == NUM_TOKENS
    assert found["metrics"]["time_to_first_token_ms"]["successful"]["mean"] > 0


@pytest.mark.parametrize("profile", PROFILES)
def test_chats(server: Served, tmp_path: Path, profile: str) -> None:
    check(benchmark(server, profile, tmp_path / "out.json"))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_others(server: Served, tmp_path: Path, path: str) -> None:
    check(benchmark(server, "concurrent", tmp_path / "out.json", f"request_format={path}"))
