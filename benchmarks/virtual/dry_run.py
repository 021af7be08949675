"""A scheduler without a model: an executor that answers every plan with random tokens."""

import hashlib
from collections import deque
from collections.abc import Callable

import numpy as np

from quire.base.masks import MaskPromise
from quire.base.messages import Request
from quire.base.plan import Plan, StepResult
from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams
from quire.base.settings.config import SchedulerConfig
from quire.kv.manager import KVManager
from quire.ops.host.native import chain_of
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.names import Digester
from quire.scheduler.core.queue import Fifo, MakePolicy
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup

VOCAB_SIZE = 50_000


class RandomExecutor:
    """As quick as an executor can be: seeded random token ids, nothing computed."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._results: deque[StepResult] = deque()

    def start(self, on_result: Callable[[], None]) -> None:
        pass

    def copy_bytes_per_s(self) -> float:
        return 0.0

    def submit(self, plan: Plan, masks: MaskPromise | None = None) -> None:
        num = len(plan.sample_rows)
        token_ids = self._rng.integers(0, VOCAB_SIZE, (num, 1), np.int32)
        self._results.append(StepResult(plan.step_id, token_ids, np.ones(num, np.int32)))

    def is_ready(self) -> bool:
        return len(self._results) > 0

    def next_result(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self._results.clear()


def dry_run(
    num_blocks: int,
    block_size: int,
    config: SchedulerConfig,
    max_model_len: int,
    enable_prefix_caching: bool,
    seed: int = 0,
    make_policy: MakePolicy = Fifo,
) -> tuple[Scheduler, RandomExecutor]:
    """Return a scheduler over one pool of a group of full attention, and an executor for its
    plans."""
    group = CacheGroup("full", (0,), num_kv_heads=1, head_dim=1)
    kv = KVManager((group,), (num_blocks,), block_size, enable_prefix_caching)
    digester = Digester(chain=chain_of(hashlib.sha256))  # as in the engine
    memory = Memory(kv, config.max_num_batched_tokens or 0, digester=digester)
    scheduler = Scheduler(memory, config, max_model_len, make_policy)
    return scheduler, RandomExecutor(seed)


def dry_request(request_id: str, prompt_token_ids: list[int], max_tokens: int) -> Request:
    """Make a request that only its length ends."""
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, output_kind=RequestOutputKind.FINAL_ONLY
    )
    return Request(request_id, prompt_token_ids, params, seed=0)
