"""The memory that `quire fit` reports is what the engine then uses.

Covers `tools/sizing/advice.py`, `tools/sizing/question.py`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base.errors import ConfigError, ModelError, OutOfMemory
from quire.base.settings.config import AUTO_LENGTH, config_from_flat
from quire.kv.sizing import MIB
from quire.models.checkpoint.formats import IN_THE_DTYPE, weight_formats
from quire.models.checkpoint.rank_place import RankPlace
from quire.models.checkpoint.source import ModelSource, resolve_model
from quire.models.load.loading import LoadOptions, load_model
from quire.models.load.packing import model_bytes, planned_bytes
from quire.models.parts import experts
from quire.models.registry import make_model
from quire.ops import gpu
from quire.ops.collectives.thread_group import thread_groups
from quire.ops.host.native import core
from quire.ops.weights import formats, pack
from quire.runner import build, derive
from quire.runner.build import build_runner
from quire.runner.memory_plan import (
    GPU_CONTEXT_BYTES,
    GPU_RESERVE_BYTES,
    GRAPH_BYTES,
    MAX_OTHER_GRAPHS,
    ladder,
    workspace_bytes,
)
from quire.runner.setup.built import BuiltRunner
from quire.spec.model_spec import load_spec
from quire.tools.devices import GPUS, Device, find_gpu
from quire.tools.sizing.alternatives import Alternative
from quire.tools.sizing.fit import Fit, fit
from tests.support.cases import pairwise
from tests.support.models.checkpoints import write_checkpoint
from tests.support.models.gguf_writer import Q4_0, Q8_0, convert
from tests.support.models.paged_forward import CPU
from tests.support.models.quantised_writers import gptq, write
from tests.support.models.quick import variants_with

GIB = 1 << 30
SOME_BYTES = 6 * MIB  # free memory that leaves tiny models a pool too small for all rows
needs_core = pytest.mark.skipif(core() is None, reason="the C++ core is not built")
# Settings that let memory bound the pools.
COMMON: dict[str, Any] = {"weight_cache": "off", "max_num_seqs": 40}

FORMATS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "float32": {"dtype": "float32", "block_size": 7, "max_model_len": "auto"},
    "float64": {"dtype": "float64"},
    "int8": {"quantization": "int8", "dtype": "bfloat16"},
    "int4": {"quantization": "int4", "quantization_group_size": 64, "dtype": "bfloat16"},
    "int4 with head": {"quantization": "int4", "quantized_head": "int4", "dtype": "bfloat16"},
    "int8 but head": {"quantization": "int8", "quantized_head": "none", "dtype": "float32"},
    "KV in int8": {"kv_cache_dtype": "int8", "dtype": "float16", "max_num_batched_tokens": 48},
    "given pool": {"kv_cache_memory_bytes": 200_000, "max_model_len": 100},
}


class Folders(dict[str, Path]):
    """Checkpoints of variants, written when a test first uses them."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory

    def __missing__(self, variant: str) -> Path:
        self[variant] = self._factory.mktemp(variant)
        write_checkpoint(self[variant], variant)
        return self[variant]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Folders(tmp_path_factory)


def on_cpu(num_bytes: int) -> Device:
    return Device("a CPU", "cpu", num_bytes)


def fitted(source: ModelSource, num_bytes: int, **settings: Any) -> Fit:
    return fit(config_from_flat(**(COMMON | settings)), source, on_cpu(num_bytes))


def built(
    monkeypatch: pytest.MonkeyPatch, source: ModelSource, num_bytes: int, **settings: Any
) -> BuiltRunner:
    """Build the engine's runner on a CPU with this free memory."""
    monkeypatch.setattr(build, "available_cpu_bytes", lambda: num_bytes)
    return build_runner(config_from_flat(**(COMMON | settings), device="cpu"), source)


def check_same(found: Fit, runner: BuiltRunner) -> None:
    """Assert that the memory plans and configs are equal."""
    assert found.memory == runner.memory
    assert found.memory.weights_bytes == sum(each.num_bytes for each in found.weights)
    assert [group.num_blocks for group in found.groups] == list(runner.memory.num_blocks)
    sizes = [group.block_bytes * group.num_blocks for group in found.groups]
    assert sum(sizes) == runner.memory.pool_bytes
    assert (found.config.model, found.config.scheduler) == (
        runner.config.model,
        runner.config.scheduler,
    )


# ---- the engine's own figures ----------------------------------------------------------------


@needs_core
@pytest.mark.parametrize(("variant", "formats"), variants_with(list(FORMATS)))
def test_plan_equals_the_engines_plan(
    variant: str, formats: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, settings = resolve_model(str(folders[variant])), FORMATS[formats]
    found = fitted(source, SOME_BYTES, **settings)
    check_same(found, built(monkeypatch, source, SOME_BYTES, **settings))
    assert found.warnings == ()


@pytest.mark.parametrize(("kv_format", "row"), [("auto", 2 * 28), ("int8", 28 + 4), ("fp8", 28)])
def test_latent_vectors_follow_the_formula(
    kv_format: str, row: int, folders: dict[str, Path]
) -> None:
    """Each token and layer has one vector of kv_lora_rank + qk_rope_head_dim numbers."""
    source = resolve_model(str(folders["deepseek_v3"]))
    found = fitted(source, SOME_BYTES, dtype="bfloat16", kv_cache_dtype=kv_format)
    raw = json.loads((folders["deepseek_v3"] / "config.json").read_text())
    assert raw["kv_lora_rank"] + raw["qk_rope_head_dim"] == 28
    assert [group.token_bytes for group in found.groups] == [raw["num_hidden_layers"] * row]


def test_stacked_experts_match_the_config(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "mixtral")
    (tmp_path / "model.safetensors").unlink()
    checkpoint.model.save_pretrained(tmp_path, save_original_format=False)
    assert fitted(resolve_model(str(tmp_path)), SOME_BYTES).warnings == ()


@needs_core
@pytest.mark.parametrize(
    ("settings", "kind", "variant"),
    pairwise(
        [{}, {"quantization": "int4"}, {"quantization": "none"}],
        [pytest.param(Q8_0, id="Q8_0"), pytest.param(Q4_0, id="Q4_0")],
        ["llama", "qwen2", "gpt2", "mistral_window"],
    ),
)
def test_plan_of_a_gguf_file_equals_the_engines_plan(
    variant: str,
    kind: int,
    settings: dict[str, Any],
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Quantised layers and tied tables keep the formats of the file."""
    source = resolve_model(str(convert(folders[variant], tmp_path / "model.gguf", kind)))
    found = fitted(source, SOME_BYTES, **settings)
    check_same(found, built(monkeypatch, source, SOME_BYTES, **settings))
    assert found.warnings == ()
    names = {each.name for each in found.weights}
    assert ("int8 in groups of 32" in names) == (not settings and kind == Q8_0)
    is_int4 = settings.get("quantization") == "int4" or (not settings and kind == Q4_0)
    assert ("int4 in groups of 32" in names) == is_int4
    assert [each.weights for each in found.alternatives][::2] == [
        "as in the file",
        found.config.model.dtype,
        "int8",
        "int4",
    ]


@needs_core
@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ("opt-125m", {"quantization": "int8", "kv_cache_dtype": "int8"}),
        pytest.param("qwen3-0.6b", {}, marks=pytest.mark.slow),
        pytest.param(
            "qwen3-0.6b",
            {"quantization": "int8", "kv_cache_dtype": "int8"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_plan_of_a_large_shape_equals_the_engines_plan(
    shape: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = resolve_model(f"shape:{shape}")
    settings = settings | {"max_model_len": 2048}
    found = fitted(source, 4 * GIB, **settings)
    runner = built(monkeypatch, source, 4 * GIB, **settings)
    check_same(found, runner)


@needs_core
def test_planned_weights_equal_the_loaded_model(folders: dict[str, Path]) -> None:
    """The expected bytes are counted on the loaded model, not on a plan."""
    for variant in ("qwen3_tied", "gpt2", "opt_350m"):
        source = resolve_model(str(folders[variant]))
        spec = load_spec(source.directory)
        settings = {"dtype": "bfloat16", "quantization": "int4"}
        config = config_from_flat(**settings).model
        options = build.LoadOptions(formats=build.weight_formats(config))
        model = build.load_model(
            source.directory, spec, torch.bfloat16, torch.device("cpu"), options
        )
        assert fitted(source, SOME_BYTES, **settings).memory.weights_bytes == model_bytes(model)


@needs_core
@pytest.mark.parametrize("variant", ["llama_multi_query", "qwen3_next", "gpt2", "qwen3_moe_some"])
@pytest.mark.parametrize("name", ["as it is", "int8", "float64"])
def test_plan_of_tensor_parallel_ranks_equals_a_loaded_rank(
    name: str, variant: str, folders: dict[str, Path]
) -> None:
    folder = folders[variant]
    settings = FORMATS[name] | {"tensor_parallel_size": 2}
    found = fitted(resolve_model(str(folder)), 12 * MIB, **settings)
    one = fitted(resolve_model(str(folder)), 6 * MIB, **FORMATS[name])
    own = LoadOptions(
        formats=weight_formats(found.config.model), place=RankPlace(thread_groups(2)[0])
    )
    spec, dtype = load_spec(folder), getattr(torch, found.config.model.dtype)
    assert found.memory.weights_bytes == model_bytes(load_model(folder, spec, dtype, CPU, own))
    assert found.memory.weights_bytes < one.memory.weights_bytes
    assert found.memory.num_slots >= one.memory.num_slots
    kv = [sum(group.token_bytes for group in each.groups) for each in (found, one)]
    assert kv[0] == (kv[1] if variant == "llama_multi_query" else kv[1] // 2)
    assert not found.warnings


@needs_core
@pytest.mark.parametrize("variant", ["llama_tied", "qwen3_5", "qwen2_windows"])
def test_plan_reports_the_fullest_stage(variant: str, folders: dict[str, Path]) -> None:
    """Each stage has as many blocks as the fullest one can hold."""
    source = resolve_model(str(folders[variant]))
    found = fitted(source, 12 * MIB, dtype="float32", pipeline_parallel_size=2)
    one = fitted(source, 6 * MIB, dtype="float32")
    spec = load_spec(folders[variant])
    places = [RankPlace(stage=stage, num_stages=2) for stage in (0, 1)]
    weights = [
        model_bytes(load_model(source.directory, spec, torch.float32, CPU, LoadOptions(place=each)))
        for each in places
    ]
    assert found.memory.weights_bytes in weights
    assert len(found.groups) == len(one.groups)
    assert found.memory.num_slots >= one.memory.num_slots and not found.warnings


def test_cores_share_a_cpu_but_not_a_gpu(folders: dict[str, Path]) -> None:
    source = resolve_model(str(folders["llama_tied"]))
    one, ranked = fitted(source, 6 * MIB), {"data_parallel_size": 2}
    assert fitted(source, 12 * MIB, **ranked).memory == one.memory
    ranks = {"tensor_parallel_size": 2}
    of_ranks = fitted(source, 12 * MIB, **ranks)
    assert fitted(source, 24 * MIB, **ranks, **ranked).memory == of_ranks.memory
    gpu = Device("a GPU", "cuda", 8 << 30)
    plans = [fit(config_from_flat(**each), source, gpu).memory for each in ({}, ranked)]
    assert plans[0] == plans[1]


@needs_core
def test_ranks_of_quantised_checkpoints_equal_loaded_ranks(tmp_path: Path) -> None:
    ranked = {"dtype": "float32", "tensor_parallel_size": 2}
    for number, form in enumerate((gptq(4, 32), gptq(4, 32, desc_act=True))):
        path, _ = write(tmp_path / str(number), form, intermediate_size=128)
        found = fitted(resolve_model(str(path)), 12 * MIB, **ranked)
        own = LoadOptions(place=RankPlace(thread_groups(2)[0]))
        model = load_model(path, load_spec(path), torch.float32, CPU, own)
        orders = 2 * 2 * 64 * 4 * number  # the orders of sorted inputs, which no config predicts
        assert found.memory.weights_bytes + orders == model_bytes(model)
        file = convert(
            write_checkpoint(tmp_path / f"plain{number}", "gpt2").directory,
            tmp_path / f"{number}.gguf",
            (Q8_0, Q4_0)[number],
        )
        found = fitted(resolve_model(str(file)), 12 * MIB, **ranked, quantization="none")
        own = LoadOptions(formats=IN_THE_DTYPE, place=RankPlace(thread_groups(2)[0]))
        model = load_model(file, load_spec(file), torch.float32, CPU, own)
        assert found.memory.weights_bytes == model_bytes(model)
    path, _ = write(tmp_path / "odd", gptq(4, 32), intermediate_size=96)
    with pytest.raises(ConfigError, match="Each of 2 ranks has 48 of its 96"):
        fitted(resolve_model(str(path)), 12 * MIB, **ranked)


def test_alternatives_equal_a_fit_with_their_settings(folders: dict[str, Path]) -> None:
    source = resolve_model(str(folders["llama_tied"]))
    found = fitted(source, SOME_BYTES, dtype="bfloat16")
    assert [(a.weights, a.kv) for a in found.alternatives] == [
        (weights, kv) for weights in ("bfloat16", "int8", "int4") for kv in ("auto", "int8")
    ]
    assert [a.note for a in found.alternatives] == ["as asked", *[""] * 5]
    for row in found.alternatives:
        quantization = None if row.weights == "bfloat16" else row.weights
        settings = {"dtype": "bfloat16", "quantization": quantization, "kv_cache_dtype": row.kv}
        other = fitted(source, SOME_BYTES, **settings)
        longest = fitted(source, SOME_BYTES, **settings, max_model_len=AUTO_LENGTH).memory
        expected = Alternative(
            row.weights, row.kv, other.memory.weights_bytes, other.memory.pool_bytes,
            other.memory.num_slots, other.requests[-1].at_once, row.note,
            longest.max_model_len, other.requests[-1].at_once,
        )  # fmt: skip
        assert row == expected


def test_requests_at_once_are_counted_in_blocks(folders: dict[str, Path]) -> None:
    """Of 57 blocks with 16 tokens, 7 requests of 128 tokens hold 56."""
    source = resolve_model(str(folders["llama"]))
    spec = load_spec(source.directory)
    pool = 57 * spec.kv_bytes_per_token(4) * 16
    settings = {"kv_cache_memory_bytes": pool, "dtype": "float32"}
    found = fitted(source, SOME_BYTES, **settings)
    assert found.memory.num_blocks == (57,)
    (only,) = found.requests
    assert (only.length, only.at_once, only.by_memory) == (128, 7, 7)
    few = fitted(source, SOME_BYTES, **settings, max_num_seqs=5)
    assert (few.requests[0].at_once, few.requests[0].by_memory) == (5, 5)
    large = fit(config_from_flat(), resolve_model("shape:qwen3-0.6b"), on_cpu(64 * GIB))
    assert [each.length for each in large.requests] == [512, 2048, 8192, 40960]


# ---- GPUs ------------------------------------------------------------------------------------


def test_gpu_pool_is_the_share_minus_fixed_memory() -> None:
    """The share minus weights, CUDA's context, workspace, graphs and reserve is cut into blocks."""
    source = resolve_model("shape:llama-3.1-8b")
    spec = load_spec(source.directory)
    config = config_from_flat(gpu_memory_utilization=0.9, max_model_len=8192)
    found = fit(config, source, find_gpu("h100"))
    weights = 8_030_261_248 * 2  # parameters, in bfloat16
    assert found.memory.weights_bytes == weights
    workspace = workspace_bytes(spec, 2, 8192, 256)
    graphs = workspace_bytes(spec, 2, 2048, 256) + GRAPH_BYTES * (
        len(ladder(256)) + MAX_OTHER_GRAPHS
    )
    assert found.memory.graph_bytes == graphs
    used = weights + workspace + graphs + GPU_CONTEXT_BYTES + GPU_RESERVE_BYTES
    budget = int(GPUS["H100"] * MIB * 0.9) - used
    block = spec.kv_bytes_per_token(2) * 16
    assert found.memory.num_blocks == (budget // block,)
    assert found.requests[-1].at_once == budget // block // 512
    notes = {(a.weights, a.kv): a.note for a in found.alternatives}
    assert notes.pop(("bfloat16", "auto")) == "as asked"
    assert notes.pop(("bfloat16", "int8")) == "" and "8.9" in notes.pop(("bfloat16", "fp8"))
    assert {note for (_, kv), note in notes.items() if kv != "fp8"} == {""}
    assert {weights for weights, _ in notes} == {"fp8", "int8", "int4"}
    sizes = {a.weights: a.weights_bytes for a in found.alternatives}
    table = spec.vocab_size * spec.hidden_size * 2
    assert sizes["fp8"] == pytest.approx((weights - table) / 2 + table, rel=0.001)
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("shape", "quantization"),
    [
        *[
            (shape, each)
            for shape in ("qwen3-8b", "qwen3-0.6b")
            for each in ("int4", "int8", "fp8")
        ],
        ("mixtral-8x7b", "int4"),
        pytest.param("qwen3-30b-a3b", "int4", marks=pytest.mark.slow),
        pytest.param("qwen3-30b-a3b", "int8", marks=pytest.mark.slow),
        pytest.param("qwen3-30b-a3b", "fp8", marks=pytest.mark.slow),
    ],
)
def test_quantised_weights_on_a_gpu_equal_the_engines_plan(
    shape: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes stacked experts and tied tables."""
    pytest.importorskip("triton")
    settings = {"quantization": quantization, "kv_cache_dtype": "int8", "dtype": "bfloat16"}
    config = config_from_flat(max_model_len=8192, **settings)
    found = fit(config, resolve_model(f"shape:{shape}"), find_gpu("80GB"))
    assert found.warnings == ()
    ranked = [a for a in found.alternatives if a.note.startswith("as asked")]
    assert [(a.weights, a.kv, a.note) for a in ranked] == [(quantization, "int8", "as asked")]
    assert ranked[0].weights_bytes == found.memory.weights_bytes
    monkeypatch.setattr(gpu, "is_gpu", lambda device: True)
    monkeypatch.setattr(experts, "experts_class", lambda device: experts.StackedExperts)
    empty = make_model(found.spec, torch.bfloat16, torch.device("meta"))
    planned = planned_bytes(
        empty, torch.bfloat16, torch.device("cpu"), weight_formats(config.model)
    )
    assert planned == found.memory.weights_bytes


def test_quantization_is_advised_if_nothing_else_helps() -> None:
    source, config = resolve_model("shape:llama-3.1-8b"), config_from_flat(max_model_len=8192)
    with pytest.raises(
        OutOfMemory, match="fit with --quantization fp8 or with --quantization int4."
    ):
        fit(config, source, find_gpu("16GiB"))
    with pytest.raises(OutOfMemory, match="fit with --quantization int4 --gpu-memory-utilization"):
        fit(config, source, find_gpu("8GiB"))
    quantised = config_from_flat(max_model_len=8192, quantization="fp8")
    assert fit(quantised, source, find_gpu("16GiB"))


@pytest.mark.parametrize(
    ("name", "found", "num_bytes"),
    [
        ("H200", "H200", 143_771 * MIB),
        ("h100 nvl", "H100-NVL", 95_830 * MIB),
        ("h100_SXM", "H100", 81_559 * MIB),
        ("NVIDIA GeForce RTX 4090", "RTX-4090", 24_564 * MIB),
        ("rtx4090", "RTX-4090", 24_564 * MIB),
        ("A100-80GB", "A100-80", 81_920 * MIB),
        ("NVIDIA L4", "L4", 23_034 * MIB),
        ("24GB", "a GPU of 24GB", 24 * 10**9),
        ("1.5 GiB", "a GPU of 1.5 GiB", 3 << 29),
    ],
)
def test_gpu_names_are_recognised(name: str, found: str, num_bytes: int) -> None:
    assert find_gpu(name) == Device(found, "cuda", num_bytes)


@pytest.mark.parametrize("name", ["", "A100", "0GB", "24", "-3GB", "gb", "H1000"])
def test_unknown_gpus_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"no device .*known are cpu .*H100-NVL.*sizes such as"):
        find_gpu(name)


# ---- models that do not fit ------------------------------------------------------------------


def test_error_reports_the_missing_memory() -> None:
    """The model fits with the reported memory in addition, but not with less."""
    source = resolve_model("shape:qwen3-1.7b")
    for settings in ({"max_model_len": 64}, {"max_model_len": 64, "kv_cache_dtype": "int8"}):
        with pytest.raises(OutOfMemory) as caught:
            fitted(source, 3 * GIB, **settings)
        message = str(caught.value)
        assert "does not fit a CPU with 3,072 MiB" in message
        lacking = int(message.split(" MiB are missing")[0].split()[-1].replace(",", ""))
        assert fitted(source, 3 * GIB + (lacking + 1) * MIB, **settings)
        with pytest.raises(OutOfMemory):
            fitted(source, 3 * GIB + (lacking - 1) * MIB, **settings)


@needs_core
def test_advised_settings_fit() -> None:
    source = resolve_model("shape:qwen3-0.6b")
    with pytest.raises(OutOfMemory, match=r"one request of 40,960 tokens") as caught:
        fitted(source, 12 * GIB)
    words = str(caught.value).split("It would fit with ")[1].rstrip(".")
    advised = words.split(" or with ")
    assert len(advised) == 3
    assert {each.split()[0] for each in advised} == {
        "--max-model-len", "--kv-cache-memory-bytes", "--kv-cache-dtype"
    }  # fmt: skip
    for each in advised:
        name, value = each.removeprefix("--").split()
        plain = int(value) if value.isdigit() else value
        assert fitted(source, 12 * GIB, **{name.replace("-", "_"): plain})
    with pytest.raises(OutOfMemory, match="fit with --quantization int8"):
        fitted(source, 1200 * MIB, max_model_len=600)
    with pytest.raises(OutOfMemory, match="use a smaller model or a larger device"):
        fitted(source, 100 * MIB)


def test_advised_gpu_settings_fit() -> None:
    source, config = resolve_model("shape:llama-3.1-8b"), config_from_flat(max_model_len=8192)
    words = "--gpu-memory-utilization 0.97 --max-num-batched-tokens 2048"
    with pytest.raises(OutOfMemory) as caught:
        fit(config, source, find_gpu("19.5GiB"))
    assert str(caught.value).endswith(f"It would fit with {words}.")
    tight = config_from_flat(
        max_model_len=8192, gpu_memory_utilization=0.97, max_num_batched_tokens=2048
    )
    assert fit(tight, source, find_gpu("19.5GiB"))
    with pytest.raises(OutOfMemory, match=f"{words} --enforce-eager"):
        fit(config, source, find_gpu("18.5GiB"))


def test_settings_that_the_engine_refuses_are_refused(folders: dict[str, Path]) -> None:
    source = resolve_model(str(folders["llama"]))
    for settings, message in (
        ({"dtype": "float64", "quantization": "int8"}, "not float64"),
        ({"quantization": "int4", "quantization_group_size": 48}, "must be one of 32, 64, 128"),
        ({"max_model_len": 1000}, "more than the model supports"),
    ):
        with pytest.raises(ConfigError, match=message):
            fitted(source, SOME_BYTES, **settings)


def test_pool_larger_than_the_memory_gets_a_warning(folders: dict[str, Path]) -> None:
    source = resolve_model(str(folders["llama"]))
    found = fitted(source, SOME_BYTES, kv_cache_memory_bytes=100 * MIB)
    (warning,) = found.warnings
    assert warning.startswith("kv_cache_memory_bytes is 100 MiB, but only ")


# ---- headers that contradict the config ------------------------------------------------------


def changed(folder: Path, to: Path, **tensors: torch.Tensor | None) -> ModelSource:
    """Write the checkpoint with tensors replaced or removed."""
    tensors_left = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        tensors_left.pop(name, None)
        if tensor is not None:
            tensors_left[name] = tensor
    save_file(tensors_left, to / "model.safetensors")
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    return resolve_model(str(to))


def test_mismatched_weights_get_warnings(folders: dict[str, Path], tmp_path: Path) -> None:
    norm, down = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"
    odd = {norm: None, down: torch.zeros(3, 3), "extra.weight": torch.zeros(2)}
    source = changed(folders["llama"], tmp_path, **odd)
    assert fitted(source, SOME_BYTES).warnings == (
        f"the weight files lack {norm}",
        f"the weight files have other shapes than the config requires: {down}",
        "the weight files hold tensors that no layer uses: extra.weight",
    )


def test_unloadable_weights_get_warnings(folders: dict[str, Path], tmp_path: Path) -> None:
    """One tensor has a dtype of quantised values; one file is truncated after its header."""
    norm = {"model.norm.weight": torch.zeros(32, dtype=torch.int8)}
    source = changed(folders["llama"], tmp_path, **norm)
    (warning,) = fitted(source, SOME_BYTES).warnings
    assert warning.startswith("the tensor model.norm.weight holds I8")
    file = source.directory / "model.safetensors"
    file.write_bytes((folders["llama"] / file.name).read_bytes()[:-1])
    (warning,) = fitted(source, SOME_BYTES).warnings
    assert f"{file} cannot be read" in warning


def test_redundant_tensors_and_names_get_no_warning(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """A tied head is stored twice, or names lack the prefix."""
    head = load_file(folders["qwen3_tied"] / "model.safetensors")["model.embed_tokens.weight"]
    source = changed(folders["qwen3_tied"], tmp_path, **{"lm_head.weight": head})
    assert fitted(source, SOME_BYTES).warnings == ()
    plain = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("model."): t for name, t in plain.items() if name[:2] != "lm"}
    save_file(bare, tmp_path / "model.safetensors")
    assert fitted(source, SOME_BYTES).warnings == ()


def test_config_alone_gives_the_plan_and_a_warning(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    config = (folders["llama"] / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    found = fitted(resolve_model(str(tmp_path)), SOME_BYTES)
    assert found.memory == fitted(resolve_model(str(folders["llama"])), SOME_BYTES).memory
    (warning,) = found.warnings
    assert warning == "only the config was checked: there are no weight files next to it"
    assert fitted(resolve_model(str(tmp_path)), SOME_BYTES, load_format="dummy").warnings == ()
    (tmp_path / "config.json").write_text(json.dumps(json.loads(config) | {"model_type": "bloom"}))
    with pytest.raises(ModelError, match="'bloom' is not supported"):
        fitted(resolve_model(str(tmp_path)), SOME_BYTES, model_impl="quire")


def test_uncheckable_weight_files_get_a_warning(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folders["llama"] / "config.json").read_bytes())
    index = tmp_path / "model.safetensors.index.json"
    for name, content, problem in (
        ("pytorch_model.bin", "", "has its weights only as pytorch_model.bin"),
        (index.name, '{"weight_map": {"a": "1.safetensors"}}', "lacks 1.safetensors"),
        ("1.safetensors", "{}", "is not a valid safetensors file"),
    ):
        (tmp_path / name).write_text(content)
        (warning,) = fitted(resolve_model(str(tmp_path)), SOME_BYTES).warnings
        assert warning.startswith("the weight files could not be checked: ") and problem in warning


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_plan_without_the_core_equals_torch(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If oneDNN packs the weights, a tied table is kept in addition."""
    for module in (formats, pack, derive):
        monkeypatch.setattr(module, "core", lambda: None)
    source, torch_dtype = resolve_model("shape:qwen3-0.6b"), getattr(torch, dtype)
    found = fitted(source, 64 * GIB, dtype=dtype, max_model_len=2048)
    empty = make_model(found.spec, torch_dtype, torch.device("meta"))
    assert found.memory.weights_bytes == planned_bytes(empty, torch_dtype, torch.device("cpu"))
    assert [(a.weights, a.kv) for a in found.alternatives] == [(dtype, "auto")]
    with pytest.raises(ConfigError, match=r"needs the C\+\+ core|not float64"):
        fitted(source, 64 * GIB, dtype=dtype, quantization="int8")
    with pytest.raises(OutOfMemory, match="fit with --max-model-len auto") as caught:
        fitted(source, 6 * GIB, dtype=dtype)
    assert "int8" not in str(caught.value)
