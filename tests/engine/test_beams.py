"""Beam search inside the scheduler: sequences, order and scores are transformers', however the
beams are scheduled."""

from typing import Any

import numpy as np
import pytest

from quire.base.errors import RequestError
from quire.base.messages import BeamOutput, Request
from quire.base.sampling_params import SamplingParams
from tests.engine.bench import Bench
from tests.serve.checkpoints import checkpoint, pool_bytes, reference_beams, reference_tokens

PROMPT = (7, 3, 9, 1, 12, 44, 5, 80, 23, 61)
OTHERS = ([5, 6, 7], [90, 2, 2, 8, 41], [*PROMPT[:8], 50])
Found = list[tuple[tuple[int, ...], float]]


class Searches(Bench):
    """Keeps the beams that came back."""

    def __init__(self, architecture: str = "llama", **settings: Any) -> None:
        super().__init__(checkpoint(architecture), **settings)
        self.runner.raises = lambda plan: False
        self.beams: dict[str, list[BeamOutput]] = {}
        self.num_preempted = 0

    def search(
        self, name: str, width: int, num_tokens: int, prompt: tuple[int, ...] = PROMPT, **more: Any
    ) -> None:
        stops = tuple(more.pop("stops", ()))
        params = SamplingParams(n=width, use_beam_search=True, max_tokens=num_tokens, **more)
        self.core.add(Request(name, list(prompt), params, 0, stops, eos_token_ids=stops))

    def step(self) -> list[Any]:
        outputs = self.core.step()
        for output in outputs:
            if output.beams is not None:
                assert output.request_id not in self.beams
                self.beams[output.request_id] = output.beams
                self.num_preempted += output.num_preemptions
            elif output.request_id in self.tokens:
                self.tokens[output.request_id] += output.token_ids
                self.last[output.request_id] = output
            else:
                assert output.error is not None, "a beam search sends its results at the end only"
                self.last[output.request_id] = output
        self.core.scheduler.check_invariants()
        return outputs

    def assert_as(self, name: str, expected: Found) -> None:
        got = self.beams[name]
        assert [tuple(beam.token_ids) for beam in got] == [tokens for tokens, _ in expected]
        np.testing.assert_allclose([b.score for b in got], [s for _, s in expected], atol=1e-4)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -0.5])
@pytest.mark.parametrize("width", [2, 4])
def test_beams_are_transformers(
    width: int, length_penalty: float, early_stopping: bool | str
) -> None:
    stops = (8, 21, 33, 40, 57, 62, 71, 95)
    how = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    searches = Searches(max_num_seqs=8)
    for i, prompt in enumerate((PROMPT, *map(tuple, OTHERS))):
        searches.search(str(i), width, 12, prompt, stops=stops, **how)
    searches.finish()
    for i, prompt in enumerate((PROMPT, *map(tuple, OTHERS))):
        searches.assert_as(str(i), reference_beams(prompt, width, 12, stops, **how))


@pytest.mark.parametrize("architecture", ["qwen3", "mistral", "gpt2"])
def test_other_architectures_and_a_window(architecture: str) -> None:
    searches = Searches(architecture, max_num_seqs=8)
    searches.search("r", 4, 20)
    searches.finish()
    searches.assert_as("r", reference_beams(PROMPT, 4, 20, architecture=architecture))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [3, 7, 64])
def test_in_any_batch(caching: bool, depth: int, budget: int) -> None:
    """Chunked prompts, beams spread over several plans, others beside them."""
    searches = Searches(
        max_num_seqs=9,
        max_num_batched_tokens=budget,
        pipeline_depth=depth,
        enable_prefix_caching=caching,
    )
    searches.add("a", OTHERS[0], 20)
    searches.search("r", 4, 14)
    searches.add("b", OTHERS[1], 9)
    searches.search("s", 3, 9, tuple(OTHERS[2]))
    searches.finish()
    searches.assert_as("r", reference_beams(PROMPT, 4, 14))
    searches.assert_as("s", reference_beams(tuple(OTHERS[2]), 3, 9))
    searches.assert_exact("a", "b")


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_beams_come_back(mode: str, caching: bool, depth: int) -> None:
    searches = Searches(
        max_num_seqs=8,
        max_num_batched_tokens=16,
        pipeline_depth=depth,
        enable_prefix_caching=caching,
        preemption_mode=mode,
        kv_cache_memory_bytes=pool_bytes(checkpoint("llama"), 18, 4),
        watermark=0.0,
    )
    searches.add("a", OTHERS[0], 30)
    searches.add("b", OTHERS[1], 30)
    searches.search("r", 4, 14)
    searches.finish()
    assert searches.num_preempted, "the test is to preempt the group"
    searches.assert_as("r", reference_beams(PROMPT, 4, 14))
    searches.assert_exact("a", "b")


def test_width_one_is_greedy() -> None:
    searches = Searches(max_num_seqs=2)
    searches.search("r", 1, 10)
    searches.finish()
    [beam] = searches.beams["r"]
    assert beam.token_ids == reference_tokens(checkpoint("llama"), list(PROMPT), 10)


def test_fewer_are_returned_than_searched() -> None:
    searches = Searches(max_num_seqs=8)
    params = SamplingParams(n=2, beam_width=5, use_beam_search=True, max_tokens=9)
    searches.core.add(Request("r", list(PROMPT), params, 0))
    searches.finish()
    searches.assert_as("r", reference_beams(PROMPT, 5, 9)[:2])


def test_beams_share_blocks_as_a_tree() -> None:
    """While they run, no block is held once per beam where the beams have the same tokens."""
    searches = Searches(max_num_seqs=4, enable_prefix_caching=False)
    searches.search("r", 4, 30)
    pool = searches.core.scheduler.kv.pools[0]
    saved = []
    while searches.core.has_work:
        searches.step()
        running = searches.core.scheduler.running()
        if len(running) == 4:
            held = [set(s.blocks.tables[0].blocks) for s in running]
            saved.append(1 - pool.num_used / sum(map(len, held)))
            tokens = [tuple(s.known_tokens.tolist()) for s in running]
            assert len(set(tokens)) == 4, "two beams are the same"
    assert min(saved) > 0.3


def test_a_guilty_search_fails_alone() -> None:
    searches = Searches(max_num_seqs=8)
    searches.runner.raises = searches.runner.holds_poison
    searches.search("bad", 3, 8, (1, 2, 96, 4, 5))
    searches.search("r", 2, 8)
    searches.finish()
    assert searches.last["bad"].error is not None and "bad" not in searches.beams
    searches.assert_as("r", reference_beams(PROMPT, 2, 8))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"logprobs": 2}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"beam_width": 1, "n": 2}, "beam_width"),
        ({"early_stopping": "maybe"}, "early_stopping"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"stop": ["x"]}, "stop"),
    ],
)
def test_what_does_not_go_together_is_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        SamplingParams(use_beam_search=True, **more)
