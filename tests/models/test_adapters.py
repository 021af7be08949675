"""Adapters give the logits of the merged model, for each family and each grouping of rows."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.base.errors import ConfigError, ModelError
from quire.base.settings.lora import LoraConfig
from quire.models.checkpoint.adapter_files import WEIGHTS
from quire.models.checkpoint.files import safetensors_shapes, weight_files
from quire.models.load.adapters import AdaptedModel
from quire.models.load.loading import LoadOptions, load_model
from quire.ops.host.native import core
from quire.tools.verify.paged import CPU, Paging, run_paged
from tests.support.models.checkpoints import exact_logits, random_tokens, write_checkpoint
from tests.support.models.quick import one_of_each_kind
from tests.support.runner.adapters import Shape, merge, write_adapter

EXACT = 1e-10
MAX_RANK = 256


def adaptable(adapted: AdaptedModel, directory: Path) -> dict[str, Shape]:
    """Return the shapes of the modules that adapters can change."""
    stored = safetensors_shapes(weight_files(directory))
    places = adapted.places
    return {name: place.shape for name, place in places.items() if f"{name}.weight" in stored}


def load(directory: Path, spec: Any, dtype: torch.dtype = torch.float64) -> Any:
    return load_model(directory, spec, dtype, CPU, LoadOptions())


@pytest.mark.parametrize("variant", one_of_each_kind("phi3", "gpt_neox"))
def test_adapter_logits_match_the_merged_model(variant: str, tmp_path: Path) -> None:
    made = write_checkpoint(tmp_path / "base", variant)
    model = load(made.directory, made.spec)
    adapted = AdaptedModel(model, made.spec, LoraConfig(max_loras=1), torch.float64)
    modules = adaptable(adapted, made.directory)
    assert modules, "nothing would be tested"
    write_adapter(tmp_path / "adapter", modules)
    transposed = frozenset(name for name in modules if adapted.places[name].layer.is_transposed)
    merge(made.directory, tmp_path / "adapter", tmp_path / "merged", transposed)
    tokens, paging = random_tokens(12), Paging(dtype=torch.float64)
    [base] = run_paged(model, made.spec, tokens, [[12]], paging)
    adapted.slots.put(0, adapted.load(str(tmp_path / "adapter"), MAX_RANK))

    def use(lens: Sequence[int]) -> None:
        adapted.slots.begin_step([(0, range(lens[0]))])

    [found] = run_paged(model, made.spec, tokens, [[7, 5]], paging, use)
    [wanted] = run_paged(load(tmp_path / "merged", made.spec), made.spec, tokens, [[12]], paging)
    scale = wanted.abs().max()
    assert (found - wanted).abs().max() <= EXACT * scale
    assert (found - base).abs().max() > 1e-3 * scale


def test_adapter_logits_match_transformers_on_the_merged_checkpoint(tmp_path: Path) -> None:
    made = write_checkpoint(tmp_path / "base", "llama")
    model = load(made.directory, made.spec)
    adapted = AdaptedModel(model, made.spec, LoraConfig(max_loras=1), torch.float64)
    write_adapter(tmp_path / "adapter", adaptable(adapted, made.directory), 4, use_rslora=True)
    merge(made.directory, tmp_path / "adapter", tmp_path / "merged")
    adapted.slots.put(0, adapted.load(str(tmp_path / "adapter"), MAX_RANK))
    adapted.slots.begin_step([(0, range(9))])
    tokens = random_tokens(9)
    [found] = run_paged(model, made.spec, tokens, [[9]], Paging(dtype=torch.float64))
    [wanted] = exact_logits(tmp_path / "merged", tokens)
    assert (found - wanted).abs().max() <= EXACT * wanted.abs().max()


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        ("qwen3", torch.float32),
        ("qwen3", torch.bfloat16),
        ("qwen3", torch.float16),
        ("qwen3_moe", torch.float32),
        ("mixtral", torch.bfloat16),
    ],
)
def test_mixed_ranks_in_a_batch_give_the_same_bits_as_alone(
    variant: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Rows of ranks 1, 8, 64 and 256 and base rows, in the recorded program."""
    made = write_checkpoint(tmp_path / "base", variant)
    model = load(made.directory, made.spec, dtype)
    ranks = 1, 8, 64, 256
    adapted = AdaptedModel(model, made.spec, LoraConfig(max_loras=len(ranks)), dtype)
    modules = adaptable(adapted, made.directory)
    for slot, rank in enumerate(ranks):
        write_adapter(tmp_path / f"{rank}", modules, rank, seed=rank)
        adapted.slots.put(slot, adapted.load(str(tmp_path / f"{rank}"), MAX_RANK))
    paging = Paging(dtype=dtype, backend="cpu", native=True)
    sequences = random_tokens(9, 6, 11, 8, 5, 7)
    slots = [0, None, 1, 2, 3, 0]  # by sequence; None: the base model

    def run(numbers: Sequence[int], chunks: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        def use(lens: Sequence[int]) -> None:
            groups: dict[int, list[int]] = {}
            begin = 0
            for number, length in zip(numbers, lens, strict=True):
                if slots[number] is not None:
                    groups.setdefault(slots[number], []).extend(range(begin, begin + length))
                begin += length
            adapted.slots.begin_step(list(groups.items()))

        own = [sequences[number] for number in numbers]
        found = run_paged(model, made.spec, own, chunks, paging, use)
        adapted.slots.begin_step(())  # before the next program is traced
        return found

    together = run(range(6), [[4, 5], [6], [1, 10], [8], [0, 5], [3, 4]])
    for number, found in enumerate(together):
        [alone] = run([number], [[len(sequences[number])]])
        assert torch.equal(found, alone), f"sequence {number}"
    plain = load(made.directory, made.spec, dtype)
    [base] = run_paged(plain, made.spec, sequences[1:2], [[6]], paging)
    assert torch.equal(together[1], base)


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
@pytest.mark.parametrize("variant", ["llama", "mixtral"])
def test_the_core_program_matches_float64(variant: str, tmp_path: Path) -> None:
    made = write_checkpoint(tmp_path / "base", variant)
    tokens, found = random_tokens(10), []
    for dtype, native in ((torch.float64, False), (torch.float32, True)):
        model = load(made.directory, made.spec, dtype)
        adapted = AdaptedModel(model, made.spec, LoraConfig(max_loras=2), dtype)
        if not found:
            write_adapter(tmp_path / "adapter", adaptable(adapted, made.directory), 5)
        adapted.slots.put(1, adapted.load(str(tmp_path / "adapter"), MAX_RANK))
        use = partial(lambda slots, lens: slots.begin_step([(1, range(lens[0]))]), adapted.slots)
        paging = Paging(dtype=dtype, backend="cpu" if native else "torch", native=native)
        found += run_paged(model, made.spec, tokens, [[10]], paging, use)
    torch.testing.assert_close(found[1].double(), found[0], rtol=1e-4, atol=1e-4)


@pytest.fixture
def llama(tmp_path: Path) -> AdaptedModel:
    made = write_checkpoint(tmp_path / "base", "llama")
    return AdaptedModel(
        load(made.directory, made.spec), made.spec, LoraConfig(max_loras=1), torch.float64
    )


QUERY = "model.layers.0.self_attn.q_proj"


def test_an_adapter_may_change_one_part_of_a_merged_layer(
    llama: AdaptedModel, tmp_path: Path
) -> None:
    value = QUERY.replace("q_proj", "v_proj")
    write_adapter(tmp_path / "a", {value: llama.places[value].shape}, 3)
    [[part]] = llama.load(str(tmp_path / "a"), MAX_RANK).parts.values()
    assert part.first == llama.places[value].first > 0
    assert part.down_RK.shape == (3, 32) and part.up_RN.shape == (3, 16)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.layers.9.self_attn.q_proj", (32, 32), "no linear layer"),
        ("lm_head", (32, 32), "no linear layer"),
        ("q_proj", (32, 32), "no linear layer"),  # several layers have it
        ("model.layers.0.mlp.experts.0.gate_proj", (32, 32), "no linear layer"),
        (QUERY, (32, 31), "trained on another model"),
        (QUERY, (31, 32), "trained on another model"),
    ],
)
def test_an_adapter_of_another_model_is_refused(
    llama: AdaptedModel, tmp_path: Path, name: str, shape: Shape, message: str
) -> None:
    write_adapter(tmp_path / "a", {name: shape})
    with pytest.raises(ModelError, match=message):
        llama.load(str(tmp_path / "a"), MAX_RANK)


def test_modules_outside_lora_target_modules_are_refused(tmp_path: Path) -> None:
    made = write_checkpoint(tmp_path / "base", "llama")
    model = load(made.directory, made.spec)

    def adapted(*targets: str) -> AdaptedModel:
        config = LoraConfig(max_loras=1, lora_target_modules=targets)
        return AdaptedModel(model, made.spec, config, torch.float64)

    write_adapter(tmp_path / "a", {QUERY: (32, 32)})
    assert adapted("o_proj", "q_proj").load(str(tmp_path / "a"), MAX_RANK).parts
    with pytest.raises(ModelError, match=r"q_proj is none of lora_target_modules=\['o_proj'\]"):
        adapted("o_proj").load(str(tmp_path / "a"), MAX_RANK)
    with pytest.raises(ConfigError, match="no module 'experts'; it has down_proj, gate_proj"):
        adapted("q_proj", "experts")


def test_non_finite_weights_are_refused(llama: AdaptedModel, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", {QUERY: (32, 32)}, size=float("inf"))
    with pytest.raises(ModelError, match="not finite"):
        llama.load(str(tmp_path / "a"), MAX_RANK)


def test_a_loaded_adapter_does_not_change_with_its_file(tmp_path: Path) -> None:
    """PEFT's files are memory-mapped, and an engine of the same dtype does not convert them."""
    made = write_checkpoint(tmp_path / "base", "llama")
    model = load_model(made.directory, made.spec, torch.float32, CPU)
    adapted = AdaptedModel(model, made.spec, LoraConfig(max_loras=1), torch.float32)
    shapes = {name: place.shape for name, place in adapted.places.items()}
    path = write_adapter(tmp_path / "one", shapes, 4)
    parts = [part for each in adapted.load(str(path), 4).parts.values() for part in each]
    before = [part.down_RK.clone() for part in parts]
    weights = path / WEIGHTS
    with weights.open("r+b") as file:  # overwritten in place, as by `cp`
        file.write(bytes(weights.stat().st_size))
    assert before and all(map(torch.equal, before, [part.down_RK for part in parts]))
