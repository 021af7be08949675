"""Models of ranks that share layers: their logits put together."""

from pathlib import Path
from typing import Any

import torch

from quire.models.checkpoint.rank_place import RankPlace
from quire.models.load.loading import LoadOptions, load_model
from quire.models.model import Model
from quire.ops.collective import RankGroup
from quire.spec.model_spec import ModelSpec
from tests.support.models.checkpoints import random_tokens
from tests.support.models.paged_forward import CPU, run_paged

SEQUENCES = random_tokens(11, 5)
CHUNKS = [[7, 4], [5]]


def gather_logits(model: Model, group: RankGroup, vocab_size: int) -> None:
    """Let a rank's model return the logits of all ranks' tokens."""
    compute = model.logits

    def logits(hidden_RD: torch.Tensor) -> torch.Tensor:
        own = compute(hidden_RD)
        assert own.shape[1] == -(-vocab_size // group.size)
        return group.all_gather(own).transpose(0, 1).flatten(1)[:, :vocab_size]

    model.logits = logits  # type: ignore[method-assign]


def logits_of(
    directory: Path,
    spec: ModelSpec,
    group: RankGroup,
    dtype: torch.dtype = torch.float64,
    *,
    is_dummy: bool = False,
    sharing: int = 1,
    has_whole_experts: bool = False,
    **paging: Any,
) -> list[torch.Tensor]:
    """Logits by one of the ranks. is_dummy: with random weights. sharing: so many neighbours deal
    out sequences' tokens."""
    load_format = "dummy" if is_dummy else "auto"
    place = RankPlace(group, sharing=sharing, has_whole_experts=has_whole_experts)
    options = LoadOptions(load_format, place=place)
    model = load_model(directory, spec, dtype, CPU, options)
    own = spec.of_ranks(group.size, has_whole_experts=has_whole_experts)
    gather_logits(model, group, spec.vocab_size)
    paging = {"backend": "reference", "dtype": dtype, "context": place.context} | paging
    return run_paged(model, own, SEQUENCES, CHUNKS, **paging)
