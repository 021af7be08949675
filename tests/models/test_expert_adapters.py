"""Adapters of experts give the logits of the model into which they are merged."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.base.errors import ModelError
from quire.base.settings.lora import LoraConfig
from quire.models.checkpoint.adapter_files import AdaptedModule, read_adapter
from quire.models.checkpoint.rank_place import RankPlace
from quire.models.checkpoint.sources import rows_of
from quire.models.load.adapters import AdaptedModel, Change, ModulePosition, by_outputs
from quire.models.load.expert_adapters import expert_matrices
from quire.models.load.loading import LoadOptions, load_model
from quire.ops.collective import RankGroup
from quire.ops.collectives.thread_group import run_ranks
from quire.spec.adapter_config import CONFIG
from quire.tools.verify.paged import CPU, Paging, run_paged
from tests.support.models.checkpoints import (
    MIXTRAL,
    VARIANTS,
    Checkpoint,
    exact_logits,
    float64_model,
    logits_in_float64,
    random_tokens,
    write_checkpoint,
    write_own,
)
from tests.support.models.ranks import gather_logits
from tests.support.runner.adapters import (
    Shape,
    merge_parameters,
    write_adapter,
    write_parameters_adapter,
)

EXACT = 1e-10
TOKENS = random_tokens(9)
slow = pytest.mark.slow


def logits_with(adapter: Path, made: Checkpoint, place: RankPlace | None = None) -> torch.Tensor:
    options = LoadOptions() if place is None else LoadOptions(place=place)
    model = load_model(made.directory, made.spec, torch.float64, CPU, options)
    adapted = AdaptedModel(model, made.spec, LoraConfig(max_loras=1), torch.float64)
    adapted.slots.put(0, adapted.load(str(adapter), 16))
    adapted.slots.begin_step([(0, range(len(TOKENS[0])))])
    spec = made.spec
    if place is not None:
        gather_logits(model, place.tensor, spec.vocab_size)
        spec = spec.of_ranks(place.tensor.size, has_whole_experts=place.has_whole_experts)
    [found] = run_paged(model, spec, TOKENS, [[9]], Paging(dtype=torch.float64))
    return found


@pytest.mark.parametrize(
    ("variant", "is_swapped"),
    [
        ("qwen3_moe", False),  # the checkpoint has modules for each expert
        ("mixtral", True),  # the same, with other names than transformers'
        ("gpt_oss", False),  # inputs before outputs; rows of gate and up alternate
        *(pytest.param(n, False, marks=slow) for n in ("llama4", "qwen3_5_moe", "deepseek_v3")),
        *(pytest.param(n, True, marks=slow) for n in ("qwen3_moe", "glm4_moe")),
    ],
)
def test_adapters_of_joint_expert_tensors_match_the_merged_model(
    variant: str, is_swapped: bool, tmp_path: Path
) -> None:
    made = write_checkpoint(tmp_path / "base", variant)
    model = float64_model(made.directory)
    adapter = write_parameters_adapter(tmp_path / "adapter", model, is_swapped=is_swapped)
    merged = merge_parameters(model, adapter, is_swapped=is_swapped)
    [wanted] = logits_in_float64(merged, TOKENS)
    [base] = exact_logits(made.directory, TOKENS)
    found = logits_with(adapter, made)
    assert (found - wanted).abs().max() <= EXACT * wanted.abs().max()
    assert (found - base).abs().max() > 1e-3 * wanted.abs().max()


@pytest.mark.parametrize("has_whole_experts", [False, True])
@pytest.mark.parametrize("is_joint", [False, True])
def test_ranks_add_up_their_parts_of_an_adapter(
    has_whole_experts: bool, is_joint: bool, tmp_path: Path
) -> None:
    """Each rank has a part of each expert, or some of the experts."""
    made = write_own(tmp_path / "base", "mixtral", MIXTRAL | {"num_local_experts": 4})
    if is_joint:
        model = float64_model(made.directory)
        adapter = write_parameters_adapter(tmp_path / "adapter", model)
    else:
        whole = load_model(made.directory, made.spec, torch.float64, CPU)
        places = AdaptedModel(whole, made.spec, LoraConfig(max_loras=1), torch.float64).places
        shapes: dict[str, Shape] = {name: place.shape for name, place in places.items()}
        adapter = write_adapter(tmp_path / "adapter", shapes, 3)
    wanted = logits_with(adapter, made)

    def logits(group: RankGroup) -> torch.Tensor:
        return logits_with(adapter, made, RankPlace(group, has_whole_experts=has_whole_experts))

    for found in run_ranks(2, logits):
        assert (found - wanted).abs().max() <= EXACT * wanted.abs().max()


def change(adapter: Path, **fields: object) -> None:
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(config | fields))


@pytest.fixture
def base(tmp_path: Path) -> Checkpoint:
    return write_checkpoint(tmp_path / "base", "qwen3_moe")


def load(adapter: Path, made: Checkpoint) -> None:
    model = load_model(made.directory, made.spec, torch.float64, CPU)
    AdaptedModel(model, made.spec, LoraConfig(max_loras=1), torch.float64).load(str(adapter), 16)


def test_the_rank_is_counted_per_expert(base: Checkpoint, tmp_path: Path) -> None:
    adapter = write_parameters_adapter(tmp_path / "a", float64_model(base.directory), 5)
    files = read_adapter(adapter, 5)
    assert files.max_rank == 5
    assert {module.num_experts for module in files.modules} == {6}
    with pytest.raises(ModelError, match="rank 5, above max_lora_rank=4"):
        read_adapter(adapter, 4)


@pytest.mark.parametrize("option", ["rank_pattern", "alpha_pattern"])
def test_rank_and_alpha_patterns_are_refused(base: Checkpoint, tmp_path: Path, option: str) -> None:
    adapter = write_parameters_adapter(tmp_path / "a", float64_model(base.directory))
    change(adapter, **{option: {"q_proj": 4}})
    with pytest.raises(ModelError, match=f"{option} together with target_parameters"):
        read_adapter(adapter)


def test_a_rank_that_contradicts_the_config_is_refused(base: Checkpoint, tmp_path: Path) -> None:
    adapter = write_parameters_adapter(tmp_path / "a", float64_model(base.directory))
    change(adapter, r=4)
    with pytest.raises(ModelError, match="18 rows, which is no multiple of r=4"):
        read_adapter(adapter)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 4}, "is for 4 experts, and the model has 6"),
        ({"moe_intermediate_size": 20}, "of each expert, but the model has"),
    ],
)
def test_adapters_for_other_expert_sizes_are_refused(
    base: Checkpoint, tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    kind, config = VARIANTS["qwen3_moe"]
    other = write_own(tmp_path / "other", kind, config | changes)
    adapter = write_parameters_adapter(tmp_path / "a", float64_model(other.directory))
    with pytest.raises(ModelError, match=message):
        load(adapter, base)


def test_square_tensors_are_refused(tmp_path: Path) -> None:
    """Versions of PEFT disagree about which dimension of a parameter is its input."""
    base = write_own(tmp_path / "base", "mixtral", MIXTRAL | {"intermediate_size": 32})
    adapter = write_parameters_adapter(tmp_path / "a", float64_model(base.directory))
    with pytest.raises(ModelError, match="down_proj is square"):
        load(adapter, base)


def test_matrices_of_one_expert_are_extracted() -> None:
    """Two experts of rank 2, with 1 input and 1 output."""
    module = AdaptedModule("experts", 2, 1, 1, 1.0, "a", "b", num_experts=2)
    down, up = torch.tensor([[0.0], [1], [2], [3]]), torch.tensor([[0.0, 1, 2, 3]])
    down_RK, up_NR = expert_matrices(module, down, up, 1, is_turned=False)
    assert down_RK.tolist() == [[2], [3]] and up_NR.tolist() == [[1, 3]]
    down_RK, up_NR = expert_matrices(module, down, up, 1, is_turned=True)
    assert down_RK.tolist() == [[1], [3]] and up_NR.tolist() == [[2, 3]]


def test_changes_are_split_into_disjoint_groups_of_outputs() -> None:
    """A set of adapters may change gate and up together, and gate alone. Threads add to all groups
    of outputs in parallel."""
    layer: Any = SimpleNamespace(module_rows=[("gate", rows_of(2)), ("up", rows_of(3))])
    whole, gate = (ModulePosition(layer, 0, 0, rows_of(size)) for size in (5, 2))
    joint = Change("both", torch.ones(1, 4), torch.arange(5.0)[None], 1.0)
    alone = Change("gate", torch.ones(1, 4), torch.ones(1, 2), 2.0)
    assert dict(by_outputs([(whole, joint), (whole, joint)])) == {0: [joint, joint]}
    found = dict(by_outputs([(whole, joint), (gate, alone)]))
    widths = {first: [each.up_RN.tolist() for each in own] for first, own in found.items()}
    assert widths == {0: [[[0, 1]], [[1, 1]]], 2: [[[2, 3, 4]]]}
