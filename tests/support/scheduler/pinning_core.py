"""A core over a fake device, with pinned prefixes and the blocks that they hold."""

from typing import Any

import msgspec
import numpy as np

from quire.base.clock import FakeClock
from quire.base.events import Preempted
from quire.base.messages import Request
from quire.base.plan import Plan
from quire.base.requests.validation import RequestLimits
from quire.base.settings.config import SchedulerConfig
from quire.engine.client.output import StepReader
from quire.engine.loop.core import EngineCore
from quire.kv.manager import KVManager
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.sequence import Sequence
from quire.scheduler.reuse.pinned import Pin
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup
from tests.support.engine.updates import read, run_to_end
from tests.support.scheduler.fake_device import (
    FakeDevice,
    FakeExecutor,
    expected_tokens,
    make_request,
)

FULL = CacheGroup("full", (0,), 1, 8)
WINDOW = CacheGroup("window", (1,), 1, 8, window=6)
MAX_LEN = 100
BLOCK = 4
PREFIX = list(range(11))  # two full blocks and 3 tokens
ENDING = [41, 42, 43, 44, 45]


def num_unpinned(bench: "Bench") -> int:
    """Return the number of blocks that no pin holds or will hold."""
    return bench.kv.pools[0].num_blocks - bench.scheduler.pinned.reserved[0]


class Bench:
    """A core with a plain device, its plans, and the outputs of its requests."""

    def __init__(
        self,
        num_blocks: int = 24,
        groups: tuple[CacheGroup, ...] = (FULL,),
        caching: bool = True,
        num_host_blocks: int = 0,
        **settings: Any,
    ) -> None:
        settings = {"max_num_batched_tokens": 64, "max_num_seqs": 6, "pipeline_depth": 1} | settings
        pools = (num_blocks,) * len(groups)
        host = (num_host_blocks,) * len(groups) if num_host_blocks else None
        self.kv = KVManager(groups, pools, BLOCK, caching, host_limits=host)
        host_pools = tuple(pool.num_blocks for pool in self.kv.host_pools)
        self.device = FakeDevice(groups, pools, BLOCK, host_pools or None)
        config = SchedulerConfig(**settings)
        memory = Memory(self.kv, config.max_num_batched_tokens or 0, watermark=0.0)
        self.scheduler = Scheduler(memory, config, MAX_LEN)
        self.clock = FakeClock()
        limits = RequestLimits(50, MAX_LEN, 0, 1 << 20)
        executor: Any = FakeExecutor(self.device, is_lazy=False)
        self.core = EngineCore(self.scheduler, executor, self.clock, limits)
        self.plans: list[Plan] = []
        self.output: dict[str, dict[int, list[int]]] = {}
        self.reason: dict[str, str] = {}
        self.reader = StepReader()
        self.num_preempted = 0
        self.core.subscribe(self._hear)

    def _hear(self, event: object) -> None:
        self.num_preempted += isinstance(event, Preempted)

    def add(self, name: str, prompt: list[int], max_tokens: int = 6, **more: Any) -> Request:
        adapter_id = more.pop("adapter_id", "")
        request = make_request(name, prompt, max_tokens=max_tokens, **more)
        request = msgspec.structs.replace(request, adapter_id=adapter_id)
        self._send(request)
        return request

    def begin_pin(
        self, name: str, prompt: list[int], pin_s: float = 0.0, pin_share: float = 1.0, **more: Any
    ) -> None:
        request = make_request(name, prompt, max_tokens=1, temperature=0.0, **more)
        self._send(msgspec.structs.replace(request, pin_s=pin_s, pin_share=pin_share))

    def _send(self, request: Request) -> None:
        self.core.add(request)
        num = request.params.num_samples
        self.output[request.request_id] = {index: [] for index in range(num)}

    def pin(self, name: str = "pin", prompt: list[int] = PREFIX, **more: Any) -> Pin:
        """Return a pin that has been computed."""
        self.begin_pin(name, prompt, **more)
        self.finish()
        assert self.reason[name] == "pinned" and self.output[name] == {0: []}
        return self.pins[name]

    def step(self) -> None:
        """Make a plan, add it to `plans`, and take its result."""
        plan = self.core.plan()
        if plan is not None:
            self.plans.append(plan)
        outputs = self.core.take() if self.core.num_in_flight else self.core.take_dropped()
        for update in read(self.reader, outputs):
            self.output[update.request_id][update.index] += update.token_ids
        for update, finish in outputs.finished:
            self.reason[update.request_id] = finish.reason
        self.core.publish()
        self.scheduler.check_invariants()

    def finish(self) -> None:
        run_to_end(self.scheduler, self.step)

    def assert_right(self, *requests: Request) -> None:
        for request in requests:
            wanted = expected_tokens(request, MAX_LEN)
            assert all(got == wanted for got in self.output[request.request_id].values())
            assert self.reason[request.request_id] == "length"

    @property
    def pins(self) -> dict[str, Pin]:
        return self.scheduler.pinned.by_id

    def held(self, pin: Pin, group: int = 0) -> list[int]:
        assert pin.blocks is not None, "it is not computed"
        return list(pin.blocks.tables[group].blocks)

    def written(self, pin: Pin) -> list[np.ndarray]:
        """Return the contents of a pin's blocks, by group."""
        assert pin.blocks is not None, "it is not computed"
        return [
            slots.reshape(-1, BLOCK)[table.live_blocks].copy()
            for slots, table in zip(self.device.slots, pin.blocks.tables, strict=True)
        ]

    def sequence(self, name: str) -> Sequence:
        return self.scheduler.lifecycle.sequences[name]

    @property
    def num_used(self) -> list[int]:
        return [pool.num_used for pool in self.kv.pools]
