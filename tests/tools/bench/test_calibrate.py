"""`quire bench calibrate`: a real engine's steps, their fit, and a simulation with the fit."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quire.cli.main import main
from quire.serve.python.llm import LLM
from quire.tools.bench.calibrate import MAX_OUTPUT, Driver, StepListener, draw_batch


@pytest.fixture
def small_llm() -> Iterator[LLM]:
    with LLM("demo", max_num_seqs=4, max_model_len=128, disable_log_stats=True) as llm:
        yield llm


def test_drawn_batches_cover_sizes_and_lengths() -> None:
    rng = np.random.default_rng(0)
    batches = [draw_batch(rng, 8, 200, 97) for _ in range(60)]
    assert {len(each) for each in batches} >= {1, 2, 4, 8, 13}
    lengths = [(request.prompt_len, request.output_len) for each in batches for request in each]
    assert min(length for length, _ in lengths) <= 3 and max(length for length, _ in lengths) > 150
    assert all(2 <= num <= MAX_OUTPUT and length + num <= 200 for length, num in lengths)


def test_traffic_has_pauses_and_requests_that_join(small_llm: LLM) -> None:
    driver, listener = Driver(small_llm, 4), StepListener()
    small_llm.engine.client.core.subscribe(listener)
    for _ in range(3):
        driver.run_traffic()
    assert not small_llm.engine.client.num_unfinished
    joins = [s for s in listener.steps if 0 < len(s.plan.started) < len(s.plan.rows)]
    cold = [s for s in listener.steps if s.is_cold]
    assert joins and cold


def test_fit_of_this_machine_runs_a_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fit.json"
    small = ["--max-num-seqs", "4", "--max-model-len", "128"]
    words = ["bench", "calibrate", "demo", "--seconds", "0.1", *small]
    assert main([*words, "--output-json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "residuals of" in printed and "host, between steps" in printed
    found = json.loads(path.read_text())
    assert sum(found["step"].values()) > 0 and found["residuals"]["num_steps"] >= 20
    assert found["cold"] >= 1 and found["step"]["rows that begin"] >= 0
    more = ["--num-prompts", "5", "--input-len", "20", "--output-len", "9"]
    assert main(["simulate", "demo", "--device", "cpu", "--fit", str(path), *small, *more]) == 0
    assert "Successful requests:                     5" in capsys.readouterr().out
