"""Reasons for prefix misses: the reported hit, its tier and its first missing block."""

from typing import Any

import numpy as np
import pytest

from quire.base.events import PrefixFound
from quire.base.messages import Abort, MeasuredRates, Request, ResetPrefixCache
from quire.base.plan import StepResult
from quire.base.prefix import PrefixReport
from quire.base.settings.config import SchedulerConfig
from quire.engine.observability.prefix_words import as_data, shown_to
from quire.kv.manager import KVManager
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.names import Digester
from quire.scheduler.policy.policies import make_block_hash
from quire.scheduler.reuse.miss_report import MissReports
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup
from tests.support.scheduler.fake_device import make_request

BLOCK = 4
FULL = CacheGroup("full", (0,), 1, 8)
TEXT = [int(n) for n in np.random.default_rng(5).integers(0, 1000, 60)]


def scheduler_of(
    num_blocks: int = 40, hashed: str = "sha256", num_groups: int = 1, **settings: Any
) -> Scheduler:
    groups, sizes = [FULL] * num_groups, [num_blocks] * num_groups
    kv = KVManager(groups, sizes, BLOCK, block_bytes=[1000] * num_groups, **settings)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32)
    digester = Digester(make_block_hash(hashed))
    memory = Memory(kv, config.max_num_batched_tokens or 0, digester=digester)
    return Scheduler(memory, config, 128)


def add(scheduler: Scheduler, name: str, prompt: list[int], now: float, **more: object) -> None:
    more = {"max_tokens": 2} | more
    scheduler.add(make_request(name, prompt, **more), now)


def step(scheduler: Scheduler, now: float) -> list[PrefixReport]:
    """Reports of those that were admitted."""
    decisions = scheduler.schedule(now)
    plan = decisions.plan
    found = [e.report for e in decisions.events if isinstance(e, PrefixFound)]
    if plan is not None:
        num = len(plan.sample_rows)
        tokens = np.full((num, 1), 7, np.int32)
        scheduler.update(StepResult(plan.step_id, tokens, np.ones(num, np.int32)), now)
    scheduler.check_invariants()
    return found


def ask(
    scheduler: Scheduler, name: str, prompt: list[int], now: float = 0.0, **more: object
) -> PrefixReport:
    """Run a request to its end; what was told of it."""
    add(scheduler, name, prompt, now, **more)
    found: list[PrefixReport] = []
    while scheduler.has_work:
        found += step(scheduler, now)
    (report,) = found
    return report


def test_the_first_prompt_is_new_and_the_second_is_there() -> None:
    scheduler = scheduler_of()
    assert ask(scheduler, "a", TEXT[:22]) == PrefixReport(miss="new")
    assert ask(scheduler, "b", TEXT[:22]) == PrefixReport(device=20)
    assert ask(scheduler, "c", TEXT[:3]) == PrefixReport()  # has no whole block


@pytest.mark.parametrize("at", [0, 1, 4, 9, 11, 12, 21])
def test_the_token_where_it_differs(at: int) -> None:
    scheduler = scheduler_of()
    ask(scheduler, "a", TEXT[:30])
    prompt = TEXT[:30]
    prompt[at] = 1001
    report = ask(scheduler, "b", prompt)
    assert report.device == at // BLOCK * BLOCK
    assert (report.miss, report.at_token, report.near_id) == ("diverged", at, "a")
    assert report.near_is_own


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_the_nearest_of_several_prompts(num_blocks: int) -> None:
    """They share so many blocks with it, and differ in the next one."""
    scheduler, start = scheduler_of(), num_blocks * BLOCK
    for name, same in (("a", 1), ("b", 3), ("c", 2)):
        ask(scheduler, name, TEXT[: start + same] + [1002, 1003, 1004, 1005])
    report = ask(scheduler, "d", TEXT[:20])
    assert (report.miss, report.at_token, report.near_id) == ("diverged", start + 3, "b")


def test_what_goes_on_where_the_nearest_ends_is_new() -> None:
    """The nearest one's output counts: its last token is not computed, but it is known."""
    scheduler = scheduler_of()
    ask(scheduler, "a", TEXT[:16], max_tokens=3)
    report = ask(scheduler, "b", [*TEXT[:16], 7, 7, 7, *TEXT[16:40]])
    assert (report.device, report.miss, report.at_token) == (16, "new", 19)
    other = ask(scheduler, "c", [*TEXT[:16], 7, 7, 8, *TEXT[16:40]])
    assert (other.miss, other.at_token, other.near_id) == ("diverged", 18, "b")


def test_an_eviction_and_when_it_was() -> None:
    scheduler = scheduler_of(num_blocks=12)
    ask(scheduler, "a", TEXT[:30], now=1.0)
    ask(scheduler, "b", list(range(40)), now=5.0)
    report = ask(scheduler, "c", TEXT[:30], now=7.5)
    assert report.miss == "evicted" and report.near_id == "a"
    assert report.lost_s == 2.5
    assert 0 <= report.device < 28
    scheduler.control(ResetPrefixCache("anew"), 8.0)
    assert ask(scheduler, "d", TEXT[:30], now=9.0) == PrefixReport(miss="new")


def test_a_request_that_is_just_computed() -> None:
    """Two chunks: the second prompt hits what the first chunk has computed, and no more."""
    scheduler = scheduler_of()
    add(scheduler, "a", TEXT[:60], 0.0)
    step(scheduler, 0.0)
    add(scheduler, "b", TEXT[:60], 0.0)
    (report,) = step(scheduler, 0.0)
    assert report.device == 32 or report.device == 56
    if report.device == 32:
        assert (report.miss, report.near_id) == ("computing", "a")


def test_one_that_was_aborted_before_it_was_computed_is_not_taken_for_evicted() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", TEXT[:60], 0.0)
    step(scheduler, 0.0)
    scheduler.control(Abort("a"), 0.0)
    report = ask(scheduler, "b", TEXT[:60])
    assert report == PrefixReport(device=32, miss="new")


@pytest.mark.parametrize("hashed", ["sha256", "blake2b"])
def test_salts_are_told_only_if_they_would_have_helped(hashed: str) -> None:
    scheduler = scheduler_of(hashed=hashed)
    ask(scheduler, "a", TEXT[:20], salt="mine")
    report = ask(scheduler, "b", TEXT[:30], salt="yours")
    assert (report.miss, report.num_other_tokens) == ("salt", 20)
    assert not report.near_is_own and report.near_id == ""
    assert ask(scheduler, "c", [1001, *TEXT[:20]], salt="third").miss == "new"
    assert ask(scheduler, "d", TEXT[:20], salt="mine") == PrefixReport(device=16)


def test_tenants_are_told_apart() -> None:
    scheduler = scheduler_of()
    ask(scheduler, "a", TEXT[:20], tenant="x")
    assert not ask(scheduler, "b", [*TEXT[:18], 1001, 1002], tenant="y").near_is_own
    assert ask(scheduler, "c", [*TEXT[:15], 1003, 1004, 1005], tenant="y").near_is_own  # as b does


@pytest.mark.parametrize("salt", ["", "another"])
def test_an_answer_is_the_same_whatever_others_have_asked(salt: str) -> None:
    """With token 6 as with token 0: nearer prompts of others, also under another salt, would tell
    who guesses that a guess is right."""
    told = []
    for is_there in (False, True):
        scheduler = scheduler_of()
        first = TEXT[:4] if not salt else []
        if is_there:
            ask(scheduler, "theirs", TEXT[:12], tenant="key 2", salt=salt)
        ask(scheduler, "mine", [*first, *TEXT[4 : 6 if first else 4], *[1001] * 8], tenant="key 1")
        prompt = [*TEXT[:7], *[1002] * 8]
        report = ask(scheduler, "asks", prompt, tenant="key 1")
        told.append(shown_to(report, "key 1"))
        at = 6 if first else 0
        assert told[-1]["cache_miss"] == {"reason": "diverged", "at_token": at}
    assert told[0] == told[1]
    wanted = 4 if salt else None
    assert as_data(report)["cache_miss"].get("tokens_of_another_salt") == wanted


def test_what_is_not_read_and_what_is_off() -> None:
    scheduler = scheduler_of()
    ask(scheduler, "a", TEXT[:20])
    assert ask(scheduler, "b", TEXT[:20], prompt_logprobs=1) == PrefixReport(miss="unread")
    off = scheduler_of(enable_prefix_caching=False)
    ask(off, "a", TEXT[:20])
    assert ask(off, "b", TEXT[:20]) == PrefixReport(miss="off")


def test_host_memory_and_what_is_not_worth_loading() -> None:
    scheduler = scheduler_of(num_blocks=12, host_limits=[40])
    ask(scheduler, "a", TEXT[:30])
    ask(scheduler, "b", list(range(40)))
    report = ask(scheduler, "c", TEXT[:30])
    assert report.host > 0 and report.host + report.device == 28 and report.miss == ""
    ask(scheduler, "d", list(range(40, 80)))
    scheduler.control(MeasuredRates(prefill_tokens_per_s=1e9, copy_bytes_per_s=1.0), 0.0)
    report = ask(scheduler, "e", TEXT[:30])
    assert report.host == 0 and report.miss == "costly"


def test_a_pinned_prefix() -> None:
    scheduler = scheduler_of()
    pin = make_request("p", TEXT[:11], max_tokens=1)
    scheduler.add(
        Request(**{f: getattr(pin, f) for f in pin.__struct_fields__} | {"pin_s": 0.0}), 0
    )
    while scheduler.has_work:
        step(scheduler, 0.0)
    report = ask(scheduler, "a", TEXT[:30])
    assert (report.pinned, report.device) == (11, 0)
    assert (report.miss, report.at_token, report.near_id) == ("new", 11, "p")


def test_preempted_and_later_chunks_are_not_told_again() -> None:
    scheduler = scheduler_of(num_blocks=9)
    for name in ("a", "b"):
        add(scheduler, name, TEXT[:12] if name == "a" else TEXT[20:32], 0.0, max_tokens=12)
    found = []
    while scheduler.has_work:
        found += step(scheduler, 0.0)
    assert len(found) == 2


def size(history: MissReports) -> int:
    return len(history._young.by_digest) + len(history._old.by_digest)


def test_it_forgets_the_oldest_and_stays_small() -> None:
    scheduler = scheduler_of(num_blocks=2000)
    history = scheduler.misses
    history._max_young = 25
    for i in range(40):
        ask(scheduler, f"r{i}", list(range(1000 * i, 1000 * i + 21)))
    assert size(history) <= 60 and not history._open
    add(scheduler, "long", list(range(100_000, 100_012)), 0.0, max_tokens=100)
    step(scheduler, 0.0)  # goes on, and is in nobody's way
    for i in range(100, 140):
        add(scheduler, f"r{i}", list(range(1000 * i, 1000 * i + 21)), 0.0, max_tokens=1)
        step(scheduler, 0.0)
    assert size(history) <= 60 and len(history._open) <= 2
    scheduler.control(Abort("long"), 0.0)
    while scheduler.has_work:
        step(scheduler, 0.0)
    assert not history._open
    first = ask(scheduler, "again", [*range(12), 9999, *range(13, 21)])
    assert (first.device, first.miss, first.near_id) == (12, "new", "")  # found, but not known
    last = ask(scheduler, "last", [*range(139000, 139012), 9999, *range(139013, 139021)])
    assert (last.miss, last.at_token, last.near_id) == ("diverged", 12, "r139")


def test_who_must_see_its_whole_prompt_reads_no_cache() -> None:
    """It lacks all of its tokens then, though they are there."""
    scheduler = scheduler_of()
    ask(scheduler, "a", TEXT[:22])
    add(scheduler, "all", TEXT[:22], 0.0, prompt_logprobs=1)
    assert scheduler.progress.remaining(scheduler.lifecycle.sequences["all"]) == 22
    add(scheduler, "hit", TEXT[:22], 0.0)
    assert scheduler.progress.remaining(scheduler.lifecycle.sequences["hit"]) == 2
    unread, hit = step(scheduler, 0.0)
    assert (unread.device, unread.miss) == (0, "unread")
    assert hit.device == 20


def test_what_a_request_had_computed_is_known_also_if_it_ended_without_a_row() -> None:
    scheduler = scheduler_of(num_blocks=12)
    add(scheduler, "a", TEXT[:30], 1.0, max_tokens=9)
    step(scheduler, 1.0)
    scheduler.lifecycle.preempt(scheduler.lifecycle.sequences["a"], "test", 1.0)
    scheduler.control(Abort("a"), 1.0)
    ask(scheduler, "b", list(range(40)), now=5.0)
    report = ask(scheduler, "c", TEXT[:30], now=7.5)
    assert (report.miss, report.near_id, report.lost_s) == ("evicted", "a", 2.5)


def test_a_prompt_without_a_hit_or_a_miss_is_not_announced_to_its_client() -> None:
    """It is shorter than a block, so there was nothing to find."""
    scheduler = scheduler_of()
    add(scheduler, "short", TEXT[: BLOCK - 1], 0.0)
    [report] = [
        event.report for event in scheduler.schedule(0.0).events if isinstance(event, PrefixFound)
    ]
    assert not report.miss and not scheduler.lifecycle.admitted


def test_times_of_evictions_are_known_later_and_few_are_stored() -> None:
    """They are looked up when a report needs one, or when there are many."""
    scheduler = scheduler_of(num_blocks=12)
    scheduler.misses._max_young = 16
    ask(scheduler, "a", TEXT[:30], now=1.0)
    ask(scheduler, "b", list(range(40)), now=5.0)
    assert ask(scheduler, "c", TEXT[:30], now=7.0).lost_s == 2.0
    for i in range(20):
        ask(scheduler, f"r{i}", list(range(1000 * i, 1000 * i + 40)), now=10.0 + i)
        history = scheduler.misses
        assert history._num_evicted == sum(len(names) for _, names in history._evicted) <= 32
    assert ask(scheduler, "d", list(range(18_000, 18_041)), now=31.0).lost_s == 2.0


@pytest.mark.parametrize("num_groups", [1, 4])
def test_the_time_of_an_eviction_is_known_while_its_prompt_is(num_groups: int) -> None:
    """However many blocks of other prompts and groups were evicted since."""
    scheduler = scheduler_of(num_blocks=12, num_groups=num_groups)
    scheduler.misses._max_young = 24
    ask(scheduler, "a", TEXT[:30], now=1.0)
    for i in range(3):
        ask(scheduler, f"b{i}", list(range(100 * i, 100 * i + 40)), now=5.0 + i)
    found = ask(scheduler, "c", TEXT[:30], now=10.0)
    assert (found.miss, found.lost_s) == ("evicted", 4.0)
