"""What plans move between the device and the host tier (`kv/tiers.py`).

Blocks that were evicted while a plan was made are copied out before its forward pass writes over
them; a hit in host memory is loaded before the pass that reads it. Loading costs bytes / bandwidth
of a copy, computing costs tokens / tokens per second of a prefill; what costs more is not done.
"""

from typing import TYPE_CHECKING

from quire.base.plan import Plan
from quire.kv.manager import KVBlocks
from quire.scheduler.flight import Draft
from quire.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler


def loading_is_cheaper(scheduler: "Scheduler", hit: KVBlocks, near: KVBlocks) -> bool:
    """Whether to load what is in host memory beyond the hit on the device. Where a rate is not
    known, it is loaded."""
    rates, sizes = scheduler.rates, scheduler.kv.block_bytes
    if not (rates.prefill_tokens_per_s and rates.copy_bytes_per_s and sizes):
        return True
    num_bytes = sum(len(away) * size for away, size in zip(hit.host, sizes, strict=True))
    num_tokens = hit.num_tokens - near.num_tokens
    return num_bytes / rates.copy_bytes_per_s < num_tokens / rates.prefill_tokens_per_s


def load(scheduler: "Scheduler", sequence: Sequence, draft: Draft) -> None:
    """Plan the loads of a hit that the sequence has just been given. If its row fails, nobody is to
    rely on them."""
    loads = scheduler.kv.take_loads()
    draft.add_moves("load", loads)
    loaded = [destination for _, destination in loads]
    draft.shared.append((sequence.row, [[] for _ in loaded], loaded))


def offload(scheduler: "Scheduler", draft: Draft, is_planned: bool) -> None:
    """Copy out what the plan evicts. Without a plan, the next one will."""
    tier = scheduler.kv.tier
    if tier is None:
        return
    draft.add_moves("swap_out", tier.take_evicted())
    if is_planned:
        tier.end_plan(draft.step_id)


def flush(scheduler: "Scheduler", step_id: int) -> Plan | None:
    """A plan that copies out what the device's index has and nobody holds, as much as fits; None if
    there is nothing, or nothing that another engine could use."""
    tier, stores = scheduler.kv.tier, scheduler.stores
    if tier is None or scheduler.flights or (stores is not None and stores.is_private):
        return None
    while tier.evict_some():
        draft = Draft(step_id)
        offload(scheduler, draft, is_planned=True)
        if moves := draft.moves():  # otherwise host memory had all of it
            return Plan(step_id, moves=moves)
    return None
