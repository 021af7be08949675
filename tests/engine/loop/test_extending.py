"""Run the extensions, hit sources and attachments of docs/extend exactly as documented."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.virtual.dry_run import dry_request, dry_run
from quire.base.clock import FakeClock
from quire.base.errors import RequestError
from quire.base.events import Admitted, Event
from quire.base.requests.validation import RequestLimits
from quire.base.settings.config import SchedulerConfig
from quire.engine.loop.core import EngineCore
from tests.support.engine.updates import run_to_end

DOCS = Path(__file__).parents[3] / "docs" / "extend"
PAGES = (DOCS / "scheduler.md", DOCS / "attachments.md")
EXAMPLE = re.compile(r'^```python\n((?:# \w+\.py\n)?""".*?)^```$', re.MULTILINE | re.DOTALL)
CALL = re.compile(r"^```python\n(core\..*?)^```$", re.MULTILINE | re.DOTALL)
TEXT = "\n".join(page.read_text("utf-8") for page in PAGES)
BLOCK, LENGTH, NUM_BLOCKS = 4, 64, 12
PROMPT = list(range(10))


def examples() -> dict[str, Any]:
    """Return the classes that the pages' modules define, by name."""
    found: dict[str, Any] = {}
    for source in EXAMPLE.findall(TEXT):
        scope: dict[str, Any] = {"__name__": "example"}
        exec(compile(source, str(DOCS), "exec"), scope)
        own = {n: v for n, v in scope.items() if getattr(v, "__module__", "") == "example"}
        found |= own
    return found


EXAMPLES = examples()


def make_core(caching: bool = False) -> EngineCore:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    scheduler, executor = dry_run(NUM_BLOCKS, BLOCK, config, LENGTH, enable_prefix_caching=caching)
    return EngineCore(scheduler, executor, FakeClock(), RequestLimits(50_000, LENGTH, 0, 4))


def run(core: EngineCore, name: str, prompt: list[int], max_tokens: int = 1, **rest: Any) -> int:
    """Serve one request to its end; return the number of tokens that its first step computed."""
    core.add(msgspec.structs.replace(dry_request(name, prompt, max_tokens), **rest))
    plan = core.plan()
    assert plan is not None
    core.take()
    run_to_end(core, core.step)
    return plan.num_scheduled_tokens


def test_pages_define_the_expected_examples() -> None:
    assert set(EXAMPLES) == {"TokenQuota", "LastPrompt", "ForgetEvery"}


@pytest.mark.parametrize("call", CALL.findall(TEXT))
def test_documented_calls_attach_the_features(call: str) -> None:
    core = make_core()
    before = len(core.scheduler.features) + len(core.attachments.all)
    exec(call, EXAMPLES | {"core": core})
    assert len(core.scheduler.features) + len(core.attachments.all) > before
    assert run(core, "a", PROMPT) == len(PROMPT), "the request was not computed"


def test_quota_rejects_a_tenant_that_has_used_it_up() -> None:
    core = make_core()
    core.scheduler.attach(EXAMPLES["TokenQuota"](5))
    run(core, "a", PROMPT, 3, tenant="t")
    run(core, "b", PROMPT, 2, tenant="t")
    with pytest.raises(RequestError, match="tenant 't' has used its 5 tokens"):
        core.add(msgspec.structs.replace(dry_request("c", PROMPT, 2), tenant="t"))
    assert run(core, "d", PROMPT, 2, tenant="other") == len(PROMPT)


def test_source_shares_the_last_prompt_and_evicts_it() -> None:
    core = make_core()
    pool = core.scheduler.memory.kv.pools[0]
    source = EXAMPLES["LastPrompt"](core.scheduler.memory.kv)
    core.scheduler.attach(source)
    assert run(core, "a", PROMPT) == 10 and pool.num_used == 2, "its full blocks were not retained"
    assert run(core, "b", [*PROMPT, 50], 2) == 3 and pool.num_used == 2
    assert run(core, "c", PROMPT[:8]) == 8, "one token must be computed, so there is no hit"
    assert run(core, "d", [9, *PROMPT]) == 11, "a prompt that begins differently was a hit"
    assert run(core, "e", [7], 2) == 1 and pool.num_used == 2, (
        "a prompt without a full block was retained"
    )
    assert run(core, "f", list(range(20, 62))) == 42 and len(source.entries) == 1
    assert source.evict_one(None) and pool.num_used == 0 and not source.evict_one(None)


def test_attachment_resets_the_cache_after_a_number_of_requests() -> None:
    core = make_core(caching=True)
    core.attach(EXAMPLES["ForgetEvery"](3))
    events: list[Event] = []
    core.subscribe(events.append)
    for i in range(6):
        core.add(dry_request(f"r{i}", PROMPT, 2))
        while core.has_work:
            core.step()
    found = [event.num_cached_tokens for event in events if isinstance(event, Admitted)]
    assert found == [0, 8, 0, 8, 8, 0], "the third and the sixth request must have no prefix hit"
