"""Configs of EAGLE-3 heads: how they are read, and which are rejected."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ModelError
from quire.spec.eagle3_spec import head_options, head_spec
from tests.support.models.draft_heads import SPECULATORS, HeadShape, target_spec


@pytest.mark.parametrize(
    ("top", "reads"),
    [
        ({}, (2, 3, 4)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 5, 7]}, (0, 5, 7)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}, (1, 3, 6)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 3, 4)),
    ],
)
def test_config_selects_the_layers_that_the_head_reads(
    top: dict[str, Any], reads: tuple[int, ...], tmp_path: Path
) -> None:
    """By default, layers 2, n / 2 and n - 3 of 7; ids in eagle_config are one lower."""
    (tmp_path / "config.json").write_text(json.dumps(HeadShape(top=top).config))
    assert head_options(head_spec(tmp_path, target_spec())).reads == reads


@pytest.mark.parametrize(
    ("shape", "target", "error"),
    [
        (HeadShape(), {"hidden_size": 64}, "another model: .*hidden_size is 32, this model's 64"),
        (HeadShape(), {"vocab_size": 99}, "another model: .* vocab_size is 97, this model's 99"),
        (HeadShape(), {"num_hidden_layers": 6}, "without .* it reads 2, 3, 3"),
        (HeadShape(reads=(1, 8)), {}, "from 0 to 7 of this model; .* says 1, 8"),
        (
            HeadShape(top={"draft_vocab_size": 98}),
            {},
            "draft_vocab_size is 98; it is at most vocab_size",
        ),
        (HeadShape(layer={"model_type": "gpt_oss"}), {}, "layers of type 'gpt_oss'; supported are"),
        (HeadShape(top={"parallel_drafting": True}), {}, "parallel_drafting is true; .* variant"),
        (HeadShape(top={"norm_before_fc": True, "fc_norm": True}), {}, "has that or fc_norm"),
        (HeadShape(SPECULATORS, top={"speculators_model_type": "mtp"}), {}, "only eagle3"),
        (HeadShape(SPECULATORS, top={"transformer_layer_config": {}}), {}, "no transformer_layer"),
        (HeadShape(top={"eagle_config": {"use_aux_hidden_state": False}}), {}, "last layer only"),
        (
            HeadShape(top={"draft_vocab_size": None, "architectures": ["LlamaForCausalLM"]}),
            {},
            "is not an EAGLE-3 head: .* draft_model",
        ),
    ],
)
def test_unsupported_heads_are_rejected(
    shape: HeadShape, target: dict[str, Any], error: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape.config))
    with pytest.raises(ModelError, match=error):
        head_spec(tmp_path, target_spec(**target))
