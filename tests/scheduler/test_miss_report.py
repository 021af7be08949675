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
    """Run one step. Return the reports of the admitted requests."""
    decisions = scheduler.schedule(now)
    plan = decisions.plan
    found = [e.report for e in decisions.events if isinstance(e, PrefixFound)]
    if plan is not None:
        num = len(plan.sample_rows)
        tokens = np.full((num, 1), 7, np.int32)
        scheduler.update(StepResult(plan.step_id, tokens, np.ones(num, np.int32)), now)
    scheduler.check_invariants()
    return found


def report_of(
    scheduler: Scheduler, name: str, prompt: list[int], now: float = 0.0, **more: object
) -> PrefixReport:
    """Run a request to its end. Return its report."""
    add(scheduler, name, prompt, now, **more)
    found: list[PrefixReport] = []
    while scheduler.has_work:
        found += step(scheduler, now)
    (report,) = found
    return report


def test_the_first_prompt_is_new_and_an_equal_one_is_a_hit() -> None:
    scheduler = scheduler_of()
    assert report_of(scheduler, "a", TEXT[:22]) == PrefixReport(miss="new")
    assert report_of(scheduler, "b", TEXT[:22]) == PrefixReport(device=20)
    assert report_of(scheduler, "c", TEXT[:3]) == PrefixReport()  # has no whole block


@pytest.mark.parametrize("at", [0, 1, 4, 9, 11, 12, 21])
def test_a_report_gives_the_first_token_that_differs(at: int) -> None:
    scheduler = scheduler_of()
    report_of(scheduler, "a", TEXT[:30])
    prompt = TEXT[:30]
    prompt[at] = 1001
    report = report_of(scheduler, "b", prompt)
    assert report.device == at // BLOCK * BLOCK
    assert (report.miss, report.at_token, report.near_id) == ("diverged", at, "a")
    assert report.near_is_own


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_a_report_names_the_prompt_that_shares_the_longest_prefix(num_blocks: int) -> None:
    """All of them share `num_blocks` blocks, and differ in the next one."""
    scheduler, start = scheduler_of(), num_blocks * BLOCK
    for name, same in (("a", 1), ("b", 3), ("c", 2)):
        report_of(scheduler, name, TEXT[: start + same] + [1002, 1003, 1004, 1005])
    report = report_of(scheduler, "d", TEXT[:20])
    assert (report.miss, report.at_token, report.near_id) == ("diverged", start + 3, "b")


def test_a_prompt_that_continues_the_nearest_one_is_new() -> None:
    """The output of the nearest request counts, also its last token, which is not computed."""
    scheduler = scheduler_of()
    report_of(scheduler, "a", TEXT[:16], max_tokens=3)
    report = report_of(scheduler, "b", [*TEXT[:16], 7, 7, 7, *TEXT[16:40]])
    assert (report.device, report.miss, report.at_token) == (16, "new", 19)
    other = report_of(scheduler, "c", [*TEXT[:16], 7, 7, 8, *TEXT[16:40]])
    assert (other.miss, other.at_token, other.near_id) == ("diverged", 18, "b")


def test_a_report_gives_the_time_since_an_eviction() -> None:
    scheduler = scheduler_of(num_blocks=12)
    report_of(scheduler, "a", TEXT[:30], now=1.0)
    report_of(scheduler, "b", list(range(40)), now=5.0)
    report = report_of(scheduler, "c", TEXT[:30], now=7.5)
    assert report.miss == "evicted" and report.near_id == "a"
    assert report.lost_s == 2.5
    assert 0 <= report.device < 28
    scheduler.control(ResetPrefixCache("anew"), 8.0)
    assert report_of(scheduler, "d", TEXT[:30], now=9.0) == PrefixReport(miss="new")


def test_a_prefix_that_is_still_being_computed_is_reported() -> None:
    """The first prompt has two chunks. The second prompt hits the blocks of the first chunk."""
    scheduler = scheduler_of()
    add(scheduler, "a", TEXT[:60], 0.0)
    step(scheduler, 0.0)
    add(scheduler, "b", TEXT[:60], 0.0)
    (report,) = step(scheduler, 0.0)
    assert report.device == 32 or report.device == 56
    if report.device == 32:
        assert (report.miss, report.near_id) == ("computing", "a")


def test_blocks_never_computed_after_an_abort_are_not_reported_as_evicted() -> None:
    scheduler = scheduler_of()
    add(scheduler, "a", TEXT[:60], 0.0)
    step(scheduler, 0.0)
    scheduler.control(Abort("a"), 0.0)
    report = report_of(scheduler, "b", TEXT[:60])
    assert report == PrefixReport(device=32, miss="new")


@pytest.mark.parametrize("hashed", ["sha256", "blake2b"])
def test_a_salt_is_reported_only_if_another_salt_has_the_prefix(hashed: str) -> None:
    scheduler = scheduler_of(hashed=hashed)
    report_of(scheduler, "a", TEXT[:20], salt="mine")
    report = report_of(scheduler, "b", TEXT[:30], salt="yours")
    assert (report.miss, report.num_other_tokens) == ("salt", 20)
    assert not report.near_is_own and report.near_id == ""
    assert report_of(scheduler, "c", [1001, *TEXT[:20]], salt="third").miss == "new"
    assert report_of(scheduler, "d", TEXT[:20], salt="mine") == PrefixReport(device=16)


def test_near_is_own_is_set_only_if_the_nearest_prompt_is_of_the_same_tenant() -> None:
    scheduler = scheduler_of()
    report_of(scheduler, "a", TEXT[:20], tenant="x")
    assert not report_of(scheduler, "b", [*TEXT[:18], 1001, 1002], tenant="y").near_is_own
    # The nearest prompt is that of "b", of the same tenant.
    assert report_of(scheduler, "c", [*TEXT[:15], 1003, 1004, 1005], tenant="y").near_is_own


@pytest.mark.parametrize("salt", ["", "another"])
def test_the_shown_report_does_not_depend_on_prompts_of_other_tenants(salt: str) -> None:
    """Otherwise a client could find out another tenant's prompt token by token, even under another
    salt."""
    shown = []
    for is_there in (False, True):
        scheduler = scheduler_of()
        first = TEXT[:4] if not salt else []
        if is_there:
            report_of(scheduler, "theirs", TEXT[:12], tenant="key 2", salt=salt)
        report_of(
            scheduler, "mine", [*first, *TEXT[4 : 6 if first else 4], *[1001] * 8], tenant="key 1"
        )
        prompt = [*TEXT[:7], *[1002] * 8]
        report = report_of(scheduler, "asks", prompt, tenant="key 1")
        shown.append(shown_to(report, "key 1"))
        at = 6 if first else 0
        assert shown[-1]["cache_miss"] == {"reason": "diverged", "at_token": at}
    assert shown[0] == shown[1]
    expected = 4 if salt else None
    assert as_data(report)["cache_miss"].get("tokens_of_another_salt") == expected


def test_a_scored_prompt_is_unread_and_a_disabled_cache_is_off() -> None:
    scheduler = scheduler_of()
    report_of(scheduler, "a", TEXT[:20])
    assert report_of(scheduler, "b", TEXT[:20], prompt_logprobs=1) == PrefixReport(miss="unread")
    off = scheduler_of(enable_prefix_caching=False)
    report_of(off, "a", TEXT[:20])
    assert report_of(off, "b", TEXT[:20]) == PrefixReport(miss="off")


def test_a_report_counts_host_hits_and_marks_those_too_costly_to_load() -> None:
    scheduler = scheduler_of(num_blocks=12, host_limits=[40])
    report_of(scheduler, "a", TEXT[:30])
    report_of(scheduler, "b", list(range(40)))
    report = report_of(scheduler, "c", TEXT[:30])
    assert report.host > 0 and report.host + report.device == 28 and report.miss == ""
    report_of(scheduler, "d", list(range(40, 80)))
    scheduler.control(MeasuredRates(prefill_tokens_per_s=1e9, copy_bytes_per_s=1.0), 0.0)
    report = report_of(scheduler, "e", TEXT[:30])
    assert report.host == 0 and report.miss == "costly"


def test_a_report_counts_the_tokens_of_a_pinned_prefix() -> None:
    scheduler = scheduler_of()
    pin = make_request("p", TEXT[:11], max_tokens=1)
    scheduler.add(
        Request(**{f: getattr(pin, f) for f in pin.__struct_fields__} | {"pin_s": 0.0}), 0
    )
    while scheduler.has_work:
        step(scheduler, 0.0)
    report = report_of(scheduler, "a", TEXT[:30])
    assert (report.pinned, report.device) == (11, 0)
    assert (report.miss, report.at_token, report.near_id) == ("new", 11, "p")


def test_resumed_requests_and_later_chunks_are_not_reported_again() -> None:
    scheduler = scheduler_of(num_blocks=9)
    for name in ("a", "b"):
        add(scheduler, name, TEXT[:12] if name == "a" else TEXT[20:32], 0.0, max_tokens=12)
    found = []
    while scheduler.has_work:
        found += step(scheduler, 0.0)
    assert len(found) == 2


def size(history: MissReports) -> int:
    return len(history._young.by_digest) + len(history._old.by_digest)


def test_the_history_is_bounded_and_forgets_the_oldest_prompts() -> None:
    scheduler = scheduler_of(num_blocks=2000)
    history = scheduler.misses
    history._max_young = 25
    for i in range(40):
        report_of(scheduler, f"r{i}", list(range(1000 * i, 1000 * i + 21)))
    assert size(history) <= 60 and not history._open
    add(scheduler, "long", list(range(100_000, 100_012)), 0.0, max_tokens=100)
    step(scheduler, 0.0)  # keeps running
    for i in range(100, 140):
        add(scheduler, f"r{i}", list(range(1000 * i, 1000 * i + 21)), 0.0, max_tokens=1)
        step(scheduler, 0.0)
    assert size(history) <= 60 and len(history._open) <= 2
    scheduler.control(Abort("long"), 0.0)
    while scheduler.has_work:
        step(scheduler, 0.0)
    assert not history._open
    first = report_of(scheduler, "again", [*range(12), 9999, *range(13, 21)])
    assert (first.device, first.miss, first.near_id) == (12, "new", "")  # cached, but forgotten
    last = report_of(scheduler, "last", [*range(139000, 139012), 9999, *range(139013, 139021)])
    assert (last.miss, last.at_token, last.near_id) == ("diverged", 12, "r139")


def test_a_request_with_prompt_logprobs_reads_no_cached_blocks() -> None:
    """All of its tokens remain to be computed, although their blocks are cached."""
    scheduler = scheduler_of()
    report_of(scheduler, "a", TEXT[:22])
    add(scheduler, "all", TEXT[:22], 0.0, prompt_logprobs=1)
    assert scheduler.progress.remaining(scheduler.lifecycle.sequences["all"]) == 22
    add(scheduler, "hit", TEXT[:22], 0.0)
    assert scheduler.progress.remaining(scheduler.lifecycle.sequences["hit"]) == 2
    unread, hit = step(scheduler, 0.0)
    assert (unread.device, unread.miss) == (0, "unread")
    assert hit.device == 20


def test_a_request_aborted_without_a_row_stays_in_the_history() -> None:
    scheduler = scheduler_of(num_blocks=12)
    add(scheduler, "a", TEXT[:30], 1.0, max_tokens=9)
    step(scheduler, 1.0)
    scheduler.lifecycle.preempt(scheduler.lifecycle.sequences["a"], "test", 1.0)
    scheduler.control(Abort("a"), 1.0)
    report_of(scheduler, "b", list(range(40)), now=5.0)
    report = report_of(scheduler, "c", TEXT[:30], now=7.5)
    assert (report.miss, report.near_id, report.lost_s) == ("evicted", "a", 2.5)


def test_a_prompt_without_a_hit_or_a_miss_is_not_announced_to_its_client() -> None:
    """It is shorter than a block."""
    scheduler = scheduler_of()
    add(scheduler, "short", TEXT[: BLOCK - 1], 0.0)
    [report] = [
        event.report for event in scheduler.schedule(0.0).events if isinstance(event, PrefixFound)
    ]
    assert not report.miss and not scheduler.lifecycle.admitted


def test_eviction_times_are_looked_up_late_and_their_number_is_bounded() -> None:
    """They are looked up when a report needs one, or when there are many."""
    scheduler = scheduler_of(num_blocks=12)
    scheduler.misses._max_young = 16
    report_of(scheduler, "a", TEXT[:30], now=1.0)
    report_of(scheduler, "b", list(range(40)), now=5.0)
    assert report_of(scheduler, "c", TEXT[:30], now=7.0).lost_s == 2.0
    for i in range(20):
        report_of(scheduler, f"r{i}", list(range(1000 * i, 1000 * i + 40)), now=10.0 + i)
        history = scheduler.misses
        assert history._num_evicted == sum(len(names) for _, names in history._evicted) <= 32
    assert report_of(scheduler, "d", list(range(18_000, 18_041)), now=31.0).lost_s == 2.0


@pytest.mark.parametrize("num_groups", [1, 4])
def test_the_time_of_an_eviction_is_known_as_long_as_its_prompt(num_groups: int) -> None:
    """The number of blocks of other prompts and groups evicted since does not matter."""
    scheduler = scheduler_of(num_blocks=12, num_groups=num_groups)
    scheduler.misses._max_young = 24
    report_of(scheduler, "a", TEXT[:30], now=1.0)
    for i in range(3):
        report_of(scheduler, f"b{i}", list(range(100 * i, 100 * i + 40)), now=5.0 + i)
    found = report_of(scheduler, "c", TEXT[:30], now=10.0)
    assert (found.miss, found.lost_s) == ("evicted", 4.0)
