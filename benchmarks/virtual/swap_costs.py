"""The cost of swapping a sequence out and back, or of recomputing it, by a formula (P 7.3).

    one transfer per block     2 x (2 x layers x blocks x latency + bytes / link)
    one batched transfer       2 x (latency + bytes / link + 2 x bytes / device memory
                                    + 2 x bytes / host memory)
    recomputation              2 x parameters x tokens / FLOP/s

The first is the paper's engine: each layer's K and V of each block are a transfer of their own. The
second is ours. It gathers a plan's blocks in the device's memory, sends them at once and scatters
them over the host's memory (ops/blocks/host_blocks.py). So each byte is read and written once more
on both sides. A swap is out and in again, hence the factor of 2 in front. bytes: whole blocks.
Times in seconds, rates per second.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.virtual.dry_run import dry_request
from quire.base.messages import MeasuredRates
from quire.base.settings.config import SchedulerConfig
from quire.kv.manager import KVManager
from quire.runner.build import MEASURED_BLOCKS
from quire.scheduler.core.memory import Memory
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup


@dataclass(frozen=True)
class Victim:
    """A sequence to preempt: all its tokens are computed."""

    group: CacheGroup
    num_parameters: float
    num_tokens: int
    block_size: int
    dtype_bytes: int = 2

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.block_size)

    @property
    def num_bytes(self) -> int:
        """Keys and values of its blocks in all layers."""
        return self.num_blocks * self.group.block_bytes(self.block_size, self.dtype_bytes)

    @property
    def num_transfers(self) -> int:
        """K and V of each block and layer, one way."""
        return 2 * len(self.group.layers) * self.num_blocks


@dataclass(frozen=True)
class Device:
    """A GPU behind a link. link, memory and host: bytes per second that are reached, of copies over
    the link, and of the device's and the host's memory. transfer_s: to submit one transfer.
    flops_per_s: reached by the products of a prefill."""

    name: str
    link: float
    transfer_s: float
    memory: float
    host: float
    flops_per_s: float


SwapTime = Callable[[Victim, Device], float]


def per_block_s(victim: Victim, device: Device) -> float:
    """Return the seconds out and in, one transfer per block, layer, and K or V."""
    return 2 * (victim.num_transfers * device.transfer_s + victim.num_bytes / device.link)


def batched_s(victim: Victim, device: Device) -> float:
    """Return the seconds out and in, one transfer each way, gathered and scattered on either
    side."""
    staging = 2 * victim.num_bytes * (1 / device.memory + 1 / device.host)
    return 2 * (device.transfer_s + victim.num_bytes / device.link + staging)


def recompute_s(victim: Victim, device: Device) -> float:
    """Return the seconds of one prefill over the tokens, without attention."""
    return 2 * victim.num_parameters * victim.num_tokens / device.flops_per_s


def crossing_block_size(victim: Victim, device: Device) -> float | None:
    """Return the tokens per block from which on one transfer per block is cheaper than
    recomputation; None if the link is too slow for any. The victim's own block size does not
    matter."""
    one = replace(victim, block_size=1)
    left = recompute_s(one, device) - 2 * one.num_bytes / device.link
    return 2 * one.num_transfers * device.transfer_s / left if left > 0 else None


def link_for_ratio(victim: Victim, device: Device, ratio: float) -> float:
    """Return the bytes per second of a link over which recomputation takes `ratio` times as long as
    one transfer per block. Raises ValueError if the latencies alone take longer."""
    left = recompute_s(victim, device) / ratio - 2 * victim.num_transfers * device.transfer_s
    if left <= 0:
        raise ValueError(f"no link gives a ratio of {ratio:g} with blocks of {victim.block_size}")
    return 2 * victim.num_bytes / left


def engine_rates(victim: Victim, device: Device, swap: SwapTime) -> MeasuredRates:
    """Return the rates that an engine on this device would measure: a prefill, and a copy of some
    blocks out."""
    some = replace(victim, num_tokens=MEASURED_BLOCKS * victim.block_size)
    return MeasuredRates(
        prefill_tokens_per_s=victim.num_tokens / recompute_s(victim, device),
        copy_bytes_per_s=some.num_bytes / (swap(some, device) / 2),
    )


def chooses_swap(victim: Victim, rates: MeasuredRates) -> bool:
    """Return whether a scheduler with these rates swaps the victim, which it has running."""
    group, size = victim.group, victim.block_size
    block_bytes = group.block_bytes(size, victim.dtype_bytes)
    kv = KVManager((group,), (victim.num_blocks + 1,), size, False, block_bytes=(block_bytes,))
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=victim.num_tokens)
    scheduler = Scheduler(Memory(kv, victim.num_tokens), config, victim.num_tokens + 2)
    scheduler.add(dry_request("victim", [0] * victim.num_tokens, 2), 0.0)
    scheduler.schedule(0.0)
    scheduler.control(rates, 0.0)
    return scheduler.preemption.swapping_is_cheaper(scheduler.rows.sequences())
