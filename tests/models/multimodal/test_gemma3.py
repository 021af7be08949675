"""Gemma 3 with images: tokens of an image attend to each other in both directions.

Covers `models/multimodal/gemma3.py` and `models/families/gemma.py`.
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
from tests.support.models.multimodal import (
    Prompt,
    cut,
    prompt_of,
    reference_logits,
    run_prompts,
    write_multimodal,
)

NUMBERS = ([0, 1], [2], [])  # the images of three prompts
LARGER, SMALLER = 6, 3  # windows; an image has 4 tokens


@cache
def loaded(dtype: torch.dtype, window: int = LARGER) -> tuple[Any, ModelSpec, Any]:
    """Return transformers' model, the spec, and quire's model of one checkpoint."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        reference = write_multimodal(folder, "gemma3", ties=True, sliding_window=window)
        spec = model_spec(folder)
        return reference, spec, load_model(folder, spec, dtype, CPU)


def cut_between_images(prompts: list[Prompt], num_steps: int) -> list[list[int]]:
    """Return chunks as `cut` does, but longer where one would end inside an image."""
    lens = [list(each) for each in zip(*cut(prompts, num_steps), strict=True)]
    for prompt, chunks in zip(prompts, lens, strict=True):
        ends, done = prompt.ends(), 0
        for step in range(num_steps - 1):
            end = done + chunks[step]
            if 0 < end < len(ends) and ends[end - 1] == ends[end] > 0:
                chunks[step] += int(ends[end]) - end
                chunks[step + 1] -= int(ends[end]) - end
            done += chunks[step]
        assert min(chunks) >= 0 and sum(chunks) == len(prompt.tokens)
    return [list(each) for each in zip(*lens, strict=True)]


def prompts_of() -> list[Prompt]:
    return [prompt_of("gemma3", numbers) for numbers in NUMBERS]


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("window", [LARGER, SMALLER])
def test_logits_match_transformers(window: int, num_steps: int) -> None:
    """Prompts have two images, one and none. Windows are larger and smaller than an image."""
    reference, spec, model = loaded(torch.float64, window)
    prompts = prompts_of()
    chunks = cut_between_images(prompts, num_steps)
    got = run_prompts(model, spec, prompts, chunks, is_whole=True, dtype=torch.float64)
    for prompt, found in zip(prompts, got, strict=True):
        wanted = reference_logits(reference, "gemma3", prompt)
        assert wanted.std() > 0.3
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_causal_attention_within_an_image_changes_its_logits() -> None:
    _, spec, model = loaded(torch.float64)
    prompts = prompts_of()[:1]
    chunks = cut(prompts, 1)
    whole, causal = (
        run_prompts(model, spec, prompts, chunks, is_whole=is_whole, dtype=torch.float64)[0]
        for is_whole in (True, False)
    )
    start = prompts[0].images[0][0]
    assert torch.equal(whole[:start], causal[:start])
    assert (whole[start:] - causal[start:]).abs().amax(1).min() > 1e-3


@pytest.mark.parametrize("window", [LARGER, SMALLER])
def test_core_bits_do_not_depend_on_the_batch(window: int) -> None:
    _, spec, model = loaded(torch.float32, window)
    prompts = prompts_of()
    run: dict[str, Any] = {"is_whole": True, "backend": "cpu", "native": True}
    by_torch = run_prompts(model, spec, prompts, cut(prompts, 1), is_whole=True, backend="torch")
    together = run_prompts(model, spec, prompts, cut_between_images(prompts, 3), **run)
    for prompt, found, wanted in zip(prompts, together, by_torch, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)
        alone = run_prompts(model, spec, [prompt], cut([prompt], 1), **run)
        assert torch.equal(alone[0], found)
