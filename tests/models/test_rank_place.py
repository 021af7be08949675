"""A model that several ranks share, each with a part of all layers, against the same on one rank.

Covers `models/sources.py`, and `models/olmo2.py`.
"""

from pathlib import Path

import pytest
import torch

from quire.ops.collectives.thread_group import run_ranks
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.models.ranks import logits_of

# What only two can share: models with two heads, or with two or six value heads.
FOR_TWO = (
    "phi3_long",
    "phi3_short",
    "gpt_neox",
    "gpt_neox_serial",
    "qwen3_next_some",
    "qwen3_5_wide",
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_compute_what_one_does(variant: str, tmp_path: Path) -> None:
    spec = write_checkpoint(tmp_path, variant).spec
    (wanted,) = run_ranks(1, lambda group: logits_of(tmp_path, spec, group))
    for size in (2,) if variant in FOR_TWO else (2, 4):
        for found in run_ranks(size, lambda group: logits_of(tmp_path, spec, group)):
            for one_TV, other_TV in zip(wanted, found, strict=True):
                torch.testing.assert_close(other_TV, one_TV, rtol=1e-12, atol=1e-12)
