"""A model that several ranks share, each with a part of all layers, against the same on one rank.

Covers `models/sources.py`, and `models/olmo2.py`.
"""

from pathlib import Path

import pytest
import torch

from quire.base.model_spec import ModelSpec
from quire.models.loading import LoadOptions, load_model
from quire.models.model import Model
from quire.models.rank_place import RankPlace
from quire.ops.collective import RankGroup
from quire.ops.collectives.thread_group import run_ranks
from tests.models.checkpoints import VARIANTS, random_tokens, write_checkpoint
from tests.models.paged import CPU, run_paged

SEQUENCES = random_tokens(11, 5)
CHUNKS = [[7, 4], [5]]
# What only two can share: models with two heads, or with two or six value heads.
FOR_TWO = (
    "phi3_long",
    "phi3_short",
    "gpt_neox",
    "gpt_neox_serial",
    "qwen3_next_some",
    "qwen3_5_wide",
)


class Gathering:
    """A model of a rank whose logits are those of all ranks' tokens."""

    def __init__(self, model: Model, group: RankGroup, vocab_size: int) -> None:
        self._model, self._group, self._vocab_size = model, group, vocab_size

    def __call__(self, *args: object) -> torch.Tensor:
        hidden: torch.Tensor = self._model(*args)
        return hidden

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        own = self._model.logits(hidden_RD)
        assert own.shape[1] == -(-self._vocab_size // self._group.size)
        all_parts = self._group.all_gather(own).transpose(0, 1).flatten(1)
        return all_parts[:, : self._vocab_size]


def logits_of(
    directory: Path, spec: ModelSpec, group: RankGroup, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """Logits by one of the ranks."""
    options = LoadOptions(place=RankPlace(group))
    model = load_model(directory, spec, dtype, CPU, options)
    own = spec.of_ranks(group.size)
    gathering = Gathering(model, group, spec.vocab_size)
    return run_paged(gathering, own, SEQUENCES, CHUNKS, backend="reference", dtype=dtype)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_compute_what_one_does(variant: str, tmp_path: Path) -> None:
    spec = write_checkpoint(tmp_path, variant).spec
    (wanted,) = run_ranks(1, lambda group: logits_of(tmp_path, spec, group))
    for size in (2,) if variant in FOR_TWO else (2, 4):
        for found in run_ranks(size, lambda group: logits_of(tmp_path, spec, group)):
            for one_TV, other_TV in zip(wanted, found, strict=True):
                torch.testing.assert_close(other_TV, one_TV, rtol=1e-12, atol=1e-12)
