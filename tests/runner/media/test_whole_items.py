"""Gemma 3 in a runner: the tokens of a whole item attend to each other in both directions."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from quire.base.requests.media_items import MediaItem
from tests.support.models.multimodal import Prompt, prompt_of, reference_logits, write_multimodal
from tests.support.runner.media_engine import Engine


def items_of(prompt: Prompt) -> list[MediaItem]:
    """Return the images of a prompt as requests have them."""
    return [
        MediaItem(
            start=start,
            num_tokens=length,
            digest=hashlib.sha256(image.pixels.tobytes()).digest(),
            grid=image.grid,
            shape=image.pixels.shape,
            pixels=image.pixels.tobytes(),
            table=image.table.tobytes(),
            is_whole=True,
        )
        for (start, image), length in zip(prompt.images, prompt.lengths, strict=False)
    ]


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_answers_equal_those_of_transformers(backend: str, tmp_path: Path) -> None:
    reference = write_multimodal(tmp_path, "gemma3", ties=True)
    prompts = {
        name: prompt_of("gemma3", numbers)
        for name, numbers in {"two": [0, 1], "one": [2], "text": []}.items()
    }
    items = {name: items_of(prompt) for name, prompt in prompts.items()}
    engine = Engine(
        1, folder=tmp_path, items=items, max_num_batched_tokens=64, attention_backend=backend
    )
    for name, prompt in prompts.items():
        engine.add_prompt(name, prompt.tokens, max_tokens=1)
    found = engine.drive()
    assert not engine.errors
    for name, prompt in prompts.items():
        [(token, bits)] = found[name, 0]
        logprobs = reference_logits(reference, "gemma3", prompt)[-1].log_softmax(0)
        assert int(logprobs.argmax()) == token
        np.testing.assert_allclose(np.frombuffer(bits, np.float32)[0], logprobs[token], rtol=1e-5)
