"""Images through the whole engine in float64 give transformers' tokens and log-probabilities.

Each family runs on a tiny checkpoint with images of odd sizes. Settings cut images into chunks,
preempt rows, leave the encoder cache too small, draft tokens, and divide the model among ranks.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest

from quire import SamplingParams, StructuredOutputsParams
from quire.base.errors import RequestError
from tests.models.image_matrix import (
    ODD_CHUNKS,
    WAYS,
    YES,
    check,
    read_results,
    write_tiny,
)
from tests.support.engine.image_engine import (
    GREEDY,
    NEAR,
    NUM_TOKENS,
    VOCAB_SIZE,
    Images,
    finished,
    other_pictures,
)
from tests.support.models.multimodal import IMAGE_TOKEN
from tests.support.models.vision_checkpoints import MODELS

QUICK = "qwen3_vl"  # has features for several layers, and positions of three axes
WHOLE = "gemma3"  # computes each image in one step
FAMILIES = [
    pytest.param(family, marks=() if family == QUICK else pytest.mark.slow) for family in MODELS
]
QUICK_WAYS = [(QUICK, way) for way in ("odd chunks", "recomputed", "drafts")]
FORM = "[d-h]{3}[0-9]{2}"
MAX_STARTS = 6  # prefix lengths per prompt; the work is quadratic in their number


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Images]:
    """Return the checkpoint of a family, written once."""
    found: dict[str, Images] = {}

    def of(family: str) -> Images:
        if family not in found:
            found[family] = write_tiny(tmp_path_factory.mktemp(family), family)
        return found[family]

    return of


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(family, way, marks=() if (family, way) in QUICK_WAYS else pytest.mark.slow)
        for family in MODELS
        for way in WAYS
    ],
)
def test_tokens_match_transformers(written: Callable[[str], Images], family: str, way: str) -> None:
    check(written(family), way)
    assert read_results()[family][way] == YES, "run python -m tests.models.image_matrix"


@pytest.mark.parametrize(
    ("family", "chunk"),
    [
        (QUICK, ODD_CHUNKS),
        *(
            pytest.param(family, ODD_CHUNKS if family == WHOLE else 1, marks=pytest.mark.slow)
            for family in MODELS
        ),
    ],
)
def test_prefix_hits_of_every_length_after_aborts_match(
    written: Callable[[str], Images], family: str, chunk: int
) -> None:
    """A request is aborted after each number of steps; the next one begins with its blocks."""
    images = written(family)
    prompt, lengths, inside = images.prompts[2], set(), set()
    chunk = max(chunk, len(prompt.tokens) // MAX_STARTS)
    with images.open(400, block_size=1, max_num_batched_tokens=chunk, max_num_seqs=1) as llm:
        for num_steps in range(len(prompt.tokens) // chunk):
            llm.reset_prefix_cache()
            request = images.request(llm, prompt, GREEDY)
            llm.engine.client.add(request, "")
            for _ in range(num_steps):
                llm.engine.client.step()
            llm.engine.client.abort([request.request_id])
            [output] = images.check_greedy(llm, [prompt])
            lengths.add(output.num_cached_tokens)
        for (start, _), num in zip(prompt.images, prompt.lengths, strict=True):
            inside |= {length for length in lengths if length and start < length < start + num}
    assert len(lengths) >= len(prompt.tokens) // chunk - 2
    assert bool(inside) == (family != WHOLE)


@pytest.mark.parametrize("family", FAMILIES)
def test_different_images_are_not_prefix_hits(
    written: Callable[[str], Images], family: str
) -> None:
    images = written(family)
    prompt = images.prompts[1]
    with images.open() as llm:
        images.check_greedy(llm, [prompt])
        [other] = images.check_greedy(llm, [other_pictures(prompt)])
        [same] = images.check_greedy(llm, [prompt])
    assert other.num_cached_tokens is not None and same.num_cached_tokens is not None
    assert other.num_cached_tokens <= prompt.images[0][0] < same.num_cached_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_samples_and_grammars_work_with_images(
    written: Callable[[str], Images], family: str
) -> None:
    images = written(family)
    prompt = images.prompts[2]
    form = StructuredOutputsParams(regex=FORM)
    common: dict[str, Any] = {"max_tokens": NUM_TOKENS, "logprobs": 0, "seed": 3}
    common["logit_bias"] = dict.fromkeys(range(IMAGE_TOKEN, VOCAB_SIZE), -100.0)
    all_params = [
        SamplingParams(n=3, ignore_eos=True, prompt_logprobs=0, **common),
        SamplingParams(structured_outputs=form, **common),
    ]
    room = images.few_blocks + 8  # three samples, and another request
    with images.open(room, max_num_batched_tokens=13) as llm:
        made = [images.request(llm, prompt, params) for params in all_params]
        several, formed = finished(llm, made)
        with pytest.raises(RequestError, match="beam search does not accept images"):
            images.request(llm, prompt, SamplingParams(use_beam_search=True, n=2, temperature=0))
    images.check(prompt, several)
    assert len({tuple(choice.token_ids) for choice in several.outputs}) == 3
    wanted = images.logprobs(prompt, [])
    assert several.prompt_logprobs is not None
    for token, found, row in zip(
        prompt.tokens[1:], several.prompt_logprobs[1:], wanted, strict=False
    ):
        assert found is not None and abs(found[token].logprob - float(row[token])) < NEAR
    [choice] = formed.outputs
    assert choice.error is None and re.fullmatch(FORM, choice.text)
