"""Tensor parallelism: ranks that each have a part of every layer, compared with one rank.

Covers `models/checkpoint/sources.py`, and `models/families/olmo2.py`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base.errors import ConfigError, ModelError
from quire.models import registry
from quire.models.checkpoint.rank_place import RankPlace
from quire.models.checkpoint.sources import Source
from quire.models.eagle3 import Eagle3
from quire.models.gguf.weights import GGUFTensor
from quire.models.load.assembly import empty_model
from quire.models.load.cache_files import WeightCache
from quire.models.load.loading import LoadOptions, load_model
from quire.models.load.packing import model_bytes, planned_bytes
from quire.models.parts import experts
from quire.models.parts.decoder import Decoder
from quire.models.registry import model_spec
from quire.ops.attention.select import make_backend
from quire.ops.collective import RankGroup
from quire.ops.collectives.thread_group import run_ranks, thread_groups
from quire.ops.host.native import core
from quire.ops.registry import record_ops
from quire.spec.cuts import Cut, cut_evenly, cut_or_repeat, cut_vocabulary
from quire.spec.eagle3_spec import head_options, head_spec
from quire.spec.model_spec import load_spec, parse_spec
from tests.models.test_eagle3 import SHAPES, TOKENS, Target
from tests.support.cases import in_turn
from tests.support.models.checkpoints import HYBRID, LLAMA, VARIANTS, write_checkpoint, write_own
from tests.support.models.draft_heads import LAYER, HeadShape, target_spec, write_head
from tests.support.models.gguf_writer import Q8_0, convert
from tests.support.models.paged_forward import CPU, RowPart, make_layout, make_step
from tests.support.models.quick import KINDS
from tests.support.models.ranks import logits_of

# Variants for at most two ranks: models with two heads, or with two or six value heads.
FOR_TWO = (
    "phi3_long",
    "phi3_short",
    "gpt_neox",
    "gpt_neox_serial",
    "qwen3_next_some",
    "qwen3_5_wide",
)


AMONG_TWO = ("llama_tied", "llama_multi_query", "opt_350m")


def variants_and_sizes() -> list[Any]:
    """Return each variant with 2 and with 4 ranks. `make test` runs a variant of each kind of layer
    with the most ranks, and a few others with 2."""
    representatives = {*KINDS, "glm4_moe_lite"}
    found = []
    for name in VARIANTS:
        sizes = (2,) if name in FOR_TWO else (2, 4)
        for size in sizes:
            is_quick = name in representatives if size == sizes[-1] else name in AMONG_TWO
            found.append(pytest.param(name, size, marks=[] if is_quick else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("variant", "size"), variants_and_sizes())
def test_ranks_match_one_rank(variant: str, size: int, tmp_path: Path) -> None:
    spec = write_checkpoint(tmp_path, variant).spec
    (wanted,) = run_ranks(1, lambda group: logits_of(tmp_path, spec, group))
    for found in run_ranks(size, lambda group: logits_of(tmp_path, spec, group)):
        for one_TV, other_TV in zip(wanted, found, strict=True):
            torch.testing.assert_close(other_TV, one_TV, rtol=1e-12, atol=1e-12)


MIXTURES = ("qwen2_moe", "qwen3_moe", "gpt_oss", "qwen3_next")


@pytest.mark.parametrize(("form", "variant"), in_turn(("apart", "stacked"), tuple(MIXTURES)))
def test_ranks_with_whole_experts_match_one_rank(
    variant: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With lists of experts as on a CPU, and stacked as on a GPU."""
    if form == "stacked":
        monkeypatch.setattr(
            "quire.models.parts.experts.experts_class", lambda device: experts.StackedExperts
        )
    model_type, config = VARIANTS[variant]
    six = {"num_local_experts" if variant == "gpt_oss" else "num_experts": 6}
    spec = write_own(tmp_path, model_type, config | six).spec
    (wanted,) = run_ranks(1, lambda group: logits_of(tmp_path, spec, group))

    def work(group: RankGroup) -> list[torch.Tensor]:
        return logits_of(tmp_path, spec, group, has_whole_experts=True)

    for found in run_ranks(2, work):
        for one_TV, other_TV in zip(wanted, found, strict=True):
            torch.testing.assert_close(other_TV, one_TV, rtol=1e-12, atol=1e-12)


def test_dummy_whole_experts_match_one_rank(tmp_path: Path) -> None:
    model_type, config = VARIANTS["qwen3_moe"]
    spec = write_own(tmp_path, model_type, config | {"num_experts": 6}).spec

    def work(group: RankGroup) -> list[torch.Tensor]:
        return logits_of(tmp_path, spec, group, has_whole_experts=True, is_dummy=True)

    (wanted,) = run_ranks(1, work)
    for found in run_ranks(2, work):
        for one_TV, other_TV in zip(wanted, found, strict=True):
            torch.testing.assert_close(other_TV, one_TV, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("variant", "is_dummy"),
    [
        pytest.param(name, is_dummy, marks=[] if is_dummy == bool(v % 2) else pytest.mark.slow)
        for v, name in enumerate(["gpt_oss", "qwen3_moe", "mixtral", "qwen2_moe"])
        for is_dummy in (False, True)
    ],
)
def test_ranks_with_stacked_experts_match_one_rank(
    variant: str, is_dummy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "experts_class", lambda _: experts.StackedExperts)
    spec = write_checkpoint(tmp_path, variant).spec

    def compute(group: RankGroup) -> list[torch.Tensor]:
        return logits_of(tmp_path, spec, group, is_dummy=is_dummy)

    (wanted,) = run_ranks(1, compute)
    for found in run_ranks(2, compute):
        for one_TV, other_TV in zip(wanted, found, strict=True):
            torch.testing.assert_close(other_TV, one_TV, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", ["gpt_oss", "gpt2", "qwen3_next", "llama_biases", "qwen3_tied"])
def test_dummy_weights_of_ranks_match_one_rank(variant: str, tmp_path: Path) -> None:
    spec = write_checkpoint(tmp_path, variant).spec
    (wanted,) = run_ranks(1, lambda group: logits_of(tmp_path, spec, group, is_dummy=True))
    assert max(each.std() for each in wanted) > 0
    for found in run_ranks(2, lambda group: logits_of(tmp_path, spec, group, is_dummy=True)):
        for one_TV, other_TV in zip(wanted, found, strict=True):
            torch.testing.assert_close(other_TV, one_TV, rtol=1e-12, atol=1e-12)


def test_one_rank_runs_no_collectives(tmp_path: Path) -> None:
    spec = write_checkpoint(tmp_path, "olmo2").spec
    with record_ops() as record:
        (logits,) = run_ranks(1, lambda group: logits_of(tmp_path, spec, group))[:1]
    alone = load_model(tmp_path, spec, torch.float64, CPU)
    assert logits and alone.head.sources()[0].rows is None
    names = {"all_reduce", "all_gather", "part_of_embedding", "pad_width", "rms_norm_by_sum"}
    assert not names & set(record.names)


@pytest.mark.parametrize("name", ["authors", "own_embedding", "all_ids"])
@torch.inference_mode()
def test_eagle3_heads_on_ranks_match_one_rank(name: str, tmp_path: Path) -> None:
    """Each rank has the logits of its part of the target's vocabulary."""
    shape: HeadShape = SHAPES[name]
    write_head(tmp_path, shape)
    spec = head_spec(tmp_path, target_spec(hidden_size=shape.target_size))
    torch.manual_seed(1)
    table = torch.randn(shape.vocab, LAYER["hidden_size"])
    read_TF = torch.randn(len(TOKENS) - 1, len(head_options(spec).reads) * shape.target_size)

    def draft_logits(group: RankGroup) -> torch.Tensor:
        options = LoadOptions(place=RankPlace(group))
        head = load_model(tmp_path, spec, torch.float64, CPU, options)
        assert isinstance(head, Eagle3)
        head.attach(Target(table, torch.float64))
        own = spec.of_ranks(group.size)
        backend = make_backend("reference", make_layout(own, 12, 4, torch.float64))
        blocks = tuple([5, 0, 9, 2, 7] for _ in own.cache_groups)
        found = []
        ids, out = torch.tensor(TOKENS[1:]), read_TF.double()
        for first, compute in ((0, head.first), (len(ids), head.further)):
            step = make_step([RowPart(first, first + len(ids), blocks)], 4)
            backend.prepare(step)
            out = compute(ids, step.positions_T, out, backend)[-1:]
            ids = torch.tensor([7])
            parts = group.all_gather(head.logits(out))
            found.append(parts.transpose(0, 1).flatten(1)[:, : shape.vocab])
        return torch.cat(found)

    (wanted,) = run_ranks(1, draft_logits)
    assert wanted.isfinite().any()
    for size in (2, 4):
        for found in run_ranks(size, draft_logits):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


# ---- what a rank reads -----------------------------------------------------------------------

LARGE = LLAMA | {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1003}
WIDE = {"head_dim": 32, "linear_value_head_dim": 32, "linear_key_head_dim": 32}
TYPES: dict[str, dict[str, Any]] = {
    "llama": LARGE,
    "phi3": LARGE | {"pad_token_id": 0},
    "gpt2": {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 8, "vocab_size": 1003},
    "mixtral": LARGE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_text": HYBRID | LARGE | WIDE | {"num_hidden_layers": 4},
}


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_rank_reads_only_its_part(
    model_type: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 1.05 / N of all bytes, from safetensors and from GGUF files."""
    config = TYPES[model_type] | {"num_key_value_heads": 4, "linear_num_key_heads": 4}
    folder = write_own(tmp_path / "model", model_type, config).directory
    taken, num_bytes = Source.taken, 0

    def count(source: Source, values: torch.Tensor) -> torch.Tensor:
        nonlocal num_bytes
        found = taken(source, values)
        num_bytes += found.nbytes
        assert found.numel() == source.num_taken
        return found

    monkeypatch.setattr(Source, "taken", count)
    whole = sum(each.nbytes for each in load_file(folder / "model.safetensors").values())
    for group in thread_groups(size):
        num_bytes = 0
        place = LoadOptions(place=RankPlace(group))
        load_model(folder, load_spec(folder), torch.float32, CPU, place)
        assert whole / size / 1.05 < num_bytes < 1.05 * whole / size
    if model_type == "mixtral":
        return
    file = convert(folder, tmp_path / "model.gguf", Q8_0)
    rows, blocks = GGUFTensor._rows, GGUFTensor._blocks

    def count_rows(tensor: GGUFTensor, start: int, stop: int) -> Any:
        nonlocal num_bytes
        found = rows(tensor, start, stop)
        num_bytes += found.nbytes if tensor.columns is None else 0
        return found

    def count_blocks(tensor: GGUFTensor, own: Any, places: Any) -> Any:
        nonlocal num_bytes
        found = blocks(tensor, own, places)
        num_bytes += found.nbytes
        return found

    monkeypatch.setattr(GGUFTensor, "_rows", count_rows)
    monkeypatch.setattr(GGUFTensor, "_blocks", count_blocks)
    for group in thread_groups(size):
        num_bytes = 0
        place = LoadOptions(place=RankPlace(group))
        load_model(file, load_spec(file), torch.float32, CPU, place)
        assert num_bytes < 1.05 * file.stat().st_size / size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_planned_bytes_equal_the_bytes_of_ranks(dtype: torch.dtype, tmp_path: Path) -> None:
    spec = write_checkpoint(tmp_path, "qwen3_moe_some").spec
    for group in thread_groups(2):
        model = load_model(tmp_path, spec, dtype, CPU, LoadOptions(place=RankPlace(group)))
        empty = empty_model(spec, dtype, CPU, RankPlace(group))
        assert model_bytes(model) == planned_bytes(empty, dtype, CPU)


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
def test_each_rank_has_a_cache_entry_of_its_own(tmp_path: Path) -> None:
    spec = write_checkpoint(tmp_path / "model", "llama").spec
    for _ in range(2):
        for size in (1, 2):
            for group in thread_groups(size):
                cache = WeightCache(tmp_path / "cache")
                options = LoadOptions(cache=cache, place=RankPlace(group))
                model = load_model(tmp_path / "model", spec, torch.float32, CPU, options)
                fresh = LoadOptions(place=RankPlace(group))
                wanted = load_model(tmp_path / "model", spec, torch.float32, CPU, fresh)
                assert torch.equal(model.head.weight.data, wanted.head.weight.data)
    assert len(list((tmp_path / "cache").glob("*.weights"))) == 3


def test_each_rank_checks_its_part_of_a_tied_head(tmp_path: Path) -> None:
    spec = write_checkpoint(tmp_path, "llama_tied").spec
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    head[60] += 1
    save_file(tensors | {"lm_head.weight": head}, file, metadata={"format": "pt"})
    first, second = (LoadOptions(place=RankPlace(group)) for group in thread_groups(2))
    load_model(tmp_path, spec, torch.float32, CPU, first)
    with pytest.raises(ModelError, match="first in row 60"):
        load_model(tmp_path, spec, torch.float32, CPU, second)


# ---- what cannot be divided ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "change", "size", "message"),
    [
        ("llama", {}, 3, "tensor_parallel_size=3 does not divide num_attention_heads, which is 4"),
        (
            "llama",
            {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8},
            3,
            "tensor_parallel_size=3 is not a multiple of num_key_value_heads, which is 2",
        ),
        ("llama", {"intermediate_size": 41}, 2, "does not divide intermediate_size, which is 41"),
        ("llama", {"vocab_size": 3}, 2 * 2, "too much for a vocabulary of 3 tokens"),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 27, "num_experts": 3, "num_experts_per_tok": 1},
            2,
            "does not divide moe_intermediate_size, which is 27",
        ),
        ("qwen3_5_text", {"linear_num_value_heads": 6}, 4, "linear_num_value_heads, which is 6"),
    ],
)
def test_sizes_that_ranks_cannot_divide_are_refused(
    model_type: str, change: dict[str, Any], size: int, message: str
) -> None:
    base = HYBRID if model_type == "qwen3_5_text" else LLAMA
    spec = parse_spec(base | {"model_type": model_type} | change)
    with pytest.raises(ConfigError, match=message):
        spec.of_ranks(size)


def test_the_ranks_must_divide_the_number_of_whole_experts() -> None:
    spec = parse_spec(LLAMA | {"model_type": "mixtral", "num_local_experts": 5})
    with pytest.raises(ConfigError, match="=2 does not divide num_experts.*, which is 5"):
        spec.of_ranks(2, has_whole_experts=True)
    own = spec.of_ranks(1, has_whole_experts=True)
    assert own is spec
    six = parse_spec(LLAMA | {"model_type": "mixtral", "num_local_experts": 6})
    shared, whole = six.of_ranks(2), six.of_ranks(2, has_whole_experts=True)
    assert shared.experts is not None and whole.experts is not None
    assert shared.identity != whole.identity
    assert whole.experts.inner_size == shared.experts.inner_size * 2


def test_whole_experts_are_spread_evenly(tmp_path: Path) -> None:
    config = TYPES["mixtral"] | {"num_key_value_heads": 4}
    folder = write_own(tmp_path / "model", "mixtral", config).directory
    spec = load_spec(folder)
    models = []
    for group in thread_groups(2):
        options = LoadOptions(place=RankPlace(group, has_whole_experts=True))
        models.append(load_model(folder, spec, torch.float32, CPU, options))
    whole = model_bytes(load_model(folder, spec, torch.float32, CPU))
    for model in models:
        assert whole / 2 / 1.05 < model_bytes(model) < 1.05 * whole / 2


def test_transformers_classes_refuse_tensor_parallelism(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    spec = model_spec(tmp_path, "transformers")
    with pytest.raises(ConfigError, match="class of transformers.*remove tensor_parallel_size=2"):
        spec.of_ranks(2)


class Foreign(Decoder):
    """A model class of another package."""


class Sharing(Decoder):
    """A model class that declares `shares_layers`."""

    shares_layers = True


def test_classes_of_other_packages_must_declare_shares_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = parse_spec(LLAMA | {"model_type": "theirs"})
    place = RankPlace(thread_groups(2)[0])
    monkeypatch.setattr(registry, "model_class", lambda _: Foreign)
    with pytest.raises(ConfigError, match="shares_layers.*remove tensor_parallel_size=2"):
        empty_model(spec, torch.float32, CPU, place)
    monkeypatch.setattr(registry, "model_class", lambda _: Sharing)
    assert registry.can_share(spec)


def test_the_spec_of_a_rank_has_its_share_of_sizes(tmp_path: Path) -> None:
    spec = write_checkpoint(tmp_path, "qwen3_next").spec
    own = spec.of_ranks(4)
    assert (own.num_heads, own.num_kv_heads, own.vocab_size) == (1, 1, spec.vocab_size)
    assert own.linear_attention.key_heads == 1 and own.linear_attention.value_heads == 1
    assert own.experts is not None and (own.experts.inner_size, own.experts.shared_size) == (6, 5)
    full, states = own.own_groups
    assert full.num_kv_heads == 1 and states.state_size == own.linear_attention.state_size
    assert len({spec.identity, own.identity, spec.of_ranks(2).identity}) == 3
    assert spec.of_ranks(1) is spec


def test_cuts_give_each_rank_its_range() -> None:
    assert [cut_evenly(6, r, 3, "x") for r in range(3)] == [Cut(6, r, 2) for r in (0, 2, 4)]
    repeated = [cut_or_repeat(2, r, 4, "x").first for r in range(4)]
    assert repeated == [0, 0, 1, 1]
    assert [cut_vocabulary(97, r, 4).count for r in range(4)] == [25, 25, 25, 22]
    assert Cut(4, 1, 2).times(3) == Cut(12, 3, 6)
