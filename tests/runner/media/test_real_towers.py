"""Models with vision towers, in the whole runner: the answers equal transformers'."""

import dataclasses
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from quire.base.requests.media_items import MediaItem
from quire.ops.host.native import core
from quire.runner.native_model import NativeModel
from tests.runner.media.test_media_ranks import StagedEngine
from tests.support.models.multimodal import Prompt, prompt_of, reference_logits, write_multimodal
from tests.support.runner.media_engine import NUM_TOKENS, Engine, Found

NUMBERS = ([0, 1], [2], [1, 0, 2])  # the images of the prompts
CACHE = 24  # tokens: too few for all images at a time
SETTINGS: dict[str, Any] = {
    "max_num_batched_tokens": 16, "max_model_len": 96, "encoder_cache_tokens": CACHE,
}  # fmt: skip


@cache
def folder_of(family: str) -> tuple[TemporaryDirectory[str], Any]:
    """Return a checkpoint, and transformers' model of it."""
    folder = TemporaryDirectory()
    return folder, write_multimodal(Path(folder.name), family)


def items_of(prompt: Prompt) -> list[MediaItem]:
    """Return the images of a prompt as a renderer makes them."""
    return [
        MediaItem(
            start=start,
            num_tokens=length,
            digest=sha256(image.pixels.tobytes()).digest(),
            grid=image.grid,
            shape=image.pixels.shape,
            pixels=image.pixels.tobytes(),
            table=image.table.tobytes(),
        )
        for (start, image), length in zip(prompt.images, prompt.lengths, strict=True)
    ]


@pytest.mark.parametrize(
    ("family", "num_stages"),
    [
        ("qwen2_5_vl", 1),
        pytest.param("qwen3_vl", 1, marks=pytest.mark.slow),
        ("qwen3_vl", 4),
        pytest.param("llava", 1, marks=pytest.mark.slow),
        ("llava", 2),
    ],
)
def test_answers_equal_those_of_transformers(family: str, num_stages: int) -> None:
    folder, reference = folder_of(family)
    prompts = {str(numbers): prompt_of(family, numbers) for numbers in NUMBERS}
    items = {name: items_of(prompt) for name, prompt in prompts.items()}
    kind = Engine if num_stages == 1 else StagedEngine
    engine = kind(
        folder=Path(folder.name), items=items, pipeline_parallel_size=num_stages, **SETTINGS
    )
    for name, prompt in prompts.items():
        engine.add_prompt(name, prompt.tokens)
    found = engine.drive(num_stages)
    for name, prompt in prompts.items():
        pairs = found[name, 0]
        tokens = [token for token, _ in pairs]
        whole = dataclasses.replace(prompt, tokens=[*prompt.tokens, *tokens[:-1]])
        logprobs = reference_logits(reference, family, whole).log_softmax(1)[-NUM_TOKENS:]
        assert logprobs.argmax(1).tolist() == tokens
        for row, (token, bits) in zip(logprobs.numpy(), pairs, strict=True):
            expected = [row[token], *np.sort(row)[::-1][:3]]
            np.testing.assert_allclose(np.frombuffer(bits, np.float32), expected, rtol=1e-5)
    assert engine.items, "the scheduler has planned the encoding"


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
def test_core_gives_the_same_bits_alone_and_in_a_batch() -> None:
    folder, _ = folder_of("qwen3_vl")
    prompts = {str(numbers): prompt_of("qwen3_vl", numbers) for numbers in NUMBERS}
    items = {name: items_of(prompt) for name, prompt in prompts.items()}

    def answers(*names: str) -> Found:
        engine = Engine(
            folder=Path(folder.name), items=items, dtype="float32", attention_backend="cpu",
            **SETTINGS,
        )  # fmt: skip
        assert isinstance(engine.model, NativeModel)
        for name in names:
            engine.add_prompt(name, prompts[name].tokens)
        return engine.drive()

    together = answers(*prompts)
    assert len({tuple(pairs) for pairs in together.values()}) == len(prompts)
    for name in prompts:
        assert answers(name) == {(name, 0): together[name, 0]}
