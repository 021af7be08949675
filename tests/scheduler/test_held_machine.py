"""Retained requests under random programs: forks of running and of retained requests at any token,
with or without more input, rewinds, releases and expiry. Other requests do everything else
meanwhile.

Each fork must get the answer of a request with its tokens, whatever it shares. A retained request
must keep its tokens. No block may remain when all are released.

Covers `scheduler/reuse/held.py`.
"""

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from quire.base.errors import RequestError
from quire.base.messages import Fork, Hold, Request, RetainedRequest, Rewind
from tests.scheduler.test_chunked_machine import CHUNKS, LATENTS
from tests.scheduler.test_guessing_machine import GuessingMachine
from tests.scheduler.test_scheduler_machine import (
    FULL,
    STATES,
    WINDOW,
    SchedulerMachine,
    StoresMachine,
)
from tests.support.scheduler.fake_device import make_request
from tests.support.scheduler.state_machines import FEW_OR_MANY, run_machine

MAX_PROMPT = 34


class HeldRules(SchedulerMachine):
    """Adds forks, rewinds and holds to a machine of any kind."""

    def prepared(self, request: Request) -> Request:
        """Retain two of three requests after their end, some of them for long."""
        keep_s = (0.0, 4.0, 1000.0)[request.seed % 3]
        return msgspec.structs.replace(request, keep_s=keep_s)

    @rule(
        pick=st.integers(0, 50),
        at=st.one_of(st.none(), st.integers(0, 40)),
        added=st.integers(0, 6),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.integers(1, 9),
        takes_over=st.booleans(),
    )
    def fork(self, pick, at, added, n, max_tokens, takes_over) -> None:
        sources = self.sources()
        if not sources:
            return
        source = sources[pick % len(sources)]
        number, tokens = len(self.requests), source.token_ids
        at = min(len(tokens) if at is None else 1 + at % len(tokens), MAX_PROMPT)
        more = np.random.default_rng(number).integers(0, 50, added).tolist()
        name, prompt = f"r{number}", (tokens[:at] + more)[:MAX_PROMPT]
        request = make_request(
            name, prompt, max_tokens=max_tokens, seed=number, n=n, salt=source.cache_salt
        )
        fork = Fork(source.id, source.index, at, takes_over and n == 1)
        request = msgspec.structs.replace(self.prepared(request), fork=fork)
        try:
            self.core.add(request)
        except RequestError:
            assert n > 1 or self.pins, "only a group, or a request alongside pins, can be too large"
            return
        self.requests[name] = request
        for index in range(n):
            self.output[name, index] = []

    def sources(self) -> list[RetainedRequest]:
        """Return all sequences that could be forked, with their tokens."""
        names = [*self.scheduler.retained.by_id, *self.scheduler.lifecycle.sequences]
        views = [self.core.held(name, index) for name in names for index in range(3)]
        return [one for found in views for one in found]

    @rule(pick=st.integers(0, 50), num=st.integers(1, 20))
    def rewind(self, pick: int, num: int) -> None:
        held = self.core.held()
        if held:
            one = held[pick % len(held)]
            left = max(1, one.num_tokens - num)
            self.core.control(Rewind(one.id, one.index, left))
            [now] = self.core.held(one.id, one.index)
            assert now.num_tokens == left

    @rule(pick=st.integers(0, 50), keep_s=st.sampled_from([0.0, 2.0, 50.0]))
    def hold(self, pick: int, keep_s: float) -> None:
        names = [*self.scheduler.retained.by_id, *self.scheduler.lifecycle.sequences]
        if names:
            name = names[pick % len(names)]
            self.core.control(Hold(name, keep_s))
            held = [one for one in self.core.held() if one.id == name]
            assert all(one.expires_in_s == keep_s for one in held) and (keep_s or not held)

    def closes(self) -> None:
        super().closes()
        if "scheduler" not in vars(self):
            return
        held = self.scheduler.retained
        for mine in held.by_id.values():
            for one in mine.values():
                name = one.request.request_id
                whole = self.requests[name].prompt_token_ids + self.output[name, one.index]
                assert one.tokens.tolist() == whole[: len(one.tokens)], "not the tokens that it had"
                assert one.num_computed <= len(one.tokens)
                assert (one in held.standing) == (one.blocks is not None)

    def let_go(self) -> None:
        assert not self.scheduler.retained.branches, "branches of ended requests"
        for one in self.core.held():
            self.core.control(Hold(one.id, 0.0))
        assert not self.scheduler.retained.tables()


class HeldMachine(HeldRules):
    pass


class HeldMixedMachine(HeldRules):
    groups = (FULL, WINDOW)


class HeldChunkedMachine(HeldRules):
    groups = (FULL, CHUNKS)


class HeldLatentMachine(HeldRules):
    groups = (LATENTS,)


class HeldHybridMachine(HeldRules):
    groups = (FULL, STATES)


class HeldStoresMachine(HeldRules, StoresMachine):
    groups = (FULL,)


class HeldGuessingMachine(HeldRules, GuessingMachine):
    pass


@FEW_OR_MANY
@pytest.mark.parametrize(
    "machine",
    [
        HeldMachine,
        HeldMixedMachine,
        HeldChunkedMachine,
        pytest.param(HeldLatentMachine, marks=pytest.mark.slow),
        HeldHybridMachine,
        HeldStoresMachine,
        HeldGuessingMachine,
    ],
)
def test_random_programs_of_forks_give_each_request_its_own_tokens(
    machine: type, max_examples: int
) -> None:
    run_machine(machine, max_examples)
