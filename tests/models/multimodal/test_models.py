"""Models that read images: the logits of prompts with several images are transformers'.

Covers `models/multimodal/`, `models/vision/model.py`, `spec/media_families.py`.
"""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from quire.models.load.loading import load_model
from quire.models.registry import model_spec
from quire.spec.model_spec import ModelSpec
from quire.tools.verify.paged import CPU
from tests.support.cases import slow_but
from tests.support.models.multimodal import (
    Prompt,
    cut,
    prompt_of,
    reference_logits,
    run_prompts,
    write_multimodal,
)

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava", "llava_next")
NUMBERS = ([0, 1], [2], [1, 0, 2])  # the images of three prompts


@cache
def loaded(family: str, dtype: torch.dtype) -> tuple[Any, ModelSpec, Any]:
    """Return transformers' model, the spec, and quire's model of one checkpoint."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        reference = write_multimodal(folder, family)
        spec = model_spec(folder)
        return reference, spec, load_model(folder, spec, dtype, CPU)


def prompts_of(family: str) -> list[Prompt]:
    """Return prompts with images of odd sizes."""
    return [prompt_of(family, numbers) for numbers in NUMBERS]


@pytest.mark.parametrize("family", slow_but(FAMILIES, "qwen2_5_vl", "qwen3_vl_moe", "llava_next"))
def test_logits_match_transformers(family: str) -> None:
    """With whole prompts, and with chunks that cut images."""
    reference, spec, model = loaded(family, torch.float64)
    prompts = prompts_of(family)
    for num_steps in (1, 5):
        got = run_prompts(model, spec, prompts, cut(prompts, num_steps), dtype=torch.float64)
        for prompt, found in zip(prompts, got, strict=True):
            wanted = reference_logits(reference, family, prompt)
            assert wanted.std() > 0.3
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", slow_but(FAMILIES, "qwen2_vl", "qwen3_vl", "llava"))
def test_core_bits_do_not_depend_on_the_batch(family: str) -> None:
    _, spec, model = loaded(family, torch.float32)
    prompts = prompts_of(family)
    by_torch = run_prompts(model, spec, prompts, cut(prompts, 3))
    together = run_prompts(model, spec, prompts, cut(prompts, 3), backend="cpu", native=True)
    for prompt, found, wanted in zip(prompts, together, by_torch, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)
        alone = run_prompts(model, spec, [prompt], cut([prompt], 3), backend="cpu", native=True)
        assert torch.equal(alone[0], found)
