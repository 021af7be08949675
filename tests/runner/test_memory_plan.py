"""The memory of a device and the memory that a step needs: dtype, workspace and pool plan."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.base.errors import ConfigError, OutOfMemory
from quire.base.plan import Plan
from quire.base.settings.config import EngineConfig, config_from_flat
from quire.kv.sizing import MIB
from quire.models.checkpoint.source import resolve_model
from quire.models.load.loading import load_model, model_bytes
from quire.ops.attention.base import KVLayout
from quire.ops.attention.select import make_backend
from quire.runner import derive, memory_plan
from quire.runner.build import build_runner, choose_device
from quire.runner.derive import choose_dtype, derive_config
from quire.runner.memory_plan import MemoryPlan, block_bytes_of, plan_cpu_memory, workspace_bytes
from quire.runner.setup.assemble import assemble
from quire.runner.setup.profile import plan_gpu_memory, worst_case_plan
from quire.spec.model_spec import ModelSpec, load_spec
from tests.support.models.reference_checkpoints import checkpoint

CPU = torch.device("cpu")
GIB = 1 << 30


def shape(name: str) -> ModelSpec:
    return load_spec(resolve_model(f"shape:{name}").directory)


def config_for(spec: ModelSpec, **settings: Any) -> EngineConfig:
    return derive_config(config_from_flat(**settings), spec, "cpu")


# ---- dtype and device ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "name", "device", "expected"),
    [
        ("fpu avx2", "auto", "cpu", "float32"),
        ("fpu avx512_bf16 avx2", "auto", "cpu", "bfloat16"),
        ("fpu amx_bf16", "auto", "cpu", "bfloat16"),
        ("fpu avx2", "auto", "cuda", "bfloat16"),
        ("fpu avx2", "bfloat16", "cpu", "bfloat16"),
        ("fpu avx512_bf16", "float32", "cpu", "float32"),
        ("fpu", "float64", "cpu", "float64"),
    ],
)
def test_auto_dtype_depends_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    name: str,
    device: str,
    expected: str,
) -> None:
    """A given dtype is used; auto is the checkpoint's dtype if this machine multiplies it."""
    monkeypatch.setattr(derive, "has_native_bfloat16", lambda: "bf16" in flags)
    monkeypatch.setattr(derive, "core", lambda: None)
    spec = shape("qwen3-0.6b")
    assert spec.dtype == "bfloat16"
    assert choose_dtype(name, spec, device) == expected


@pytest.mark.parametrize("name", ["qwen3-0.6b", "opt-125m"])
def test_core_multiplies_every_dtype(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derive, "has_native_bfloat16", lambda: False)
    monkeypatch.setattr(derive, "core", lambda: object())
    spec = shape(name)
    assert choose_dtype("auto", spec, "cpu") == spec.dtype


def test_float16_becomes_float32_on_a_cpu_without_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derive, "has_native_bfloat16", lambda: True)
    monkeypatch.setattr(derive, "core", lambda: None)
    spec = shape("opt-125m")
    assert spec.dtype == "float16"
    assert choose_dtype("auto", spec, "cpu") == "float32"
    assert choose_dtype("auto", spec, "cuda") == "float16"


def test_choose_device() -> None:
    assert choose_device("cpu") == CPU
    if not torch.cuda.is_available():
        assert choose_device("auto") == CPU
        with pytest.raises(ConfigError, match="use device='cpu'"):
            choose_device("cuda")


def test_available_memory_respects_the_control_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Available memory is the limit minus the usage, if that is less than the machine has."""
    monkeypatch.setattr(memory_plan, "CGROUP", tmp_path)
    system = memory_plan.available_cpu_bytes()
    assert system > 0
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_plan.available_cpu_bytes() > 100_000
    (tmp_path / "memory.max").write_text("5000\n")
    assert memory_plan.available_cpu_bytes() == 4000
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("7000\n")
    (tmp_path / "memory/memory.usage_in_bytes").write_text("8000\n")
    assert memory_plan.available_cpu_bytes() == 0


def test_unset_limits_are_derived_and_given_ones_kept() -> None:
    spec = shape("qwen3-0.6b")
    config = config_for(spec)
    assert config.model.max_model_len == spec.max_position
    scheduler = config.scheduler
    assert scheduler.max_num_seqs == 64 and 64 <= (scheduler.max_num_batched_tokens or 0) <= 256
    given = config_for(spec, max_model_len=100, max_num_seqs=3, max_num_batched_tokens=5)
    assert (given.model.max_model_len, given.scheduler.max_num_seqs) == (100, 3)
    assert given.scheduler.max_num_batched_tokens == 5
    with pytest.raises(ConfigError, match=f"is more than .*{spec.max_position}"):
        config_for(spec, max_model_len=spec.max_position + 1)


# ---- the plan on a CPU -----------------------------------------------------------------------


def plan_for(spec: ModelSpec, weights: int, free: int, **settings: Any) -> memory_plan.MemoryPlan:
    defaults: dict[str, Any] = {"max_num_batched_tokens": 256, "dtype": "float32"}
    config = config_for(spec, **(defaults | settings))
    return plan_cpu_memory(config, spec, weights, free)


def test_pool_gets_a_quarter_of_the_free_memory() -> None:
    spec = shape("qwen3-0.6b")
    plan = plan_for(spec, GIB, 16 * GIB, max_model_len=8192)
    block = spec.kv_bytes_per_token(4) * 16
    assert plan.num_blocks == (4 * GIB // block,)
    assert plan.pool_bytes == plan.num_blocks[0] * block
    assert (plan.weights_bytes, plan.total_bytes) == (GIB, 16 * GIB)
    assert plan.workspace_bytes == workspace_bytes(spec, 4, 256, 64)


def test_pool_gets_less_if_the_weights_leave_less() -> None:
    spec = shape("qwen3-0.6b")
    workspace = workspace_bytes(spec, 4, 256, 64)
    plan = plan_for(spec, 7 * GIB - workspace, 8 * GIB, max_model_len=2048)
    block = spec.kv_bytes_per_token(4) * 16
    assert plan.num_blocks == (GIB // block,)


def test_pool_is_not_larger_than_all_sequences_need() -> None:
    spec = shape("qwen3-0.6b")
    plan = plan_for(spec, GIB, 64 * GIB, max_model_len=100, max_num_seqs=3)
    assert plan.num_blocks == (3 * 8,)  # 7 blocks for 100 tokens, and one to write into


def test_given_pool_size_overrides_the_quarter() -> None:
    """It may be smaller or larger, but never larger than all sequences need."""
    spec = shape("qwen3-0.6b")
    block = spec.kv_bytes_per_token(4) * 16
    settings = {"max_model_len": 160, "max_num_seqs": 1000}
    for blocks in (11, 400):
        size = blocks * block + block // 2
        plan = plan_for(spec, MIB, 8 * GIB, kv_cache_memory_bytes=size, **settings)
        assert plan.num_blocks == (blocks,)
    large = plan_for(spec, MIB, 8 * GIB, kv_cache_memory_bytes=999 * GIB, max_model_len=160)
    assert large.num_blocks == (64 * 11,)


def test_errors_say_what_to_do() -> None:
    spec = shape("qwen3-0.6b")
    with pytest.raises(OutOfMemory) as caught:
        plan_for(spec, 3 * GIB, 3 * GIB)
    message = str(caught.value)
    assert "weights (3,072 MiB)" in message and "free memory (3,072 MiB)" in message
    assert "smaller model or dtype" in message
    with pytest.raises(OutOfMemory, match=r"Lower max_model_len.*kv_cache_memory_bytes"):
        plan_for(spec, GIB, 4 * GIB)
    with pytest.raises(OutOfMemory, match="holds 160 tokens, less than one sequence"):
        plan_for(spec, 0, GIB, kv_cache_memory_bytes=10 * 16 * spec.kv_bytes_per_token(4))


# ---- max_model_len auto ----------------------------------------------------------------------


def test_auto_length_is_the_longest_that_fits_the_pool() -> None:
    """Of ten blocks, nine hold tokens and one is written into. Without auto, the model's limit is
    too long, and the error suggests auto."""
    folder = checkpoint("llama")
    spec = load_spec(folder)
    pool = 10 * 8 * spec.kv_bytes_per_token(4)
    settings: dict[str, Any] = {
        "model": str(folder), "dtype": "float32", "device": "cpu", "block_size": 8,
        "kv_cache_memory_bytes": pool, "max_num_seqs": 2,
    }  # fmt: skip
    assert spec.max_position > 72
    with pytest.raises(OutOfMemory, match="max_model_len=auto uses the longest that fits"):
        build_runner(config_from_flat(**settings), resolve_model(str(folder)))
    for auto in ("auto", -1):
        config = config_from_flat(**settings, max_model_len=auto)
        built = build_runner(config, resolve_model(str(folder)))
        assert built.config.model.max_model_len == built.memory.max_model_len == 72
        assert built.memory.num_blocks == (10,)


def test_auto_length_is_the_models_limit_if_it_fits() -> None:
    spec = shape("qwen3-0.6b")
    plan = plan_for(spec, GIB, 64 * GIB, max_model_len="auto", max_num_seqs=1)
    assert plan.max_model_len == spec.max_position
    tight = plan_for(spec, GIB, 4 * GIB, max_model_len="auto")
    block = spec.kv_bytes_per_token(4) * 16
    assert tight.num_blocks == (GIB // block,)
    assert tight.max_model_len == (GIB // block - 1) * 16


# ---- the largest step ------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
@pytest.mark.parametrize(
    ("seqs", "batched", "share"), [(3, 40, 13), (8, 5, 1), (1, 100, 63), (2, 1, 1)]
)
def test_worst_case_step_runs(architecture: str, seqs: int, batched: int, share: int) -> None:
    """All rows sample with every filter, and no row exceeds the maximum length."""
    folder = checkpoint(architecture)
    spec = load_spec(folder)
    config = config_for(spec, max_num_seqs=seqs, max_num_batched_tokens=batched, max_model_len=64)
    plan, num_blocks = worst_case_plan(config, len(spec.cache_groups), spec.vocab_size)
    rows = min(seqs, batched)
    assert plan.num_tokens.tolist() == [share] * rows
    assert plan.sample_rows.tolist() == list(range(rows))
    layout = KVLayout(spec.cache_groups, num_blocks, 16, torch.float32, CPU)
    model, backend = load_model(folder, spec, torch.float32, CPU), make_backend("torch", layout)
    sizes = seqs, 64, len(spec.cache_groups), 16
    runner = assemble(config, model, backend, sizes, spec.vocab_size, CPU)
    result = runner.run(plan)
    assert result.token_ids.shape == (rows, 1) and not result.row_errors


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "opt", "gpt2"])
def test_workspace_bounds_the_large_tensors(architecture: str) -> None:
    """It holds the feed-forward layer's activations and the logits in float32."""
    spec = load_spec(checkpoint(architecture))
    for tokens, seqs in ((256, 64), (1, 1), (1, 500)):
        min_bytes = 4 * (tokens * spec.intermediate_size * 2 + seqs * spec.vocab_size * 2)
        assert workspace_bytes(spec, 4, tokens, seqs) >= min_bytes


def test_build_runner_uses_the_planned_memory() -> None:
    folder = checkpoint("mistral")
    config = config_from_flat(model=str(folder), dtype="float64", max_model_len=64, max_num_seqs=2)
    built = build_runner(config, resolve_model(str(folder)))
    assert built.config.model.max_model_len == 64
    assert (built.dtype, built.device) == (torch.float64, CPU)
    loaded = load_model(folder, built.spec, torch.float64, CPU)
    assert built.memory.weights_bytes == model_bytes(loaded)
    assert built.memory.num_blocks == (2 * 5,)
    assert built.memory.pool_bytes == 10 * 16 * built.spec.kv_bytes_per_token(8)


class SharedGPU:
    """A GPU whose memory other processes use in part; it replaces torch's functions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int, others: int) -> None:
        self.total, self.others, self.ours, self.peak = total, others, 0, 0
        cuda: dict[str, Any] = {
            "mem_get_info": lambda device: (total - self.others - self.ours, total),
            "memory_allocated": lambda device: self.ours,
            "memory_reserved": lambda device: self.ours,
            "max_memory_allocated": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: None,
            "empty_cache": lambda: None,
            "get_device_name": lambda device: "a GPU",
        }
        for name, function in cuda.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def plan(self, weights: int, workspace: int, graphs: int, **settings: Any) -> MemoryPlan:
        """Plan with a runner that needs these bytes."""
        spec = shape("llama-3.1-8b")
        settings = {"max_model_len": 8192, "dtype": "bfloat16"} | settings
        config = derive_config(config_from_flat(model="m", **settings), spec, "cuda")
        free = self.total - self.others
        self.ours = weights
        gpu = self

        class Runner:
            def run(self, plan: Plan) -> None:
                gpu.peak = weights + workspace
                if gpu.peak > gpu.total - gpu.others:
                    raise torch.OutOfMemoryError

            def graph_bytes(self, config: EngineConfig) -> int:
                return graphs

        make: Any = lambda config, num_blocks: (Runner(), None)  # noqa: E731
        return plan_gpu_memory(config, spec, torch.device("cuda"), weights, free, make)


FIXED = memory_plan.GPU_CONTEXT_BYTES + memory_plan.GPU_RESERVE_BYTES


@pytest.mark.parametrize(("others", "utilization"), [(0, 0.9), (40 * GIB, 0.45), (60 * GIB, 0.2)])
def test_gpu_share_does_not_depend_on_other_processes(
    others: int, utilization: float, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    gpu = SharedGPU(monkeypatch, 140 * GIB, others)
    found = gpu.plan(15 * GIB, 2 * GIB, 1 * GIB, gpu_memory_utilization=utilization)
    planned = int(140 * GIB * utilization) - 18 * GIB - FIXED
    assert planned - (4 << 20) < found.pool_bytes <= planned
    assert (found.workspace_bytes, found.graph_bytes) == (2 * GIB, 1 * GIB)
    assert "graphs 1,024 MiB" in found.describe()
    assert not caplog.messages


def test_pool_shrinks_if_other_processes_use_the_share(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    gpu = SharedGPU(monkeypatch, 140 * GIB, 100 * GIB)
    found = gpu.plan(15 * GIB, 2 * GIB, 0, gpu_memory_utilization=0.9)
    planned = 40 * GIB - 17 * GIB - memory_plan.GPU_RESERVE_BYTES
    assert planned - (4 << 20) < found.pool_bytes <= planned
    assert "more than the free GPU memory" in caplog.text


def test_step_that_does_not_fit_names_the_setting_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SharedGPU(monkeypatch, 140 * GIB, 124 * GIB)
    with pytest.raises(OutOfMemory, match=r"8192 tokens.*a GPU.*Lower max_num_batched_tokens"):
        gpu.plan(15 * GIB, 2 * GIB, 0)


# ---- decode context parallelism ---------------------------------------------------------------

SHARED = {"tensor_parallel_size": 8, "decode_context_parallel_size": 2}


def test_context_parallel_ranks_hold_twice_as_many_tokens() -> None:
    spec = shape("qwen3-0.6b")  # 8 heads of keys and values
    spec = dataclasses.replace(spec, num_kv_heads=4)
    alone = config_for(spec, tensor_parallel_size=8, kv_cache_memory_bytes=GIB)
    shared = config_for(spec, **SHARED, kv_cache_memory_bytes=GIB)
    own = spec.of_ranks(8)
    assert [2 * size for size in block_bytes_of(shared, own)] == block_bytes_of(alone, own)
    plans = [plan_cpu_memory(config, own, 0, 64 * GIB) for config in (alone, shared)]
    assert plans[1].num_slots == 2 * plans[0].num_slots
    assert plans[1].pool_bytes == plans[0].pool_bytes


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel_size": 8, "decode_context_parallel_size": 4}, "does not divide the 2 "),
        ({"tensor_parallel_size": 4, "decode_context_parallel_size": 2}, "does not divide the 1 "),
        ({"tensor_parallel_size": 8, "decode_context_parallel_size": 3}, "must divide tensor"),
        ({**SHARED, "block_size": 3}, "does not divide block_size=3"),
    ],
)
def test_invalid_context_parallel_sizes_are_refused(settings: dict[str, Any], words: str) -> None:
    spec = dataclasses.replace(shape("qwen3-0.6b"), num_kv_heads=4)
    with pytest.raises(ConfigError, match=words):
        config_for(spec, **settings)


def test_plan_describes_itself_in_one_line() -> None:
    plan = MemoryPlan(100 * MIB, 5 * MIB, 2 * MIB, 30 * MIB, (1000, 50), 16, 4000)
    assert plan.num_slots == 16_000
    assert plan.describe() == (
        "memory: weights 5 MiB, workspace 2 MiB, KV pool 30 MiB = 16,000 tokens in 1,000 blocks of"
        " 16 (4.0 sequences of 4,000)"
    )
