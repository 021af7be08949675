"""The scheduler under random programs, against a plain model of each request's tokens.

Depth 1, 2 and 3; full, window and state groups, alone and mixed; pools so small that
preemption is common; aborts anywhere. Some requests make their step raise, or their rows compute
garbage, at any point. Plans run when they are made or when their result is requested. Invariants
are checked after every operation.

Covers `base/plan.py`, `scheduler/core/arrivals.py`, `scheduler/core/lifecycle.py`,
`scheduler/core/planning.py`, `scheduler/core/queue.py`, `scheduler/core/rows.py`,
`scheduler/core/scheduler_core.py` and `scheduler/core/step_results.py`.
"""

from collections import defaultdict

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.base.clock import FakeClock
from quire.base.errors import RequestError
from quire.base.events import Event, Finished, Stepped
from quire.base.messages import Abort, Append, Draft, Drafted, Request, ResetPrefixCache, Unpin
from quire.base.requests.validation import RequestLimits
from quire.base.settings.config import SchedulerConfig
from quire.base.settings.kv_transfer import COMPUTED, EVICTED, NOTHING, KVTransfer
from quire.base.step_outputs import StepOutputs
from quire.engine.attachments.grammars import GrammarAttachment
from quire.engine.attachments.stores import StoresAttachment
from quire.engine.client.output import StepReader
from quire.engine.loop.core import EngineCore
from quire.kv.digest import extend_digests
from quire.kv.manager import KVManager
from quire.kv.sizing import MIN_STATES
from quire.kv.table import NULL
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.queue import Fifo
from quire.scheduler.core.sequence import Sequence
from quire.scheduler.policy.srtf import Srtf
from quire.scheduler.policy.two_level import TwoLevel
from quire.scheduler.reuse import keeping
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import STATE, CacheGroup
from tests.support.engine.updates import read
from tests.support.scheduler.fake_device import (
    VOCAB,
    Curse,
    FakeDevice,
    FakeExecutor,
    FakeGrammars,
    allowed_tokens,
    expected_tokens,
    make_request,
    next_token,
)
from tests.support.scheduler.fake_stores import BLOCK, FakeStores
from tests.support.scheduler.state_machines import FEW_OR_MANY, run_machine

FULL = CacheGroup("full", (0,), 1, 8)
WINDOW = CacheGroup("window", (1,), 1, 8, window=6)
STATES = CacheGroup("state", (2,), state_size=8)
MAX_LEN = 40
# Computed for another engine; by another engine; with a wrong name of the last block.
TRANSFERS = (
    None, None, KVTransfer(keeps=True), KVTransfer(waits=True), KVTransfer(keeps=True, waits=True),
    KVTransfer(waits=True, num_blocks=2, digest=bytes(32)),
)  # fmt: skip


def names_of(sequence: Sequence, root: bytes) -> list[bytes]:
    """The names of the full blocks of a sequence's known tokens, counted from this root."""
    digests: list[bytes] = []
    known = sequence.known_tokens
    extend_digests(digests, root, known, BLOCK, len(known) // BLOCK, marks=sequence.marks)
    return digests


class SchedulerMachine(RuleBasedStateMachine):
    groups: tuple[CacheGroup, ...] = (FULL,)
    num_drafts = 0  # in each plan, for each row
    num_stages = 1
    takes_media = False

    @initialize(
        depth=st.integers(1, 3),
        budget=st.one_of(st.integers(1, 24), st.integers(25, 60)),
        rows=st.integers(1, 5),
        spare=st.integers(0, 12),
        caching=st.booleans(),
        lazy=st.booleans(),
        mode=st.sampled_from(["recompute", "swap"]),
        policy=st.sampled_from([Fifo, Srtf, TwoLevel]),
        threshold=st.sampled_from([0, 0, 1, 5]),
        tier=st.sampled_from([None, None, 0, 2, 7, 60]),
        stores=st.integers(0, 2),
        kept=st.sampled_from([EVICTED, COMPUTED]),
    )
    def start(
        self,
        depth,
        budget,
        rows,
        spare,
        caching,
        lazy,
        mode,
        policy,
        threshold,
        tier,
        stores,
        kept=EVICTED,
    ):
        most = MAX_LEN // BLOCK + 1
        sizes = [MIN_STATES if group.kind == STATE else most for group in self.groups]
        num_blocks = tuple(size + spare for size in sizes)
        limits = None if tier is None else (tier,) * len(self.groups)
        self.kv = KVManager(self.groups, num_blocks, BLOCK, caching, host_limits=limits)
        config = SchedulerConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            pipeline_depth=depth,
            preemption_mode=mode,
            long_prefill_token_threshold=threshold,
        )
        stores = 0 if tier is None else stores
        memory = Memory(self.kv, budget, watermark=0.1)
        config = self.configured(config)
        self.scheduler = Scheduler(
            memory, config, MAX_LEN, policy, stores, self.num_stages, kept, self.takes_media
        )
        self.stores = FakeStores(stores, self.scheduler)
        self.clock = FakeClock()
        host_blocks = tuple(pool.num_blocks for pool in self.kv.host_pools)
        executor = self.make_executor((self.groups, num_blocks, BLOCK, host_blocks), lazy)
        self.stores.host = [slots.reshape(-1, BLOCK) for slots in self.device.host_slots]
        self.core = EngineCore(
            self.scheduler,
            executor,  # type: ignore[arg-type]
            self.clock,
            RequestLimits(50, MAX_LEN, 0, 1 << 20, takes_grammars=True),
        )
        self.core.attach(StoresAttachment(self.stores, self.clock))  # type: ignore[arg-type]
        self.grammars = FakeGrammars()
        self.core.attach(GrammarAttachment(self.grammars))  # type: ignore[arg-type]
        # An executor that computes in `submit` cannot wait for masks that need an earlier result.
        self.takes_grammars = lazy or depth == 1
        self.bad_grammars: set[str] = set()
        self.events: list[Event] = []
        self.core.subscribe(self.events.append)
        self.requests: dict[str, Request] = {}
        self.output: dict[tuple[str, int], list[int]] = {}
        self.opened: list[str] = []
        self.in_pieces: set[str] = set()
        self.pins: list[str] = []
        self.roots: dict[str, set[bytes]] = defaultdict(set)  # of a salt
        self.ended: set[tuple[str, int]] = set()
        self.reason: dict[str, str] = {}
        self.num_resets = 0
        self.reader = StepReader()

    def make_executor(self, sizes: tuple, lazy: bool):  # type: ignore[no-untyped-def,type-arg]
        self.device = FakeDevice(*sizes)
        return FakeExecutor(self.device, lazy)

    @rule(
        seed=st.integers(0, 3),
        length=st.integers(1, 30),
        max_tokens=st.one_of(st.none(), st.integers(1, 12)),
        stops=st.lists(st.integers(0, 49), max_size=10),
        min_tokens=st.integers(0, 1),
        salt=st.sampled_from(["", "", "other"]),
        n=st.sampled_from([1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, 0, -1, 7]),
        tenant=st.sampled_from(["", "", "a", "b"]),
        timeout_s=st.sampled_from([0.0, 0.0, 0.0, 4.0, 20.0]),
        forks=st.booleans(),
        grammar=st.sampled_from(["", "", "one", "two"]),
        transfer=st.sampled_from(TRANSFERS),
        curse=st.one_of(
            st.none(),
            st.none(),
            st.builds(Curse, position=st.integers(0, 35), raises=st.booleans()),
        ),
    )
    def add(
        self,
        seed,
        length,
        max_tokens,
        stops,
        min_tokens,
        salt,
        n,
        priority,
        tenant,
        timeout_s,
        forks,
        grammar,
        transfer,
        curse,
    ) -> None:
        """Prompts with equal seeds share a prefix; prompts of odd seeds repeat one block. forks:
        the prompt begins with the last pinned prefix."""
        prompt = self._tokens(seed)[:length]
        if forks and self.pins:
            pinned = self.requests[self.pins[-1]]
            salt = pinned.cache_salt
            prompt = (pinned.prompt_token_ids + prompt)[:30]
        name = f"r{len(self.requests)}"
        number = len(self.requests)
        request = make_request(
            name,
            prompt,
            max_tokens=max_tokens,
            stops=stops,
            min_tokens=min_tokens,
            salt=salt,
            seed=number,
            n=n,
            priority=priority,
            tenant=tenant,
            timeout_s=timeout_s,
            grammar=grammar if self.takes_grammars else "",
            transfer=transfer,
        )
        request = self.prepared(request)
        try:
            self.core.add(request)
        except RequestError:
            assert n > 1 or self.pins, "only a group, or a request alongside pins, can be too large"
            return
        if curse is not None:
            self.device.curses[number] = curse
        self.requests[name] = request
        for index in range(request.params.n):
            self.output[name, index] = []

    def configured(self, config: SchedulerConfig) -> SchedulerConfig:
        """Return the settings; machines with other settings override it."""
        return config

    def prepared(self, request: Request) -> Request:
        """Return the request to send; machines with other requests override it."""
        return request

    def let_go(self) -> None:
        """Release all retained requests; for machines that retain some."""

    def _tokens(self, seed: int) -> list[int]:
        tokens = np.random.default_rng(seed // 2).integers(0, 50, 32)
        if seed % 2:
            tokens[BLOCK:] = np.tile(tokens[:BLOCK], 7)
        return tokens.tolist()

    @rule()
    def plan(self) -> None:
        plan = self.core.plan()
        if plan is not None:
            min_planned = min(len(plan.rows), 1)  # without rows, it copies for stores
            assert min_planned <= plan.num_scheduled_tokens <= self.scheduler.token_budget
            assert min_planned or self.scheduler.stores is not None
            assert len(set(plan.rows.tolist())) == len(plan.rows)

    @rule()
    def deliver(self) -> None:
        if self.scheduler.planner.in_flight:
            self._take(self.core.take())
        else:
            self._take(self.core.take_dropped())

    @rule(steps=st.integers(1, 12))
    def run(self, steps: int) -> None:
        """Plan ahead as far as the depth allows, then take the oldest result, as the core does."""
        for _ in range(steps):
            for _ in range(self.scheduler.depth):
                self.plan()
                self.closes()
            self.deliver()
            self.closes()
            self.answer(steps, fails=False)
            self.compile(steps, fails=False)

    @rule(num=st.integers(1, 6), wrong=st.sampled_from([0, 1, 2, 3, 9, 9]))
    def draft(self, num: int, wrong: int) -> None:
        """Propose draft tokens for all rows; `wrong`: index of the first one to be rejected."""
        drafts = []
        for sequence in self.scheduler.rows.sequences():
            context = known = sequence.known_tokens.tolist()
            grammar, first = sequence.request.grammar, sequence.num_prompt_tokens
            for i in range(num):
                allowed = allowed_tokens(grammar, context[first:]) if grammar else None
                context = [*context, VOCAB - 1 if i == wrong else next_token(context, allowed)]
            tokens = context[len(known) :]
            name = sequence.request.request_id
            drafts.append(Draft(name, sequence.index, len(known), tokens))
        self.core.control(Drafted(drafts))

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(
        length=st.integers(1, 12),
        max_tokens=st.one_of(st.none(), st.integers(1, 12)),
        tenant=st.sampled_from(["", "a"]),
        grammar=st.sampled_from(["", "one"]),
    )
    def open(self, length, max_tokens, tenant, grammar="") -> None:
        """Send an open prompt, which arrives in pieces."""
        number = len(self.requests)
        name = f"r{number}"
        tokens = np.random.default_rng(0).integers(0, 50, 32)
        request = make_request(
            name,
            tokens[:length].tolist(),
            max_tokens=max_tokens,
            seed=number,
            tenant=tenant,
            grammar=grammar if self.takes_grammars else "",
        )
        self.core.add(msgspec.structs.replace(request, is_open=True))
        self.requests[name], self.output[name, 0] = request, []
        self.opened.append(name)
        self.in_pieces.add(name)

    @rule(
        seed=st.integers(0, 3),
        length=st.integers(1, 24),
        pin_s=st.sampled_from([0.0, 0.0, 5.0]),
        salt=st.sampled_from(["", "", "other"]),
        cursed_at=st.sampled_from([None, None, None, 3, 12]),
    )
    def pin(self, seed, length, pin_s, salt, cursed_at) -> None:
        """Pin a prefix of a prompt that `add` may send."""
        number = len(self.requests)
        name = f"r{number}"
        prompt = self._tokens(seed)[:length]
        request = make_request(name, prompt, max_tokens=1, salt=salt, seed=number)
        request = msgspec.structs.replace(request, pin_s=pin_s)
        try:
            self.core.add(request)
        except RequestError:
            return
        if cursed_at is not None:
            self.device.curses[number] = Curse(cursed_at, raises=True)
        self.pins.append(name)
        self.requests[name], self.output[name, 0] = request, []

    @rule(pick=st.integers(0, 50))
    def unpin(self, pick: int) -> None:
        if self.pins:
            self._unpin(self.pins[pick % len(self.pins)])

    def _unpin(self, name: str) -> None:
        self.core.control(Unpin(name))
        self.reason.setdefault(name, "abort")
        assert name not in self.scheduler.pinned.by_id

    @rule(pick=st.integers(0, 50), length=st.integers(0, 12), is_last=st.booleans())
    def append(self, pick: int, length: int, is_last: bool) -> None:
        opened = [name for name in self.opened if name not in self.reason]
        if not opened:
            return
        name = opened[pick % len(opened)]
        request = self.requests[name]
        prompt = request.prompt_token_ids
        tokens = np.random.default_rng(0).integers(0, 50, 32)[len(prompt) :][:length].tolist()
        self.core.control(Append(name, tokens, is_last))
        self.requests[name] = msgspec.structs.replace(request, prompt_token_ids=prompt + tokens)
        if is_last:
            self.opened.remove(name)

    @rule()
    def reset(self) -> None:
        """Reset the cache: blocks from before are found in no memory and no store."""
        named = {
            (g, d)
            for g, p in enumerate(self.kv.pools)
            for d in map(p.digest_of, range(p.num_blocks))
            if d
        }
        self.stores.old |= named.union(*self.stores.kept)
        self.num_resets += 1
        self.core.control(ResetPrefixCache(f"epoch {self.num_resets}"))
        assert not any(pool.num_indexed for pool in (*self.kv.pools, *self.kv.host_pools))

    @rule(has_others=st.booleans())
    def share(self, has_others: bool) -> None:
        """Set whether the stores have blocks of other engines, as after a restart."""
        self.stores.has_others = has_others

    @rule(pick=st.integers(0, 50), fails=st.sampled_from([False, False, False, True]))
    def answer(self, pick: int, fails: bool) -> None:
        """Let a store carry out any of its orders, or fail to."""
        answer = self.stores.answer(pick, fails)
        if answer is not None:
            self.core.control(answer)

    @rule(pick=st.integers(0, 50), fails=st.sampled_from([False, False, False, True]))
    def compile(self, pick: int, fails: bool) -> None:
        """Compile a grammar, or reject it. Its request may have ended already."""
        ready = self.grammars.compile(pick, fails)
        if ready is not None:
            if fails:
                self.bad_grammars.add(ready.request_id)
            self.core.control(ready)

    @rule(pick=st.integers(0, 50))
    def abort(self, pick: int) -> None:
        alive = [name for name in self.requests if name not in self.reason]
        if alive:
            name = alive[pick % len(alive)]
            self.core.control(Abort(name))
            self.reason[name] = "abort"
            self.ended |= {(name, index) for index in range(self.requests[name].params.n)}

    @invariant()
    def closes(self) -> None:
        if "scheduler" in vars(self):
            self.scheduler.check_invariants()
            self._check_index()

    def _check_index(self) -> None:
        """Check that the indexed blocks of each row are named after its known tokens.

        A block that came from a pinned prefix or a parent is named after another root: that of a
        sequence with the same salt, whose first tokens are the same.
        """
        for sequence in self.scheduler.lifecycle.sequences.values():
            self.roots[sequence.request.cache_salt].add(sequence.root)
        for sequence in self.scheduler.rows.sequences():
            own = names_of(sequence, sequence.root)
            for table, pool in zip(sequence.blocks.tables, self.kv.pools, strict=True):
                for i, block_id in enumerate(table.blocks):
                    if i < table.num_dropped or block_id == NULL or not pool.is_indexed(block_id):
                        continue
                    if pool.lookup(own[i]) != block_id:
                        roots = self.roots[sequence.request.cache_salt]
                        names = [names_of(sequence, root)[i] for root in roots]
                        assert block_id in map(pool.lookup, names)

    def teardown(self) -> None:
        if "scheduler" not in vars(self):
            return
        for name in self.opened:
            self.core.control(Append(name, [], is_last=True))
        for name in self.pins[::2]:
            self._unpin(name)
        for _ in range(5000):
            self.answer(0, fails=False)
            self.compile(0, fails=False)
            if not self.scheduler.has_work and not self.stores.pending:
                break
            self.plan()
            self.deliver()
        self.deliver()  # the end of a request that never got a row
        assert not self.scheduler.has_work, "a request starves"
        for name in self.pins:
            self._unpin(name)
        self.let_go()
        assert all(pool.num_used == 0 for pool in self.kv.pools), "blocks leak"
        assert all(pool.num_used == 0 for pool in self.kv.host_pools), "host blocks leak"
        for (name, index), output in self.output.items():
            request = self.requests[name]
            expected = expected_tokens(request, MAX_LEN)
            if self.reason[name] == "error" and name in self.bad_grammars:
                pass  # at any time
            elif self.reason[name] == "error" and request.seed in self.device.curses:
                curse = self.device.curses[request.seed]
                longest = max(len(self.output[name, i]) for i in range(request.params.n))
                length = len(request.prompt_token_ids) + longest
                assert length > curse.position, "an error before the token that is cursed"
            elif self.reason[name] == "error":
                assert name in self.in_pieces and self.pins, "an error without a cause"
            if self.reason[name] in ("abort", "error", "timeout", "pinned"):
                assert output == expected[: len(output)]
            else:
                assert output == expected, (name, index)
                hit_stop = expected[-1] in request.stop_token_ids
                assert self.reason[name] == ("stop" if hit_stop else "length")

    def _take(self, outputs: StepOutputs) -> None:
        updates = read(self.reader, outputs)
        self._check_events(sum(len(update.token_ids) for update in updates))
        for update in updates:
            name = update.request_id, update.index
            assert name not in self.ended or not update.token_ids, "a token after the end"
            self.output[name] += update.token_ids
        for update, finish in outputs.finished:
            self.ended.add((update.request_id, update.index))
            if self.reason.get(update.request_id) != "error":
                self.reason[update.request_id] = finish.reason

    def _check_events(self, num_tokens: int) -> None:
        """Check that the step's event precedes the ends that it caused, and counts its tokens."""
        self.core.publish()
        events = self.events
        at = [i for i, event in enumerate(events) if isinstance(event, Stepped)]
        if not at:  # only timeouts were reported
            events.clear()
            return
        assert len(at) == 1
        assert len(events[at[0]].rows) + events[at[0]].num_accepted == num_tokens
        ends = [e for e in events[: at[0]] if isinstance(e, Finished)]
        grown = {"error"} if self.pins else set()  # an open prompt that is too long alongside pins
        for end in ends:
            if end.request_id in self.bad_grammars and end.reason == "error":
                continue
            in_pieces = end.request_id in self.in_pieces
            assert end.reason in {"abort", "timeout"} | (grown if in_pieces else set())
        events.clear()


class WindowMachine(SchedulerMachine):
    groups = (WINDOW,)


class MixedMachine(SchedulerMachine):
    groups = (FULL, WINDOW)


class StateMachine(SchedulerMachine):
    groups = (STATES,)


class HybridMachine(SchedulerMachine):
    groups = (FULL, STATES)


class StoresMachine(SchedulerMachine):
    """Always with stores, a small pool and hits. in_flight: maximum number of blocks in flight to a
    store; further ones wait."""

    @initialize(
        depth=st.integers(1, 3),
        budget=st.integers(4, 40),
        rows=st.integers(1, 4),
        spare=st.integers(0, 3),
        lazy=st.booleans(),
        mode=st.sampled_from(["recompute", "swap"]),
        tier=st.sampled_from([2, 7, 60]),
        stores=st.integers(1, 2),
        kept=st.sampled_from([NOTHING, EVICTED, COMPUTED, COMPUTED]),
        in_flight=st.sampled_from([1, 2, 256]),
    )
    def start(self, in_flight=256, **drawn) -> None:  # type: ignore[override]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(keeping, "MAX_KEEP_BLOCKS", in_flight)
            super().start(caching=True, policy=Fifo, threshold=0, **drawn)


class MixedStoresMachine(StoresMachine):
    groups = (FULL, WINDOW)


class HybridStoresMachine(StoresMachine):
    groups = (FULL, WINDOW, STATES)


@FEW_OR_MANY
@pytest.mark.parametrize(
    "machine",
    [
        SchedulerMachine,
        WindowMachine,
        MixedMachine,
        StateMachine,
        HybridMachine,
        StoresMachine,
        MixedStoresMachine,
        HybridStoresMachine,
    ],
)
def test_random_programs_give_each_request_its_own_tokens(machine: type, max_examples: int) -> None:
    run_machine(machine, max_examples)


def test_host_blocks_are_written_before_they_are_reused() -> None:
    """A plan that has lost its only row still copies blocks out, even before its result is taken.
    A store may fill these host blocks afterwards."""
    machine = StoresMachine()
    machine.start(
        depth=2, budget=21, rows=4, spare=2, lazy=False, mode="swap", tier=60, stores=2,
        kept=COMPUTED,
    )  # fmt: skip
    machine.share(has_others=True)
    machine.open(length=10, max_tokens=9, tenant="")
    machine.open(length=4, max_tokens=6, tenant="")
    machine.pin(seed=0, length=12, salt="other", pin_s=0.0, cursed_at=3)
    machine.reset()
    machine.run(steps=10)
    machine.pin(seed=3, length=11, salt="other", pin_s=0.0, cursed_at=12)
    machine.add(
        seed=3, length=15, max_tokens=None, stops=[], min_tokens=0, salt="", n=1, priority=0,
        tenant="a", timeout_s=0.0, forks=True, grammar="", transfer=KVTransfer(keeps=True),
        curse=None,
    )  # fmt: skip
    machine.run(steps=11)
    machine.teardown()
