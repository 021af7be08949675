"""Latent attention: its absorbed and expanded forms, its weights, and the tensors that it reads.

Covers `models/parts/latent_attention.py`, `models/parts/head_linear.py`, `ops/latent.py`,
`spec/deepseek/latent_attention.py` and `models/deepseek/deepseek.py`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.models.checkpoint.rank_place import RankPlace
from quire.models.load.cache_files import WeightCache
from quire.models.load.loading import LoadOptions, load_model
from quire.models.load.packing import model_bytes, planned_bytes
from quire.models.parts.head_linear import HeadLinear
from quire.models.parts.latent_attention import NEVER, min_expanded_tokens
from quire.models.registry import make_model, model_spec
from quire.ops.attention.reference import ReferenceBackend
from quire.ops.attention.select import BACKENDS
from quire.ops.attention.torch_cpu import TorchBackend
from quire.ops.collectives.thread_group import thread_groups
from quire.ops.host.native import core
from quire.ops.weights.packed_heads import PackedHeads
from quire.spec.deepseek.latent_attention import LatentAttention
from quire.spec.model_spec import load_spec
from tests.support.cases import in_turn
from tests.support.models.checkpoints import (
    LATENT,
    ROUTED,
    exact_logits,
    random_tokens,
    write_checkpoint,
    write_own,
)
from tests.support.models.paged_forward import CPU, run_paged

SEQUENCES = random_tokens(23, 5)
CHUNKS = [[7, 0, 9, 1, 6], [0, 3, 1, 1, 0]]
WITH_LATENTS = ["deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite", "minicpm3"]
needs_core = pytest.mark.skipif(core() is None, reason="the C++ core is not built")


def logits(folder: Path, backend: str = "reference") -> list[torch.Tensor]:
    spec = load_spec(folder)
    model = load_model(folder, spec, torch.float64, CPU)
    return run_paged(model, spec, SEQUENCES, CHUNKS, backend=backend, dtype=torch.float64)


class ExpandingReference(ReferenceBackend):
    def prefers_expanded(self, min_tokens: int) -> bool:
        return True


class ExpandingTorch(TorchBackend):
    def prefers_expanded(self, min_tokens: int) -> bool:
        return True


@pytest.mark.parametrize(
    ("variant", "kind"), in_turn(tuple(WITH_LATENTS), [ExpandingReference, ExpandingTorch])
)
def test_absorbed_and_expanded_forms_agree(
    variant: str, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, variant)
    wanted = logits(tmp_path)
    monkeypatch.setitem(BACKENDS, "reference", kind)
    for got_TV, wanted_TV in zip(logits(tmp_path), wanted, strict=True):
        assert not torch.equal(got_TV, wanted_TV), "both forms sum in the same order"
        torch.testing.assert_close(got_TV, wanted_TV, rtol=1e-10, atol=1e-10)


def test_min_expanded_tokens_is_the_break_even_point() -> None:
    """Numbers of DeepSeek V3: 512 * 256 products per cached token, and 768 less per query."""
    sizes = LatentAttention(1536, 512, 128, 64, 128, is_interleaved=True, scale=1.0)
    assert (sizes.latent_dim, sizes.query_dim) == (576, 192)
    assert min_expanded_tokens(sizes) == 512 * 256 // 768 + 1 == 171
    narrow = LatentAttention(None, 8, 16, 8, 16, is_interleaved=True, scale=1.0)
    assert min_expanded_tokens(narrow) == NEVER


def test_cpu_logits_match_transformers_in_any_chunks(tmp_path: Path) -> None:
    """On a CPU the form must not depend on how a prompt is divided into chunks."""
    write_checkpoint(tmp_path, "deepseek_v3")
    spec = load_spec(tmp_path)
    model = load_model(tmp_path, spec, torch.float64, CPU)
    for chunks in ([[23], [5]], CHUNKS):
        options: dict[str, Any] = {"backend": "torch", "dtype": torch.float64}
        got = run_paged(model, spec, SEQUENCES, chunks, **options)
        wanted = exact_logits(tmp_path, SEQUENCES)
        for got_TV, wanted_TV in zip(got, wanted, strict=True):
            torch.testing.assert_close(got_TV, wanted_TV, rtol=1e-10, atol=1e-10)


@needs_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_weights_are_packed_planned_and_cached(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder, "deepseek_v3")
    spec, cache = load_spec(folder), WeightCache(tmp_path / "cache", min_bytes=0)
    planned = planned_bytes(make_model(spec, dtype, torch.device("meta")), dtype, CPU)
    options = LoadOptions(cache=cache)
    found = [load_model(folder, spec, dtype, CPU, options) for _ in range(2)]
    weights = [
        [each.weight for each in model.modules() if isinstance(each, HeadLinear)] for model in found
    ]
    assert [len(own) for own in weights] == [2 * spec.num_layers] * 2
    for packed, mapped in zip(*weights, strict=True):
        assert isinstance(packed, PackedHeads) and isinstance(mapped, PackedHeads)
        assert packed.layout == mapped.layout and torch.equal(packed.data, mapped.data)
    assert model_bytes(found[0]) == model_bytes(found[1]) == planned


def test_kimi_k2_loads_as_deepseek_v3(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v3")
    wanted = logits(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    assert model_spec(tmp_path).model_type == "deepseek_v3"
    for got_TV, wanted_TV in zip(logits(tmp_path), wanted, strict=True):
        assert torch.equal(got_TV, wanted_TV)


@pytest.mark.parametrize("variant", ["deepseek_v3", "glm4_moe"])
def test_multi_token_prediction_layers_are_ignored(variant: str, tmp_path: Path) -> None:
    spec = write_checkpoint(tmp_path, variant).spec
    wanted = logits(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    later = f"model.layers.{spec.num_layers}"
    more = {f"{later}.enorm.weight": torch.ones(4), f"{later}.self_attn.x.weight": torch.ones(2)}
    save_file(tensors | more, file)
    for got_TV, wanted_TV in zip(logits(tmp_path), wanted, strict=True):
        assert torch.equal(got_TV, wanted_TV)


def test_ranks_have_all_latents_and_a_part_of_the_heads(tmp_path: Path) -> None:
    spec = write_checkpoint(tmp_path, "deepseek_v3").spec
    own = spec.of_ranks(2)
    assert own.cache_groups == spec.cache_groups and own.num_heads == 2
    place = RankPlace(thread_groups(2)[1])
    model = load_model(tmp_path, spec, torch.float64, CPU, LoadOptions(place=place))
    whole = load_model(tmp_path, spec, torch.float64, CPU)
    pairs = zip(model.modules(), whole.modules(), strict=True)
    found = [(a, b) for a, b in pairs if isinstance(a, HeadLinear) and isinstance(b, HeadLinear)]
    assert len(found) == 2 * spec.num_layers
    for part, all_of in found:
        assert torch.equal(part.weight, all_of.weight[2:])


def test_grouped_experts_with_a_bias_match_transformers(tmp_path: Path) -> None:
    """transformers initialises the bias to zeros. The test stores one that changes the routing."""
    checkpoint = write_own(tmp_path, "deepseek_v3", LATENT | ROUTED | {"num_hidden_layers": 2})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    before = exact_logits(tmp_path, SEQUENCES)
    tensors[name] = torch.linspace(-0.5, 0.5, 8)[torch.tensor([3, 1, 7, 0, 5, 2, 6, 4])]
    save_file(tensors, file, metadata={"format": "pt"})
    wanted = exact_logits(tmp_path, SEQUENCES)
    assert not torch.allclose(before[0], wanted[0])
    assert checkpoint.spec.experts is not None
    for got_TV, wanted_TV in zip(logits(tmp_path), wanted, strict=True):
        torch.testing.assert_close(got_TV, wanted_TV, rtol=1e-10, atol=1e-10)
