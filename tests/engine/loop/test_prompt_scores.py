"""Prompt log-probabilities of rows that are preempted in the middle of their prompt.

A resumed prompt may find more of its tokens in a cache than were scored. The blocks come from its
own plans in flight, other requests, host memory or a pinned prefix. In every case each position is
scored once, in order, with the score of the model alone.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.events import Event, Preempted
from quire.base.messages import Request, Unpin
from quire.base.requests.sampling_params import SamplingParams
from quire.base.step_outputs import SequenceUpdate
from tests.support.cases import in_turn
from tests.support.engine.failing_core import Bench, prompt, with_poison
from tests.support.engine.updates import read
from tests.support.models.reference_checkpoints import checkpoint, pool_bytes, reference_logits

SCORED = {"prompt_logprobs": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder() -> Path:
    return checkpoint("llama")


def reference(folder: Path, tokens: list[int]) -> list[float]:
    """Return the log-probability of each token after the first, by transformers' logits."""
    logits = reference_logits(folder, tokens).double()
    logprobs = logits.log_softmax(-1)
    return [float(logprobs[i, token]) for i, token in enumerate(tokens[1:])]


def scores(bench: Bench, name: str) -> tuple[list[int], list[float]]:
    """Return the scored tokens and their log-probabilities."""
    found = [c for o in bench.history[name] for c in o.prompt_candidates or []]
    return [int(c.token_ids[0]) for c in found], [float(c.logprobs[0]) for c in found]


def assert_scored(bench: Bench, name: str) -> None:
    tokens = bench.requests[name].prompt_token_ids
    token_ids, logprobs = scores(bench, name)
    assert token_ids == tokens[1:], name
    np.testing.assert_allclose(logprobs, reference(bench.folder, tokens), 1e-5, 1e-5)


class Scores(Bench):
    """A bench with a pool of so few blocks of 4 tokens that rows are preempted. It collects the
    requests that were preempted in the middle of their prompt."""

    def __init__(self, folder: Path, num_blocks: int, **settings: Any) -> None:
        memory = pool_bytes(folder, num_blocks, 4)
        defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 9, "max_model_len": 44}
        settings = defaults | {"watermark": 0.0} | settings
        super().__init__(folder, kv_cache_memory_bytes=memory, **settings)
        self.restarted: set[str] = set()
        self.core.subscribe(self._hear)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Preempted):
            self.restarted |= (
                {event.request_id} if self._is_partly_scored(event.request_id) else set()
            )

    def _is_partly_scored(self, name: str) -> bool:
        scored = len(scores(self, name)[0]) if name in self.history else 0
        return 0 < scored < len(self.requests[name].prompt_token_ids) - 1

    def step(self) -> list[SequenceUpdate]:
        """A request may have several sequences, which end one by one."""
        outputs = read(self.reader, self.core.step())
        for output in outputs:
            self.last[output.request_id] = output
            self.history[output.request_id].append(output)
        self.core.scheduler.check_invariants()
        return outputs

    def pin(self, tokens: list[int]) -> None:
        params = SamplingParams(max_tokens=1)
        self.requests["pin"] = Request("pin", tokens, params, seed=0, pin_s=0.0)
        self.tokens["pin"], self.history["pin"] = [], []
        self.core.add(self.requests["pin"])
        while self.core.has_work:
            self.step()


def program(bench: Scores, seed: int, poisons: bool = False) -> set[str]:
    """Run requests that share prefixes; return the scored ones that must succeed."""
    rng, scored = random.Random(seed), set[str]()
    for i in range(7):
        name, length = f"r{i}", rng.randint(9, 32)
        tokens = [*prompt(seed, 32)[: rng.randint(0, length)], *prompt(100 + i, length)][:length]
        kind = rng.choice(["plain", "scored", "scored", "n", "beams"])
        more: dict[str, Any] = dict(SCORED) if kind in ("scored", "n") else {}
        if kind in ("n", "beams"):
            more |= {"n": 2, "use_beam_search": kind == "beams", "temperature": 1.0}
        if poisons and i % 4 == 1:
            tokens = with_poison(tokens, rng.randrange(length))
        elif "prompt_logprobs" in more:
            scored.add(name)
        bench.add(name, tokens, rng.randint(2, 12), **more)
        for _ in range(rng.randint(0, 3)):
            bench.step()
    while bench.core.has_work:
        bench.step()
    bench.core.control(Unpin("pin"))
    bench.finish()
    return scored


@pytest.mark.parametrize(
    ("mode", "depth"), in_turn(["recompute", "swap", "pins", "host tier", "faults"], [1, 3, 2])
)
def test_preempted_prompts_are_scored_once_per_position(
    folder: Path, depth: int, mode: str
) -> None:
    """Some of the prompts were preempted after a part of their positions was scored."""
    settings: dict[str, Any] = {"preemption_mode": "swap" if mode == "swap" else "recompute"}
    if mode == "host tier":
        settings["kv_host_gb"] = 0.001
    restarted = 0
    for seed in (0, 1):
        bench = Scores(folder, 18 if mode == "pins" else 14, pipeline_depth=depth, **settings)
        if mode == "pins":
            bench.pin(prompt(seed, 14))
        scored = program(bench, seed, mode == "faults")
        assert bench.failed() == ({"r1", "r5"} if mode == "faults" else set())
        for name in scored:
            assert_scored(bench, name)
        restarted += len(bench.restarted & scored)
    if (mode, depth) != ("faults", 1):
        assert restarted > 0, "no row was preempted in the middle of its prompt"


@pytest.mark.parametrize("num_scored", [9, 18, 27])
def test_prompt_resumed_inside_a_pinned_windowed_prefix_is_scored(num_scored: int) -> None:
    """The pin holds only the window of the prefix's last token."""
    bench, tokens = Scores(checkpoint("mistral"), 40), prompt(3, 32)
    bench.pin(tokens[:30])
    bench.add("scored", tokens, 4, **SCORED)
    scheduler = bench.core.scheduler
    sequence = scheduler.lifecycle.sequences["scored"]
    while sequence.num_prompt_logprobs < num_scored:
        bench.step()
    scheduler.lifecycle.preempt(sequence, "test", 0.0)
    while bench.core.has_work:
        bench.step()
    assert_scored(bench, "scored")


def test_explicit_cache_reading_does_not_shift_prompt_scores(folder: Path) -> None:
    bench = Scores(folder, 14)
    bench.add("first", prompt(1, 20), 1)
    bench.finish()
    bench.add("scored", prompt(1, 20), 1, **SCORED, skip_reading_prefix_cache=False)
    bench.finish()
    assert_scored(bench, "scored")
    assert bench.last["scored"].num_cached_tokens == 0
