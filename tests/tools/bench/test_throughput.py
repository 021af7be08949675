"""The benchmark's functions on a tiny model. No test depends on durations."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from quire.base.errors import ConfigError
from quire.base.events import Planned
from quire.serve.python.llm import LLM
from quire.spec.model_spec import parse_spec
from quire.tools.bench import throughput as bench
from quire.tools.bench.arguments import add_throughput_arguments
from quire.tools.bench.datasets import BenchRequest
from quire.tools.limits import Limits, StepCost, read_bytes_per_s, step_cost

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
    for _ in range(2):  # the second run has no prefix hits and no steps of the first
        run = bench.run_once(llm, times, [[1, 2, 3], [4, 5, 6, 7]], output_len=5)
        assert (run.num_requests, run.num_prompt_tokens, run.num_output_tokens) == (2, 7, 10)
        assert run.num_cached_tokens == [0, 0]
        assert sum(step.num_tokens for step in run.steps) == 7 + 2 * 4
        assert [step.is_decode for step in run.steps] == [False] + [True] * 4


def test_step_times_end_at_the_next_plan() -> None:
    times = bench.StepTimes([Planned(1.0, 0, 2, 9), Planned(3.0, 1, 2, 2)])
    assert times.steps(3.5) == [bench.Step(2, 9, 2.0), bench.Step(2, 2, 0.5)]


def test_step_cost_counts_multiplied_weights() -> None:
    cost = step_cost(parse_spec(CONFIG), torch.float32)
    attention = 32 * (4 + 2 + 2) * 8 + 4 * 8 * 32
    assert cost.layers == 2 * (attention + 3 * 32 * 48)
    assert cost.head == 100 * 32
    assert cost.weight_bytes == 4 * (cost.layers + cost.head)


def test_min_time_is_the_larger_limit() -> None:
    cost = StepCost(layers=10, head=5, weight_bytes=30)
    limits = Limits(flops_per_s=100.0, bytes_per_s=60.0)
    assert cost.min_s(1, 1, limits) == pytest.approx(0.5)  # 30 bytes against 30 operations
    assert cost.min_s(4, 2, limits) == pytest.approx(1.0)  # 100 operations


def test_share_of_limits_covers_flops_bytes_and_steps() -> None:
    steps = [bench.Step(2, 8, 3.0), bench.Step(2, 2, 1.0), bench.Step(2, 2, 1.0)]
    run = bench.Run(5.0, 2, 8, 6, steps, [], [])
    cost, limits = StepCost(10, 5, 30), Limits(flops_per_s=100.0, bytes_per_s=60.0)
    share = bench.share_of_limits(run, cost, limits)
    flops = 2 * (8 * 10 + 2 * 5) + 2 * 2 * (2 * 10 + 2 * 5)
    assert share.of_flops == pytest.approx(flops / 5.0 / 100.0)
    assert share.decode_step_s == 1.0
    assert share.of_bytes == pytest.approx(30 / 60)
    assert share.of_limit == pytest.approx((1.8 + 0.6 + 0.6) / 5.0)


def options(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_throughput_arguments(parser)
    return parser.parse_args(line.split())


@pytest.fixture
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return limits measured before and after; the better value of each counts."""
    measured = iter([Limits(1e9, 4e9), Limits(2e9, 3e9)])
    monkeypatch.setattr(bench, "measure_limits", lambda *given: next(measured))


@pytest.mark.usefixtures("quick_limits")
def test_run_prints_and_writes(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = directory / "out" / "bench.json"
    given = {"model": str(directory), "load_format": "dummy", "device": "cpu", "seed": 3}
    sizes = "--num-prompts 3 --input-len 6 --output-len 4 --rounds 2"
    assert bench.run(options(f"{sizes} --output-json {path}"), given) == 0
    printed = capsys.readouterr().out
    assert "Throughput: " in printed and " output tokens/s\n" in printed
    title, *_ = printed.splitlines()
    assert title.endswith(
        ": 3 requests (random), each with 6 prompt tokens and 4 output tokens; 18 prompt tokens and"
        " 12 output tokens in all"
    )
    assert "Total num prompt tokens:  18\nTotal num output tokens:  12\n" in printed
    assert "Mean tokens per request:  6.0 prompt, 4.0 output\n" in printed
    assert "of the 2.0 of a large matrix product" in printed
    assert "of the 4.0 of a long read" in printed
    written = json.loads(path.read_text(encoding="utf-8"))
    assert (written["num_requests"], written["total_num_tokens"]) == (3, 30)
    assert len(written["elapsed_times"]) == 2 and written["elapsed_time"] > 0
    assert written["requests_per_second"] > 0 and written["tokens_per_second"] > 0
    assert {"cpu", "cores", "torch", "date", "commit"} <= written["machine"].keys()


@pytest.mark.usefixtures("quick_limits")
def test_texts_need_a_tokenizer(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello"}\n', encoding="utf-8")
    line = f"--dataset-name custom --dataset-path {path} --num-prompts 2 --output-len 3"
    with pytest.raises(ConfigError, match="has no tokenizer"):
        bench.run(options(line), {"model": str(directory), "load_format": "dummy"})
    assert bench.run(options(line), {"model": "demo", "device": "cpu"}) == 0


def test_requests_of_different_lengths_run_together(llm: LLM) -> None:
    requests = [BenchRequest([1, 2, 3], 3, 5), BenchRequest([4] * 9, 9, 2)]
    run = bench.run_requests(llm, bench.StepTimes.of(llm), requests)
    assert [len(ids) for ids in run.token_ids] == [5, 2]
    assert (run.num_prompt_tokens, run.num_output_tokens) == (12, 7)


def test_description_separates_lengths_from_totals() -> None:
    same = [BenchRequest([1] * 7, 7, 2000)] * 1000
    assert bench.described(same) == (
        "each with 7 prompt tokens and 2,000 output tokens; 7,000 prompt tokens and 2,000,000"
        " output tokens in all"
    )
    different = [BenchRequest([1] * 3, 3, 5), BenchRequest([4] * 9, 9, 5)]
    assert bench.described(different).startswith("each with 3 to 9 prompt tokens and 5 output")


def test_settings_fit_the_requests() -> None:
    requests = [BenchRequest([1], 1, 9), BenchRequest([1] * 5, 5, 8)]
    assert bench.settings_for(requests, {"block_size": 8}) == {
        "model": "demo", "max_model_len": 13, "max_num_seqs": 2, "block_size": 8,
    }  # fmt: skip
    given = {"max_model_len": 99, "max_num_seqs": 7, "model": "x"}
    assert bench.settings_for(requests, given) == given
    assert "max_num_seqs" not in bench.settings_for(requests * 40, {})


def test_read_bandwidth_is_plausible() -> None:
    assert 1e8 < read_bytes_per_s(torch.device("cpu"), cpu_bytes=1 << 24) < 1e13


def test_median_run_is_the_middle_one() -> None:
    runs = [bench.Run(seconds, 1, 1, 1, [], [], []) for seconds in (3.0, 1.0, 2.0)]
    assert bench.median_run(runs).elapsed_s == 2.0
