"""Layers for multi-token prediction compared with their definition, and models without one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quire.base.errors import ModelError
from quire.models.checkpoint.rank_place import RankPlace
from quire.models.draft_model import multi_token_spec
from quire.models.load.loading import LoadOptions, load_model
from quire.models.load.packing import model_bytes
from quire.models.mtp import MultiTokenHead
from quire.ops.attention.select import make_backend
from quire.ops.collective import RankGroup
from quire.ops.collectives.thread_group import run_ranks
from quire.spec.model_spec import load_spec, parse_spec
from tests.models.test_eagle3 import NUM_FURTHER, TOKENS, draft
from tests.support.cases import slow_but
from tests.support.models.checkpoints import VARIANTS as VARIANTS_OF
from tests.support.models.checkpoints import VOCAB
from tests.support.models.draft_heads import MtpByDefinition, change_weights, write_mtp
from tests.support.models.paged_forward import CPU, RowPart, make_layout, make_step
from tests.support.models.quantised_writers import float8

VARIANTS = (
    "deepseek_v3",
    "deepseek_v3_some",
    "glm4_moe",
    "glm4_moe_plain",
    "glm4_moe_lite",
    "qwen3_next",
    "qwen3_next_some",
    "qwen3_5",
    "qwen3_5_moe",
)


@pytest.mark.parametrize("variant", slow_but(VARIANTS, "deepseek_v3", "qwen3_next"))
@torch.inference_mode()
def test_drafts_match_the_definition(variant: str, tmp_path: Path) -> None:
    """Compares the logits of each draft: in float64, in float32 over several steps, and in the
    core's program."""
    made = write_mtp(tmp_path, variant)
    by_definition = MtpByDefinition(made)
    read_TD = by_definition.states(TOKENS)[:-1]
    wanted = by_definition.drafts(TOKENS, read_TD, NUM_FURTHER)
    target_spec = made.checkpoint.spec
    spec = multi_token_spec(target_spec, tmp_path)
    for backend, dtype, cuts, limit in (
        ("reference", torch.float64, [17], 1e-10),
        ("torch", torch.float32, [9, 1, 7], 2e-3),
        ("cpu", torch.float32, [1, 12, 4], 2e-3),
    ):
        head = load_model(tmp_path, spec, dtype, CPU)
        assert isinstance(head, MultiTokenHead)
        head.attach(load_model(tmp_path, target_spec, dtype, CPU))
        drafts, found = draft(head, spec, read_TD, backend, cuts)
        assert drafts == wanted[0]
        for each, logits in zip(found, wanted[1], strict=True):
            torch.testing.assert_close(each.double(), logits, rtol=limit, atol=limit)


def test_copies_of_embedding_and_head_are_not_loaded(tmp_path: Path) -> None:
    """A layer takes only the memory of its own tensors."""
    target = write_mtp(tmp_path, "deepseek_v3").checkpoint.spec
    head = load_model(tmp_path, multi_token_spec(target, tmp_path), torch.float64, CPU)
    own = load_file(tmp_path / "model.safetensors")
    prefix = f"model.layers.{target.num_layers}."
    own = {name: each for name, each in own.items() if name.startswith(prefix)}
    num = sum(each.numel() for each in own.values())
    copies = own[f"{prefix}embed_tokens.weight"], own[f"{prefix}shared_head.head.weight"]
    assert model_bytes(head) == 8 * (num - sum(each.numel() for each in copies))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0 in its config"),
        ({"model_type": "deepseek_v2"}, "quire runs none of models of type deepseek_v2"),
    ],
)
def test_configs_without_an_mtp_layer_are_refused(
    changed: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    spec = parse_spec(VARIANTS_OF["deepseek_v3"][1] | {"model_type": "deepseek_v3"} | changed)
    with pytest.raises(ModelError, match=f"has no layer for .*: {reason}.*eagle3"):
        multi_token_spec(spec, tmp_path)


def test_an_mtp_layer_with_its_own_embedding_is_refused(tmp_path: Path) -> None:
    config = VARIANTS_OF["qwen3_5"][1] | {"model_type": "qwen3_5_text"}
    spec = parse_spec(config | {"mtp_use_dedicated_embeddings": True})
    with pytest.raises(ModelError, match="mtp_use_dedicated_embeddings"):
        multi_token_spec(spec, tmp_path)


@pytest.mark.parametrize("variant", slow_but(("deepseek_v3", "qwen3_next"), "deepseek_v3"))
@torch.inference_mode()
def test_two_ranks_match_one_rank(variant: str, tmp_path: Path) -> None:
    """Each rank has the logits of its part of the vocabulary."""
    made = write_mtp(tmp_path, variant)
    target_spec = made.checkpoint.spec
    spec = multi_token_spec(target_spec, tmp_path)
    read_TD = torch.randn(len(TOKENS) - 1, spec.hidden_size, dtype=torch.float64)

    def logits(group: RankGroup) -> torch.Tensor:
        options = LoadOptions(place=RankPlace(group))
        head = load_model(tmp_path, spec, torch.float64, CPU, options)
        assert isinstance(head, MultiTokenHead)
        head.attach(load_model(tmp_path, target_spec, torch.float64, CPU, options))
        own = spec.of_ranks(group.size)
        backend = make_backend("reference", make_layout(own, 12, 4, torch.float64))
        blocks = tuple([5, 0, 9, 2, 7] for _ in own.cache_groups)
        step = make_step([RowPart(0, len(TOKENS) - 1, blocks)], 4)
        backend.prepare(step)
        out = head.first(torch.tensor(TOKENS[1:]), step.positions_T, read_TD, backend)
        return group.all_gather(head.logits(out)).transpose(0, 1).flatten(1)[:, :VOCAB]

    (wanted,) = run_ranks(1, logits)
    for found in run_ranks(2, logits):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_an_mtp_layer_in_fp8_blocks_is_dequantised(tmp_path: Path) -> None:
    """As in DeepSeek V3's checkpoints, where the projection of token and state is not quantised."""
    target = write_mtp(tmp_path / "fp8", "deepseek_v3").checkpoint.spec
    shutil.copytree(tmp_path / "fp8", tmp_path / "plain")
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    form, prefix = float8("block", blocks, end="weight_scale_inv"), "model.layers.3."
    quantised: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(tmp_path / "fp8" / "model.safetensors").items():
        module, is_own = name.removesuffix(".weight"), name.startswith(prefix)
        if is_own and name.endswith("proj.weight") and "eh_proj" not in name:
            parts, plain[name] = form.writer(module, tensor)
            quantised |= {f"{module}.{end}": part for end, part in parts.items()}
    change_weights(tmp_path / "fp8", quantised)
    change_weights(tmp_path / "plain", plain)
    config = tmp_path / "fp8" / "config.json"
    raw = json.loads(config.read_text()) | {"quantization_config": blocks}
    config.write_text(json.dumps(raw))
    assert len(plain) > 5
    found = []
    for name, spec in (("fp8", load_spec(tmp_path / "fp8")), ("plain", target)):
        directory = tmp_path / name
        head = load_model(directory, multi_token_spec(spec, directory), torch.float64, CPU)
        found.append(dict(head.named_parameters()))
    assert found[0].keys() == found[1].keys()
    for name, parameter in found[0].items():
        torch.testing.assert_close(parameter, found[1][name], rtol=1e-12, atol=1e-12)
