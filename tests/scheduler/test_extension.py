"""Plug-ins of the scheduler: a hit source and an extension that the core knows nothing of."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from quire.base.errors import RequestError
from quire.base.messages import Cancel, Request
from quire.base.plan import StepResult
from quire.base.settings.config import SchedulerConfig
from quire.kv.host_tier import Copies
from quire.kv.manager import KVBlocks, KVManager, SequenceBlocks
from quire.scheduler.core.extension import (
    CacheListener,
    Extension,
    Handler,
    HitSource,
    RequestCompletion,
    StepEnd,
    StepExtension,
)
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.sequence import Sequence
from quire.scheduler.reuse.offers import Offers
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup
from tests.support.scheduler.fake_device import make_request

FULL = CacheGroup("full", (0,), 1, 8)
SIZE, NUM_BLOCKS = 4, 12


class LastPrompt(HitSource, Extension):
    """Keeps the blocks of the prompt that ended last, for the next request that begins with it."""

    def __init__(self, kv: KVManager) -> None:
        self.entries: list[tuple[bytes, SequenceBlocks]] = []
        self._kv = kv

    def enter(self, sequence: Sequence, now: float) -> None:
        sequence.watch(self)

    def leave(self, sequence: Sequence, reason: str, now: float) -> None:
        self.evict_one(None)
        num = sequence.num_prompt_tokens // SIZE * SIZE
        blocks = self._kv.fork(sequence.blocks)
        self._kv.truncate(blocks, num)
        self._kv.set_evictable(blocks, True)
        self.entries.append((sequence.known_tokens[:num].tobytes(), blocks))

    def find(self, sequence: Sequence, best: KVBlocks | None) -> KVBlocks | None:
        [(tokens, blocks)] = self.entries
        num = len(tokens) // 4
        is_longer = best is None or num > best.num_tokens
        if not is_longer or sequence.known_tokens[:-1].tobytes()[: len(tokens)] != tokens:
            return best
        return KVBlocks(num, tuple(t.blocks[: num // SIZE] for t in blocks.tables), is_in_use=True)

    def evict_one(self, spared: Sequence | None) -> bool:
        if not self.entries:
            return False
        self._kv.free(self.entries.pop()[1])
        return True


def scheduler_of(caching: bool = False) -> Scheduler:
    kv = KVManager((FULL,), (NUM_BLOCKS,), SIZE, enable_prefix_caching=caching)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    return Scheduler(Memory(kv, 64, watermark=0.0), config, 64)


def run(scheduler: Scheduler, request: Request) -> int:
    """Serve one request to its end. Return the number of tokens that its first step computed."""
    assert scheduler.add(request, 0.0).refusal is None
    num_computed = 0
    while scheduler.has_work:
        plan = scheduler.schedule(0.0).plan
        assert plan is not None
        num_computed = num_computed or plan.num_scheduled_tokens
        num = len(plan.sample_rows)
        tokens = np.full((num, 1), 7, np.int32)
        scheduler.update(StepResult(plan.step_id, tokens, np.ones(num, np.int32)), 0.0)
    return num_computed


def test_a_hit_source_shares_blocks_and_evicts_them_only_if_that_is_enough() -> None:
    scheduler = scheduler_of()
    kv, source = scheduler.memory.kv, LastPrompt(scheduler.memory.kv)
    scheduler.attach(source)
    prompt = list(range(10))
    assert run(scheduler, make_request("a", prompt, max_tokens=1)) == 10
    assert kv.pools[0].num_used == 2, "the full blocks of the prompt stay"
    assert run(scheduler, make_request("b", [*prompt, 40], max_tokens=1)) == 3
    memory, free = scheduler.memory, kv.num_free_blocks
    assert free == NUM_BLOCKS - 2
    assert not memory.fits([free + 1]) and memory.could_fit([free + 2])
    assert not memory.make_room([free + 3]) and len(source.entries) == 1, "too few to evict"
    assert memory.make_room([free + 2]) and not source.entries
    assert kv.pools[0].num_used == 0


def test_fits_now_evicts_nothing() -> None:
    scheduler = scheduler_of()
    source = LastPrompt(scheduler.memory.kv)
    scheduler.attach(source)
    run(scheduler, make_request("a", list(range(30)), max_tokens=1))  # 7 blocks
    scheduler.add(make_request("large", list(range(50, 80)), max_tokens=1), 0.0)  # 8 blocks
    [large] = scheduler.lifecycle.queue.waiting()
    assert scheduler.admission.fits_now(large) and len(source.entries) == 1
    assert scheduler.schedule(0.0).plan is not None and not source.entries


class Quota(Extension, StepExtension):
    """Limits the tokens of each tenant; `Cancel` with the tenant's name resets its count."""

    follows_steps = True

    def __init__(self, most: int) -> None:
        self.most, self.used = most, dict[str, int]()

    def handlers(self) -> Mapping[type, Handler]:
        return {Cancel: lambda message, now: self.used.pop(message.request_id, None)}

    def accept(self, request: Request) -> bool:
        if self.used.get(request.tenant, 0) >= self.most:
            raise RequestError(f"{request.tenant} has had its {self.most} tokens.")
        return False

    def end_step(self, end: StepEnd, now: float) -> None:
        for sequence, _ in end.outputs.ended:
            tenant = sequence.request.tenant
            self.used[tenant] = self.used.get(tenant, 0) + sequence.num_output_tokens


def test_an_extension_may_refuse_requests_and_handle_control_messages() -> None:
    scheduler = scheduler_of(caching=True)
    scheduler.attach(Quota(3))
    run(scheduler, make_request("a", [1, 2, 3], max_tokens=3, tenant="t"))
    refused = scheduler.add(make_request("b", [1, 2, 3], max_tokens=3, tenant="t"), 0.0)
    assert isinstance(refused.refusal, RequestError) and not scheduler.has_work
    assert run(scheduler, make_request("c", [1, 2, 3], max_tokens=3, tenant="other")) == 3
    scheduler.control(Cancel("t"), 0.0)
    assert scheduler.add(make_request("d", [1, 2, 3], tenant="t"), 0.0).refusal is None


@pytest.mark.parametrize("kind", [HitSource, Extension, StepExtension])
def test_an_interface_has_at_most_six_methods(kind: Any) -> None:
    methods = [name for name, value in vars(kind).items() if callable(value) or
               isinstance(value, property)]  # fmt: skip
    assert 3 <= len([name for name in methods if not name.startswith("_")]) <= 6


class Loads(CacheListener):
    """Notes which leading blocks are loaded from host memory."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []

    def loaded(self, sequence: Sequence, num_blocks: int) -> None:
        self.found.append((sequence.request.request_id, num_blocks))


def test_a_cache_listener_is_notified_of_blocks_loaded_from_host_memory() -> None:
    kv = KVManager((FULL,), (NUM_BLOCKS,), SIZE, host_limits=[NUM_BLOCKS])
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    scheduler = Scheduler(Memory(kv, 64, watermark=0.0), config, 64)
    listener = Loads()
    scheduler.attach(listener)
    prompt = list(range(10))
    run(scheduler, make_request("a", prompt, max_tokens=1))
    run(scheduler, make_request("other", list(range(50, 96)), max_tokens=1))  # takes all blocks
    run(scheduler, make_request("b", [*prompt, 40], max_tokens=1))
    assert listener.found == [("b", 2)]


def test_a_row_is_due_for_naming_when_its_next_block_is_full() -> None:
    scheduler = scheduler_of(caching=True)
    scheduler.add(make_request("a", list(range(10)), max_tokens=5), 0.0)
    assert scheduler.schedule(0.0).plan is not None
    [row] = scheduler.rows.running.tolist()
    assert scheduler.rows.table.index_at[row] == 12, "when the third block is full"


def test_a_scored_prompt_reads_no_cached_blocks_past_its_scores() -> None:
    """The last token is computed in any case; its block of four is not taken from the cache."""
    scheduler = scheduler_of(caching=True)
    request = make_request("a", list(range(10)), max_tokens=1, prompt_logprobs=1)
    scheduler.add(request, 0.0)
    sequence = scheduler.lifecycle.sequences["a"]
    sequence.num_prompt_logprobs, sequence.num_preemptions = 3, 1
    digests, num_tokens = scheduler.memory.names.readable(sequence)
    assert num_tokens == 4 and len(digests) <= 1


class OfSalts(RequestCompletion):
    """Records its calls, for requests with a salt and for a request with the id `taken`."""

    fields = ("cache_salt",)

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    @property
    def names(self) -> tuple[str, ...]:
        return ("taken",)

    def complete(self, request: Request) -> Request:
        self.calls.append(("complete", request.request_id))
        return request

    def accept(self, request: Request) -> bool:
        self.calls.append(("accept", request.request_id))
        return False

    def enter(self, sequence: Sequence, now: float) -> None:
        self.calls.append(("enter", sequence.request.request_id))


def test_an_extension_is_called_only_for_requests_with_its_fields_or_names() -> None:
    scheduler, extension = scheduler_of(), OfSalts()
    scheduler.attach(extension)
    for name, salt in (("plain", ""), ("salted", "a"), ("taken", "")):
        request = make_request(name, [1, 2, 3], max_tokens=2, salt=salt)
        assert scheduler.add(request, 0.0).refusal is None
    methods = ("complete", "accept", "enter")
    assert extension.calls == [(m, name) for name in ("salted", "taken") for m in methods]


class Claims(Extension):
    """Accepts every request, whatever its size."""

    def accept(self, request: Request) -> bool:
        return True


def test_a_request_accepted_by_one_extension_skips_the_check_of_room() -> None:
    scheduler = scheduler_of()
    request = make_request("large", list(range(20)), max_tokens=40)
    assert scheduler.add(request, 0.0).refusal is not None
    scheduler.attach(Claims())
    assert scheduler.add(request, 0.0).refusal is None


@pytest.mark.parametrize("num_stages", [1, 2])
def test_has_stages_is_set_from_two_stages_on(num_stages: int) -> None:
    kv = KVManager((FULL,), (NUM_BLOCKS,), SIZE)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    scheduler = Scheduler(Memory(kv, 64), config, 64, num_stages=num_stages)
    assert scheduler.has_stages == (num_stages == 2)
    assert scheduler.may_repeat_steps == (num_stages == 1)


def test_an_open_prompt_that_is_fully_swapped_out_has_nothing_to_compute() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("a", list(range(5)), max_tokens=4), 0.0)
    sequence = scheduler.lifecycle.sequences["a"]
    sequence.is_open, sequence.num_swapped_tokens = True, 4
    assert sequence.has_something_to_compute, "the swapped tokens were loaded again"
    sequence.host_blocks = scheduler.memory.new_sequence()
    assert not sequence.has_something_to_compute


def test_draft_tokens_are_not_among_the_tokens_that_a_swap_keeps() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("a", list(range(10)), max_tokens=4), 0.0)
    assert scheduler.schedule(0.0).plan is not None
    sequence = scheduler.lifecycle.sequences["a"]
    scheduler.rows.table.verified[sequence.row] = 3
    assert (sequence.num_computed_tokens, sequence.num_kept_tokens) == (10, 7)


def test_an_open_prompt_of_one_token_has_nothing_to_compute() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("a", [1], max_tokens=4), 0.0)
    sequence = scheduler.lifecycle.sequences["a"]
    assert sequence.has_something_to_compute
    sequence.is_open = True
    assert not sequence.has_something_to_compute


def test_a_row_without_a_prefix_hit_reports_zero_cached_tokens() -> None:
    scheduler = scheduler_of(caching=True)
    scheduler.add(make_request("a", list(range(10)), max_tokens=4), 0.0)
    plan = scheduler.schedule(0.0).plan
    assert plan is not None
    result = StepResult(plan.step_id, np.full((1, 1), 7, np.int32), np.ones(1, np.int32))
    [name] = scheduler.update(result, 0.0).outputs.names
    assert (name.request_id, name.num_cached_tokens) == ("a", 0)


class Room:
    room = 2


def test_the_number_of_blocks_copied_for_stores_is_limited_by_room() -> None:
    kv = KVManager((FULL,), (NUM_BLOCKS,), SIZE, host_limits=[NUM_BLOCKS])
    assert kv.tier is not None
    offers, pool = Offers(kv, kv.tier, True, Room()), kv.pools[0]
    digests = [b"a", b"b", b"c", b"d"]
    for digest in digests:
        pool.index(pool.allocate(), digest)
    offers._offer(digests)
    copies: list[Copies] = [([], [])]
    offers.copy_out(copies)
    assert len(copies[0][0]) == 2 and offers.num_waiting == 2
