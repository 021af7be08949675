"""guidellm: benchmarks with synthetic texts and a local tokenizer."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.given import Served

TOKENIZER = Path(__file__).parents[2] / "src" / "quire" / "demo"
NUM, NUM_TOKENS = 6, 8
ONE, SEVERAL = "kind=synchronous", "kind=concurrent,streams=3"
PATHS = {"/v1/chat/completions": ONE, "/v1/completions": SEVERAL, "/v1/responses": SEVERAL}


def benchmark(server: Served, path: str, out: Path) -> Any:
    """Run NUM requests of NUM_TOKENS each; return the report's one benchmark."""
    target = server.url.removesuffix("/v1")
    made = f"kind=synthetic_text,prompt_tokens=32,output_tokens={NUM_TOKENS}"
    # fmt: off
    command = [
        str(Path(sys.executable).with_name("guidellm")), "run",
        "--backend", f"kind=openai_http,target={target},model={server.model},request_format={path}",
        "--profile", PATHS[path], "--constraint", f"kind=max_requests,count={NUM}",
        "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}", "--data", made,
        "--output", f"kind=json,path={out}", "--disable-console",
    ]
    # fmt: on
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=out.parent)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    [found] = json.loads(out.read_text())["benchmarks"]
    return found


def check(found: Any) -> None:
    """Check that all requests succeeded with the requested number of tokens."""
    totals = found["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM, 0)
    counts = found["metrics"]["output_token_count"]["successful"]
    assert counts["mean"] == NUM_TOKENS
    assert found["metrics"]["time_to_first_token_ms"]["successful"]["mean"] > 0


@pytest.mark.parametrize("path", PATHS)
def test_all_requests_succeed_with_their_tokens(server: Served, tmp_path: Path, path: str) -> None:
    check(benchmark(server, path, tmp_path / "out.json"))
