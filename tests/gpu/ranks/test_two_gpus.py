"""One model on two GPUs: collectives over NCCL, the tokens of one GPU, and refused settings.

`make gpu-check PART=ranks` runs these; with fewer than two GPUs all are skipped. Each of two
processes runs `exchanges.py`; tests/ops/test_torch_group.py runs it over gloo.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, EngineError
from tests.gpu.test_runner import GREEDY, PROMPTS, SAMPLED
from tests.support.models.reference_checkpoints import checkpoint
from tests.support.processes.servers import children_of, kill, wait_until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason=f"it needs two GPUs, and torch sees {torch.cuda.device_count()}",
    ),
]
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
EXCHANGES_S = 120.0


def open_llm(architecture: str, **settings: Any) -> LLM:
    plain = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 26, "disable_log_stats": True}
    return LLM(str(checkpoint(architecture)), device="cuda", **plain | settings)


def tokens(llm: LLM, params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in outputs]


def test_all_collectives_work_over_nccl(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.engine.exchanges", str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "cuda"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        results = [each.communicate(timeout=EXCHANGES_S) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    for rank, (each, (_, errors)) in enumerate(zip(ranks, results, strict=True)):
        assert each.returncode == 0, f"rank {rank}:\n{errors[-4000:]}"


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {}),
        ("llama", {"enforce_eager": True}),
        ("llama", {"deterministic": True}),
        ("gpt2", {}),
        ("multi_query", {}),
        ("qwen3_5", {}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"enable_expert_parallel": True}),
        ("multi_query", {"decode_context_parallel_size": 2}),
    ],
    ids=str,
)
def test_two_gpus_give_the_tokens_of_one(architecture: str, settings: dict[str, Any]) -> None:
    """Runs two rounds, so that the second replays what the first recorded."""
    alone = {n: v for n, v in settings.items() if n in ("enforce_eager", "deterministic")}
    with open_llm(architecture, **alone) as llm:
        wanted = tokens(llm, GREEDY), tokens(llm, SAMPLED)
    with open_llm(architecture, **TWO, **settings) as llm:
        for _ in range(2):
            assert (tokens(llm, GREEDY), tokens(llm, SAMPLED)) == wanted


def test_a_killed_rank_ends_the_engine() -> None:
    with open_llm("llama", **TWO) as llm:
        core = llm.engine.client.core
        ranks = [pid for pid, line in children_of(os.getpid()).items() if "rank_main" in line]
        assert len(ranks) == 2
        kill(max(ranks), signal.SIGKILL)
        wait_until(lambda: core.rest_s() == 0.0, "the lost rank is noticed", 5.0)
        with pytest.raises(EngineError, match=r"rank \d of 2 .* has ended \(signal 9\)"):
            core.step()


def test_pipeline_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2 is for CPUs so far"):
        open_llm("llama", pipeline_parallel_size=2)


def test_more_ranks_than_gpus_are_refused() -> None:
    num = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=f"needs {2 * num} CUDA devices, and torch sees {num}"):
        open_llm("llama", tensor_parallel_size=2 * num)
