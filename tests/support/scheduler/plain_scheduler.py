"""A scheduler without an engine: add prompts, take steps, and sample one token for each row."""

import numpy as np

from quire.base.plan import Plan, StepResult
from quire.base.settings.config import SchedulerConfig
from quire.kv.manager import KVManager
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.queue import MakePolicy
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup
from tests.support.scheduler.fake_device import make_request

BLOCK, MAX_LEN = 4, 512


def scheduler_of(
    policy: MakePolicy, budget: int = 16, blocks: int = 400, **settings: object
) -> Scheduler:
    config = SchedulerConfig(
        **{"max_num_seqs": 64, "max_num_batched_tokens": budget, **settings}  # type: ignore[arg-type]
    )
    kv = KVManager((CacheGroup("full", (0,), 1, 1),), (blocks,), BLOCK)
    return Scheduler(Memory(kv, budget), config, MAX_LEN, policy)


def add(scheduler: Scheduler, name: str, num_tokens: int, now: float = 0.0, **more: object) -> None:
    """Add a prompt of unique tokens, or one that begins like the prompt of request `like`."""
    kind = sum(map(ord, str(more.pop("like", name)))) * 1000
    prompt = list(range(kind, kind + num_tokens))
    more = {"max_tokens": 50, "temperature": 0.0, **more}
    scheduler.add(make_request(name, prompt, **more), now)


def step(scheduler: Scheduler, now: float = 0.0) -> dict[str, int]:
    """Run a step. Return the number of tokens that it computed for each request."""
    plan = scheduler.schedule(now).plan
    if plan is None:
        return {}
    got = {
        sequence.request.request_id: num
        for sequence, num in zip(
            scheduler.rows.table.sequences[plan.rows], plan.num_tokens.tolist(), strict=True
        )
    }
    scheduler.update(answer(plan), now)
    scheduler.check_invariants()
    return got


def answer(plan: Plan) -> StepResult:
    num = len(plan.sample_rows)
    return StepResult(plan.step_id, np.full((num, 1), 7, np.int32), np.ones(num, np.int32))
