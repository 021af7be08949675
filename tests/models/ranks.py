"""Models of ranks that share layers: their logits put together."""

from pathlib import Path
from typing import Any

import torch

from quire.base.model_spec import ModelSpec
from quire.models.loading import LoadOptions, load_model
from quire.models.model import Model
from quire.models.rank_place import RankPlace
from quire.ops.collective import RankGroup
from tests.models.checkpoints import random_tokens
from tests.models.paged import CPU, run_paged

SEQUENCES = random_tokens(11, 5)
CHUNKS = [[7, 4], [5]]


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
    directory: Path,
    spec: ModelSpec,
    group: RankGroup,
    dtype: torch.dtype = torch.float64,
    *,
    is_dummy: bool = False,
    sharing: int = 1,
    **paging: Any,
) -> list[torch.Tensor]:
    """Logits by one of the ranks. is_dummy: with random weights. sharing: so many neighbours deal
    out sequences' tokens."""
    load_format = "dummy" if is_dummy else "auto"
    place = RankPlace(group, sharing=sharing)
    options = LoadOptions(load_format, place=place)
    model = load_model(directory, spec, dtype, CPU, options)
    own = spec.of_ranks(group.size)
    gathering = Gathering(model, group, spec.vocab_size)
    paging = {"backend": "reference", "dtype": dtype, "context": place.context} | paging
    return run_paged(gathering, own, SEQUENCES, CHUNKS, **paging)
