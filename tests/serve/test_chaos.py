"""A few minutes of chaos; run `python -m tests.serve.chaos --minutes 20` by hand."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_answers_stay_correct_while_processes_are_killed() -> None:
    command = [sys.executable, "-m", "tests.serve.chaos", "--minutes", "2.5", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout)
    outcomes = summary["outcomes"]
    kinds = ("completion", "chat", "n", "best_of", "beams", "logprobs", "pieces")
    assert all(outcomes.get(f"ok {kind}", 0) > 0 for kind in kinds), outcomes
    for name in ("left", "pinned", "killed core", "killed api", "killed supervisor"):
        assert outcomes[name] > 0
    for name in ("num_preemptions_total", "kv_blocks_loaded_total", "kv_blocks_kept_total"):
        assert summary["used"][name] > 0, "the pool is too large for this test"
