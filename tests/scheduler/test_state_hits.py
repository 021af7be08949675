"""Which states stay in small pools: at the ends of turns, and where prompts diverge.

Covers `kv/states.py`.
"""

from collections.abc import Callable

import numpy as np
import pytest

from quire.base.events import Admitted
from quire.base.settings.config import SchedulerConfig
from quire.kv.manager import KVManager
from quire.scheduler.core.memory import Memory
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup
from tests.support.scheduler.fake_device import make_request
from tests.support.scheduler.plain_scheduler import answer

FULL, STATES = CacheGroup("full", (0,), 1, 8), CacheGroup("state", (1,), state_size=8)
SIZE, NUM_TALKS = 4, 8
Tokens = list[int]


class Service:
    """A scheduler that serves a request, together with the requests added before."""

    def __init__(self, num_states: int) -> None:
        kv = KVManager((FULL, STATES), (3000, num_states), SIZE)
        config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64)
        self.scheduler = Scheduler(Memory(kv, 64), config, 1000)
        self.num = 0

    def add(self, prompt: Tokens, num_output: int = 10) -> None:
        self.num += 1
        self.scheduler.add(make_request(f"r{self.num}", prompt, max_tokens=num_output), 0.0)

    def serve(self, prompt: Tokens, num_output: int = 10) -> tuple[int, Tokens]:
        """Serve a request. Return the number of its cached tokens, and its answer."""
        scheduler, found, got = self.scheduler, -1, []
        self.add(prompt, num_output)
        while scheduler.has_work:
            decisions = scheduler.schedule(0.0)
            found = next(
                (e.num_cached_tokens for e in decisions.events if isinstance(e, Admitted)), found
            )
            assert decisions.plan is not None
            result = answer(decisions.plan)
            got += result.token_ids[:, 0].tolist()
            scheduler.update(result, 0.0)
            scheduler.check_invariants()
        return found, got

    def serve_other_prompts(self) -> None:
        for _ in range(2):
            self.serve(words(1000 + self.num, 30))


def words(seed: int, num: int) -> Tokens:
    return np.random.default_rng(seed).integers(100, 1000, num).tolist()


def num_common(tokens: Tokens, others: Tokens) -> int:
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(others)))


def with_answer(prompt: Tokens, answer: Tokens) -> Tokens:
    return prompt + answer


def without_thoughts(prompt: Tokens, answer: Tokens) -> Tokens:
    """Omit also the tokens with which the template began the answer."""
    return prompt[:-3] + answer[5:]


@pytest.mark.parametrize("next_turn", [with_answer, without_thoughts])
def test_each_turn_of_many_conversations_hits_the_turn_before(
    next_turn: Callable[[Tokens, Tokens], Tokens],
) -> None:
    """There is little more than one state for each conversation. Earlier states must be evicted
    first, and the less useful of the two that a turn stores. The first turns show which it is."""
    service = Service(NUM_TALKS + 6)
    talks, computed = [words(talk, 30) for talk in range(NUM_TALKS)], [Tokens()] * NUM_TALKS
    order = [0, 1] * 3 + [*range(NUM_TALKS)] * 3
    for number, talk in enumerate(order):
        prompt = talks[talk]
        found, got = service.serve(prompt)
        if number >= len(order) - 2 * NUM_TALKS:
            assert found >= num_common(prompt, computed[talk]) - 12
        talks[talk] = next_turn(prompt, got) + words(number, 9)
        computed[talk] = prompt + got[:-1]


def test_the_third_prompt_with_a_shared_prefix_and_all_later_ones_hit_it() -> None:
    service, system = Service(12), words(0, 102)
    found = []
    for i in range(9):
        found.append(service.serve(system + words(1 + i, 20))[0])
        service.serve_other_prompts()
    assert found == [0, 0, *(100,) * 7]


def test_a_state_with_two_hits_stays_for_a_third() -> None:
    service, prompt = Service(12), words(0, 99)
    for _ in range(4):
        service.serve_other_prompts()
    prompt += service.serve(prompt)[1]
    service.add(prompt + words(1, 20))
    assert service.serve(prompt + words(2, 20))[0] == 108
    service.serve_other_prompts()
    assert service.serve(prompt + words(3, 20))[0] == 108


def test_the_end_of_a_turn_does_not_count_as_a_divergence_of_prompts() -> None:
    """If its state was evicted, the next turn stores none there."""
    service = Service(6)
    _, pool = service.scheduler.memory.kv.pools
    first = words(0, 30)
    _, got = service.serve(first)
    ends = list(service.scheduler.memory.kv.states.statistics.positions)
    assert len(ends) == 2 and all(pool.lookup(end) is not None for end in ends)
    for _ in range(4):
        service.serve_other_prompts()
    assert all(pool.lookup(end) is None for end in ends)
    found, _ = service.serve(first + got + words(50, 30))
    assert found == 0 and all(pool.lookup(end) is None for end in ends)
