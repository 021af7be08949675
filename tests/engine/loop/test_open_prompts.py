"""After the last piece of an open prompt only that piece is left to compute. Measured in steps, not
in time."""

import random
from collections.abc import Iterator

import msgspec
import pytest

from quire.base.messages import Request
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.config import config_from_flat
from quire.engine.start.build import Engine, build_engine
from quire.render.renderer import RenderedPrompt

BUDGET = 64  # tokens per step
PARAMS = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    built = build_engine(
        config_from_flat(
            model="demo",
            dtype="float32",
            max_num_seqs=4,
            max_model_len=1024,
            max_num_batched_tokens=BUDGET,
            kv_cache_memory_bytes=16 << 20,
            enable_prefix_caching=False,
            pipeline_depth=1,
            disable_log_stats=True,
        )
    )
    yield built
    built.client.close()


def request_of(engine: Engine, token_ids: list[int], is_open: bool) -> Request:
    made = engine.requests.make(RenderedPrompt(token_ids), SamplingParams(**PARAMS))
    return msgspec.structs.replace(made, is_open=is_open)


def steps_to_first_token(engine: Engine) -> tuple[int, list[int]]:
    """Return the number of steps until the first token, and all tokens."""
    num_steps, first = 0, 0
    while True:
        num_steps += 1
        for output in engine.client.step():
            first = first or num_steps
            if output.finished:
                return first, output.outputs[0].token_ids


@pytest.mark.parametrize("num_last", [1, 7, 63, 64, 65, 150])
@pytest.mark.parametrize("num_before", [1, 200, pytest.param(641, marks=pytest.mark.slow)])
def test_last_piece_takes_as_many_steps_as_a_prompt_of_its_length(
    engine: Engine, num_before: int, num_last: int
) -> None:
    """At most one step more, for the token that was held back. The tokens are those of the whole
    prompt."""
    rng = random.Random(num_before + num_last)
    whole = [rng.randrange(3, 1500) for _ in range(num_before + num_last)]
    last = whole[num_before:]
    engine.client.add(request_of(engine, last, is_open=False))
    alone, _ = steps_to_first_token(engine)
    engine.client.add(request_of(engine, whole, is_open=False))
    unsplit, expected = steps_to_first_token(engine)

    request = request_of(engine, whole[: num_before // 2 or 1], is_open=True)
    engine.client.add(request)
    engine.client.append(request.request_id, whole[num_before // 2 or 1 : num_before])
    scheduler = engine.client.core.scheduler
    while scheduler.lifecycle.sequences[request.request_id].num_computed_tokens < num_before - 1:
        assert engine.client.step() == []
    engine.client.append(request.request_id, last, is_last=True)
    streamed, token_ids = steps_to_first_token(engine)
    assert token_ids == expected
    assert streamed <= alone + 1
    assert streamed <= unsplit
