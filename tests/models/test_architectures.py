"""Each architecture against transformers: the same logits for the same tiny checkpoint.

Covers `models/parts/decoder.py`.
"""

from pathlib import Path

import pytest
import torch

from quire.models.load.loading import load_model
from tests.support.models.checkpoints import (
    Checkpoint,
    exact_logits,
    random_tokens,
    write_checkpoint,
)
from tests.support.models.paged_forward import CPU, run_paged
from tests.support.models.quick import one_of_each_kind, one_of_each_type

SEQUENCES = random_tokens(23, 5, 61, 1)
WHOLE = [[23], [5], [61], [1]]
UNEVEN = [[7, 0, 9, 1, 1, 5], [0, 3, 1, 1], [13, 40, 1, 1, 1, 5], [0, 0, 1]]


@pytest.fixture(scope="module")
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    directory: Path = tmp_path_factory.mktemp(request.param)
    return write_checkpoint(directory, request.param)


@pytest.mark.parametrize(
    "checkpoint", one_of_each_kind("opt_350m", "glm4", "cohere2"), indirect=True
)
def test_logits_match_transformers(checkpoint: Checkpoint) -> None:
    """In float32, in whole prompts and in uneven chunks of several sequences."""
    model = load_model(checkpoint.directory, checkpoint.spec, torch.float32, CPU)
    wanted = [checkpoint.logits(tokens) for tokens in SEQUENCES]
    for chunks in (WHOLE, UNEVEN):
        got = run_paged(model, checkpoint.spec, SEQUENCES, chunks)
        for wanted_TV, logits_TV in zip(wanted, got, strict=True):
            assert wanted_TV.std() > 0.3, "logits vary too little to compare"
            torch.testing.assert_close(logits_TV, wanted_TV, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("checkpoint", one_of_each_type(), indirect=True)
def test_the_reference_backend_matches_transformers_in_float64(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint.directory, checkpoint.spec, torch.float64, CPU)
    sequences = [SEQUENCES[1], SEQUENCES[0][:12]]
    chunks = [[2, 3], [12]]
    got = run_paged(
        model, checkpoint.spec, sequences, chunks, backend="reference", dtype=torch.float64
    )
    wanted = exact_logits(checkpoint.directory, sequences)
    for wanted_TV, logits_TV in zip(wanted, got, strict=True):
        torch.testing.assert_close(logits_TV, wanted_TV, rtol=1e-10, atol=1e-10)
