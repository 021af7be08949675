"""The benchmark's functions on a tiny model. Nothing here depends on how long anything takes."""

import json
from pathlib import Path

import pytest
import torch

from quire.base.config import SchedulerConfig
from quire.base.events import Planned
from quire.base.model_spec import parse_spec
from quire.serve.llm import LLM
from quire.tools import bench
from quire.tools.dry_run import dry_request, dry_run
from quire.tools.limits import Limits, StepCost, step_cost
from quire.tools.report import write_report

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path


@pytest.fixture
def llm(directory: Path) -> LLM:
    return LLM(
        str(directory), load_format="dummy", dtype="float32", device="cpu", max_num_seqs=4,
        disable_log_stats=True,
    )  # fmt: skip


def test_run_counts_tokens_and_steps(llm: LLM) -> None:
    times = bench.StepTimes.of(llm)
    for _ in range(2):  # the second finds no cached prefix and no steps of the first
        run = bench.run_once(llm, times, [[1, 2, 3], [4, 5, 6, 7]], output_len=5)
        assert (run.num_requests, run.num_prompt_tokens, run.num_output_tokens) == (2, 7, 10)
        assert run.num_cached_tokens == [0, 0]
        assert sum(step.num_tokens for step in run.steps) == 7 + 2 * 4
        assert [step.is_decode for step in run.steps] == [False] + [True] * 4


def test_step_times() -> None:
    times = bench.StepTimes([Planned(1.0, 0, 2, 9), Planned(3.0, 1, 2, 2)])
    assert times.steps(3.5) == [bench.Step(2, 9, 2.0), bench.Step(2, 2, 0.5)]


def test_step_cost_counts_what_is_multiplied() -> None:
    cost = step_cost(parse_spec(CONFIG), torch.float32)
    attention = 32 * (4 + 2 + 2) * 8 + 4 * 8 * 32
    assert cost.layers == 2 * (attention + 3 * 32 * 48)
    assert cost.head == 100 * 32
    assert cost.weight_bytes == 4 * (cost.layers + cost.head)


def test_least_time_is_the_larger_limit() -> None:
    cost = StepCost(layers=10, head=5, dtype_bytes=2)
    limits = Limits(flops_per_s=100.0, bytes_per_s=60.0)
    assert cost.least_s(1, 1, limits) == pytest.approx(0.5)  # 30 bytes against 30 operations
    assert cost.least_s(4, 2, limits) == pytest.approx(1.0)  # 100 operations


def test_share_of_limits() -> None:
    steps = [bench.Step(2, 8, 3.0), bench.Step(2, 2, 1.0), bench.Step(2, 2, 1.0)]
    run = bench.Run(5.0, 2, 8, 6, steps, [], [])
    cost, limits = StepCost(10, 5, 2), Limits(flops_per_s=100.0, bytes_per_s=60.0)
    share = bench.share_of_limits(run, cost, limits)
    flops = 2 * (8 * 10 + 2 * 5) + 2 * 2 * (2 * 10 + 2 * 5)
    assert share.of_flops == pytest.approx(flops / 5.0 / 100.0)
    assert share.decode_step_s == 1.0
    assert share.of_bytes == pytest.approx(30 / 60)
    assert share.of_limit == pytest.approx((1.8 + 0.6 + 0.6) / 5.0)


def test_main_prints_and_writes(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "measure_limits", lambda dtype, device: Limits(1e9, 1e9))
    path = directory / "out" / "bench.json"
    arguments = f"--model {directory} --load-format dummy --device cpu"
    sizes = "--num-prompts 3 --input-len 6 --output-len 4"
    bench.main([*arguments.split(), *sizes.split(), "--output-json", str(path)])
    printed = capsys.readouterr().out
    assert "Throughput: " in printed and " output tokens/s\n" in printed
    assert "Total num prompt tokens:  18\nTotal num output tokens:  12\n" in printed
    written = json.loads(path.read_text(encoding="utf-8"))
    assert (written["num_requests"], written["total_num_tokens"]) == (3, 30)
    assert written["elapsed_time"] > 0
    assert written["requests_per_second"] > 0 and written["tokens_per_second"] > 0
    assert {"cpu", "cores", "torch", "date", "commit"} <= written["machine"].keys()


def test_median_run() -> None:
    runs = [bench.Run(seconds, 1, 1, 1, [], [], []) for seconds in (3.0, 1.0, 2.0)]
    assert bench.median_run(runs).elapsed_s == 2.0


def test_report_without_a_path_writes_nothing(tmp_path: Path) -> None:
    write_report(None, {})
    assert list(tmp_path.iterdir()) == []


def test_dry_run_serves_requests_to_their_ends() -> None:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16)
    scheduler, executor = dry_run(16, 4, config, 32, enable_prefix_caching=True)
    for i in range(5):
        scheduler.add(dry_request(str(i), [i] * 6, max_tokens=4), 0.0)
    ended: list[str] = []
    while (plan := scheduler.schedule(0.0)) is not None:
        executor.submit(plan)
        outputs = scheduler.update(executor.next_result(), 0.0)
        ended += [ending.reason for ending in outputs.endings.values()]
        scheduler.check_invariants()
    assert ended == ["length"] * 5
