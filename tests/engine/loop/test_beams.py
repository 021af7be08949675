"""Beam search in the scheduler returns the sequences, order and scores of transformers, whatever
the schedule."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.errors import RequestError
from quire.base.messages import Request
from quire.base.requests.sampling_params import SamplingParams
from quire.base.step_outputs import BeamOutput
from quire.scheduler.core import planning
from quire.scheduler.core.plans import PlanBuilder
from quire.spec.model_spec import load_spec
from tests.support.cases import in_turn, pairwise, slow_but
from tests.support.engine.failing_core import Bench
from tests.support.engine.updates import error_of, read
from tests.support.models.reference_checkpoints import (
    checkpoint,
    pool_bytes,
    reference_beams,
    reference_logits,
    reference_tokens,
    twins_checkpoint,
)

PROMPT = (7, 3, 9, 1, 12, 44, 5, 80, 23, 61)
OTHERS = ([5, 6, 7], [90, 2, 2, 8, 41], [*PROMPT[:8], 50])
Found = list[tuple[tuple[int, ...], float]]


class Searches(Bench):
    """A bench that collects the beams of each finished search."""

    def __init__(self, folder: Path | None = None, **settings: Any) -> None:
        folder = folder or checkpoint("llama")
        super().__init__(folder, **settings)
        vocab_size = load_spec(folder).vocab_size
        self.core.limits = dataclasses.replace(self.core.limits, vocab_size=vocab_size)
        self.runner.raises = lambda plan: False
        self.beams: dict[str, list[BeamOutput]] = {}
        self.num_preempted = 0

    def search(
        self, name: str, width: int, num_tokens: int, prompt: tuple[int, ...] = PROMPT, **more: Any
    ) -> None:
        stops = tuple(more.pop("stops", ()))
        params = SamplingParams(
            **({"n": width, "use_beam_search": True, "max_tokens": num_tokens} | more)
        )
        self.core.add(Request(name, list(prompt), params, 0, stops, eos_token_ids=stops))

    def step(self) -> list[Any]:
        outputs = read(self.reader, self.core.step())
        for output in outputs:
            if output.beams is not None:
                assert output.request_id not in self.beams
                self.beams[output.request_id] = output.beams
                self.num_preempted += output.num_preemptions
            elif output.request_id in self.tokens:
                self.tokens[output.request_id] += output.token_ids
                self.last[output.request_id] = output
            else:
                assert error_of(output), "a beam search sends its results at the end only"
                self.last[output.request_id] = output
        self.core.scheduler.check_invariants()
        return outputs

    def assert_beams(self, name: str, expected: Found, same: int = 1) -> None:
        """same: tokens k * same to (k + 1) * same - 1 count as equal."""
        got = self.beams[name]
        kinds = [[token // same for token in beam.token_ids] for beam in got]
        assert kinds == [[token // same for token in tokens] for tokens, _ in expected]
        np.testing.assert_allclose([b.score for b in got], [s for _, s in expected], 1e-5, 1e-4)


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "width"),
    in_turn([True, False, "never"], [0.0, 1.0, 2.0, -0.5], [2, 4]),
)
def test_beams_match_transformers(
    width: int, length_penalty: float, early_stopping: bool | str
) -> None:
    stops = (8, 21, 33, 40, 57, 62, 71, 95)
    how = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    searches = Searches(max_num_seqs=8)
    for i, prompt in enumerate((PROMPT, *map(tuple, OTHERS))):
        searches.search(str(i), width, 12, prompt, stops=stops, **how)
    searches.finish()
    for i, prompt in enumerate((PROMPT, *map(tuple, OTHERS))):
        searches.assert_beams(str(i), reference_beams(prompt, width, 12, stops, **how))


@pytest.mark.parametrize(
    "architecture",
    [
        "qwen3",
        "mistral",
        "gpt2",
        pytest.param("llama4_text", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
    ],
)
def test_beams_match_in_other_architectures(architecture: str) -> None:
    searches = Searches(checkpoint(architecture), max_num_seqs=8)
    searches.search("r", 4, 20)
    searches.finish()
    searches.assert_beams("r", reference_beams(PROMPT, 4, 20, folder=checkpoint(architecture)))


@pytest.mark.parametrize(
    ("caching", "depth", "budget"),
    in_turn([True, False], [3, 1, 2], [3, 64, 7]),
)
def test_beams_match_in_any_batch(caching: bool, depth: int, budget: int) -> None:
    """Prompts are chunked, beams are spread over several plans, and other requests share the
    batch."""
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
    searches.assert_beams("r", reference_beams(PROMPT, 4, 14))
    searches.assert_beams("s", reference_beams(tuple(OTHERS[2]), 3, 9))
    searches.assert_exact("a", "b")


@pytest.mark.parametrize(
    ("caching", "depth", "mode"),
    in_turn([True, False], [2, 1], ["recompute", "swap"]),
)
def test_preempted_beams_resume_with_the_same_result(mode: str, caching: bool, depth: int) -> None:
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
    assert searches.num_preempted, "the group was not preempted"
    searches.assert_beams("r", reference_beams(PROMPT, 4, 14))
    searches.assert_exact("a", "b")


@pytest.mark.parametrize(("mode", "depth"), in_turn(["recompute", "swap"], [1, 2]))
def test_beams_preempted_between_two_of_their_plans_match(
    mode: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempt a group while only some of its beams have candidates. The scheduler drops these and
    requests candidates for all beams again, from the last token."""
    seen = list[tuple[int, int]]()

    def with_preemption(*args: Any, **more: Any) -> PlanBuilder:
        builder, scheduler = PlanBuilder(*args, **more), searches.core.scheduler
        leader = scheduler.lifecycle.sequences.get("r")
        if leader is not None and leader.row >= 0 and builder.step_id == at:
            group = leader.group
            assert group is not None
            rows = [(m, m.num_computed_tokens, m.num_known_tokens) for m in group.running]
            num_ready = len(group.candidates)
            scheduler.preemption.preempt(leader, "test", builder, 0.0)
            assert not group.candidates
            for member, computed, known in rows if mode == "swap" and group.is_forked else ():
                assert member.num_swapped_tokens == (known - 1 if computed == known else computed)
            seen.append((num_ready, sum(computed == known for _, computed, known in rows)))
        return builder

    monkeypatch.setattr(planning, "PlanBuilder", with_preemption)
    for at in range(3, 12):  # noqa: B007
        searches = Searches(
            max_num_seqs=5, max_num_batched_tokens=3, pipeline_depth=depth, preemption_mode=mode
        )
        searches.search("r", 4, 7)
        searches.finish()
        searches.assert_beams("r", reference_beams(PROMPT, 4, 7))
    assert any(num_ready for num_ready, _ in seen), "no beam had its candidates"
    assert any(num_done > num_ready for num_ready, num_done in seen) == (depth > 1)


def test_beam_width_one_is_greedy() -> None:
    searches = Searches(max_num_seqs=2)
    searches.search("r", 1, 10)
    searches.finish()
    [beam] = searches.beams["r"]
    assert beam.token_ids == reference_tokens(checkpoint("llama"), list(PROMPT), 10)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_n_below_beam_width_returns_the_best_n(early_stopping: bool | str) -> None:
    stops = (8, 21, 33, 40, 57, 62, 71, 95)
    searches = Searches(max_num_seqs=8)
    searches.search("r", 5, 12, n=2, beam_width=5, stops=stops, early_stopping=early_stopping)
    searches.finish()
    expected = reference_beams(PROMPT, 5, 12, stops, early_stopping=early_stopping)
    searches.assert_beams("r", expected[:2])


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "ranks"),
    pairwise(
        [True, False, "never"],
        [0.0, 1.0, -1.0],
        [[0], [0, 1, 2], [0, 1, 2, 3, 4, 5], [0, 4, 5, 6]],
    ),
)
def test_first_candidates_that_are_stop_tokens_match(
    ranks: list[int], length_penalty: float, early_stopping: bool | str
) -> None:
    """One, some or all of the first four candidates finish after one token. Stop tokens of lower
    rank do not."""
    likeliest = reference_logits(checkpoint("llama"), list(PROMPT))[-1].argsort(descending=True)
    stops = tuple(likeliest[ranks].tolist())
    how = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    searches = Searches(max_num_seqs=4)
    searches.search("r", 4, 10, stops=stops, **how)
    searches.finish()
    searches.assert_beams("r", reference_beams(PROMPT, 4, 10, stops, **how))
    assert any(len(beam.token_ids) == 1 for beam in searches.beams["r"])


@pytest.mark.parametrize(
    ("sizes", "early_stopping"),
    in_turn(
        [(8, 1, 0), (8, 2, 0), (11, 1, 0), (11, 2, 0), (11, 9, 0), (8, 1, 3), (8, 9, 3), (2, 9, 9)],
        [True, False, "never"],
    ),
)
def test_beam_width_may_equal_the_vocabulary_size(
    sizes: tuple[int, int, int], early_stopping: bool | str
) -> None:
    """Every token that does not stop becomes a beam, and the beams occupy all rows."""
    width, num_tokens, num_stops = sizes
    folder, prompt = checkpoint("llama", 11), (1, 5, 9, 2, 7)
    stops = tuple(range(num_stops))
    searches = Searches(folder, max_num_seqs=width)
    searches.search("r", width, num_tokens, prompt, stops=stops, early_stopping=early_stopping)
    searches.search("s", width, num_tokens, prompt[:3], stops=stops, early_stopping=early_stopping)
    searches.finish()
    for name, own in (("r", prompt), ("s", prompt[:3])):
        how = {"early_stopping": early_stopping, "folder": folder}
        expected = reference_beams(own, width, num_tokens, stops, **how)
        assert len(expected) == width
        searches.assert_beams(name, expected)


@pytest.mark.parametrize(
    ("more", "num_stops", "message"),
    [
        ({"n": 12}, 0, "n=12 is more than the 11 tokens"),
        ({"n": 2, "beam_width": 12}, 0, "beam_width=12 is more than the 11 tokens"),
        ({"n": 9}, 3, "n=9 is more than the 8 tokens"),
        ({"n": 1}, 11, "n=1 is more than the 0 tokens"),
    ],
)
def test_beam_width_above_the_vocabulary_size_is_rejected(
    more: dict[str, Any], num_stops: int, message: str
) -> None:
    """The search could not fill the requested number of beams."""
    searches = Searches(checkpoint("llama", 11), max_num_seqs=16)
    with pytest.raises(RequestError, match=f"^{message}.*stop_token_ids"):
        searches.search("r", 1, 1, (1, 2), stops=range(num_stops), **more)
    assert not searches.core.has_work


@pytest.mark.parametrize(
    "early_stopping", [True, pytest.param(False, marks=pytest.mark.slow), "never"]
)
@pytest.mark.parametrize("length_penalty", slow_but((-10.0, -6.5, 10.0), -10.0, 10.0))
def test_extreme_length_penalties_match(length_penalty: float, early_stopping: bool | str) -> None:
    """Scores may be below -1e9, where transformers gives up. All beams have the same length here,
    so their log-probabilities determine their order."""
    searches = Searches(max_num_seqs=4)
    how = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    searches.search("r", 4, 30, **how)
    searches.finish()
    plain = reference_beams(PROMPT, 4, 30, length_penalty=0.0)
    searches.assert_beams("r", [(tokens, score / 30**length_penalty) for tokens, score in plain])


def test_never_mode_uses_the_current_length_for_negative_penalties() -> None:
    """With early_stopping="never", a bound by the longest possible length would end this search too
    early."""
    folder, prompt, stops = checkpoint("llama", 11), (4, 8, 1, 5), (1, 4, 8)
    how: dict[str, Any] = {"length_penalty": -0.2, "early_stopping": "never"}
    searches = Searches(folder, max_num_seqs=2)
    searches.search("r", 2, 20, prompt, stops=stops, **how)
    searches.finish()
    searches.assert_beams("r", reference_beams(prompt, 2, 20, stops, **how, folder=folder))


@pytest.mark.parametrize(
    ("budget", "num_tokens", "width"),
    pairwise([3, 64], [1, 9], [3, 4]),
)
def test_equal_candidates_prefer_the_lower_token_id(
    width: int, num_tokens: int, budget: int
) -> None:
    """Each token has a twin with the same log-probability. Beams match transformers except for the
    choice between twins. Here the lower id comes first in any batch."""
    folder = twins_checkpoint(98)
    searches = Searches(folder, max_num_seqs=9, max_num_batched_tokens=budget)
    searches.add("a", OTHERS[0], 12)
    searches.search("r", width, num_tokens)
    searches.finish()
    got = [tuple(beam.token_ids) for beam in searches.beams["r"]]
    searches.assert_beams("r", reference_beams(PROMPT, width, num_tokens, folder=folder), same=2)
    assert len(set(got)) == width
    assert not any(token % 2 for token in got[0])
    assert got[1] == (*got[0][:-1], got[0][-1] + 1)


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "width"),
    in_turn([True, False, "never"], [0.0, 1.0, 2.0, -0.5], [2, 4]),
)
def test_search_ends_if_running_beams_only_equal_finished_ones(
    width: int, length_penalty: float, early_stopping: bool | str
) -> None:
    """One of two equal candidates stops. The running beam is then as good as the finished one,
    which is not enough to replace it."""
    how = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    folder, stops = twins_checkpoint(24), tuple(range(0, 24, 2))
    prompts = [(18, 5, 18, 6), (10, 17, 8, 20), (16, 17, 16, 0)]
    searches = Searches(folder, max_num_seqs=8)
    for i, prompt in enumerate(prompts):
        searches.search(str(i), width, 12, prompt, stops=stops, **how)
    searches.finish()
    for i, prompt in enumerate(prompts):
        expected = reference_beams(prompt, width, 12, stops, **how, folder=folder)
        searches.assert_beams(str(i), expected, same=2)


def test_beams_share_the_blocks_of_common_tokens() -> None:
    """No running beam has a block of its own where beams have the same tokens."""
    searches = Searches(max_num_seqs=4, enable_prefix_caching=False)
    searches.search("r", 4, 30)
    pool = searches.core.scheduler.memory.kv.pools[0]
    saved = []
    while searches.core.has_work:
        searches.step()
        running = searches.core.scheduler.rows.sequences()
        if len(running) == 4:
            held = [set(s.blocks.tables[0].blocks) for s in running]
            saved.append(1 - pool.num_used / sum(map(len, held)))
            tokens = [tuple(s.known_tokens.tolist()) for s in running]
            assert len(set(tokens)) == 4, "two beams are the same"
    assert min(saved) > 0.3


def test_search_that_fails_its_step_fails_alone() -> None:
    searches = Searches(max_num_seqs=8)
    searches.runner.raises = searches.runner.holds_poison
    searches.search("bad", 3, 8, (1, 2, 96, 4, 5))
    searches.search("r", 2, 8)
    searches.finish()
    assert error_of(searches.last["bad"]) and "bad" not in searches.beams
    searches.assert_beams("r", reference_beams(PROMPT, 2, 8))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"logprobs": 2}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"beam_width": 1, "n": 2}, "beam_width"),
        ({"early_stopping": "maybe"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": -10.5}, "length_penalty"),
        ({"stop": ["x"]}, "stop"),
    ],
)
def test_parameters_incompatible_with_beam_search_are_rejected(
    more: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(use_beam_search=True, **more)


@pytest.mark.parametrize(
    ("depth", "when"),
    [
        (1, "before"),
        (3, "after"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((1, "after"), (2, "before"), (2, "after"), (3, "before"))
        ),
    ],
)
def test_one_failing_step_does_not_change_beams(depth: int, when: str) -> None:
    """Each of the steps in turn raises once. No request fails."""
    for fails_at in range(1, 9, 2 if depth > 1 else 1):
        searches = Searches(max_num_seqs=8, pipeline_depth=depth, when=when)
        searches.runner.num_calls = 0

        def raises(plan: Any, runner: Any = searches.runner, at: int = fails_at) -> bool:
            runner.num_calls += 1
            return bool(runner.num_calls == at)

        searches.runner.raises = raises
        searches.search("r", 3, 8)
        searches.add("a", OTHERS[0], 10)
        searches.finish()
        assert searches.runner.num_raised == 1
        searches.assert_beams("r", reference_beams(PROMPT, 3, 8))
        searches.assert_exact("a")
