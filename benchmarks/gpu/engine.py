"""The measured engine: an `LLM`, its core's reports of steps, and the time of a step.

A step's time is the mean distance between results over a run of steps in which every row decodes.
That is the cost of a token, whether one plan is in flight or several.
"""

import dataclasses
import gc
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from benchmarks.gpu.context import Bench
from benchmarks.gpu.idle import DeviceProfile
from benchmarks.gpu.workload import Request, random_requests
from quire.base.events import Event, Stepped
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.cache_config import CacheConfig
from quire.base.settings.config import EngineConfig, ModelConfig, SchedulerConfig
from quire.serve.python.llm import LLM

Log = TypeVar("Log", bound=Callable[[Event], None])
SKIPPED_STEPS = 8  # of a steady run: what is compiled or captured on first use
PROFILED_STEPS = 50
REPORTED = {"compilation", "enforce_eager", "deterministic", "pipeline_depth", "max_num_seqs"}
REPORTED |= {"max_num_batched_tokens", "attention_backend", "dtype", "max_model_len"}


def known_settings() -> set[str]:
    """Return the names of this version's settings."""
    classes = (EngineConfig, ModelConfig, CacheConfig, SchedulerConfig)
    return {item.name for cls in classes for item in dataclasses.fields(cls)}


@contextmanager
def engine(bench: Bench, model: str, **settings: Any) -> Iterator[LLM]:
    """Yield an LLM of the model (the demo model on a tiny run), and free its memory at the end."""
    given: dict[str, Any] = {"disable_log_stats": True, "enable_prefix_caching": False}
    given |= {"device": bench.device.type, **settings}
    if bench.is_tiny:
        given |= {"max_model_len": 96, "kv_cache_memory_bytes": 1 << 24, "dtype": "float32"}
        model = "demo"
    unknown = given.keys() - known_settings()
    if unknown:
        raise ValueError(f"this version has no settings {sorted(unknown)}")
    llm = LLM(model, **given)
    try:
        bench.report.facts[f"settings of {model}"] = resolved(llm)
        yield llm
    finally:
        llm.close()
        del llm
        gc.collect()
        if bench.is_cuda:
            torch.cuda.empty_cache()


def resolved(llm: LLM) -> dict[str, Any]:
    """Return the relevant settings, as the engine filled them in."""
    config = llm.engine.config
    parts = (config, config.model, config.cache, config.scheduler)
    found = {}
    for part in parts:
        for item in dataclasses.fields(part):
            if item.name in REPORTED:
                found[item.name] = getattr(part, item.name)
    return found | {"pool bytes": llm.engine.memory.pool_bytes}


@dataclass(frozen=True)
class Done:
    """A result that was taken. num_got: rows that got a token."""

    at_s: float
    num_got: int
    num_tokens: int


@dataclass
class StepLog:
    """Listens to a core. profile: to be started and stopped within the steady steps of `batch`
    rows."""

    batch: int = 0
    profile: DeviceProfile | None = None
    steps: list[Done] = field(default_factory=list)
    num_steady: int = 0

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Stepped):
            return
        done = Done(event.at_s, len(event.rows), event.num_tokens)
        self.steps.append(done)
        if done.num_got == done.num_tokens == self.batch:
            self.num_steady += 1
            if self.profile is not None:
                self._profile(self.profile)

    def _profile(self, profile: DeviceProfile) -> None:
        if self.num_steady == SKIPPED_STEPS:
            profile.start()
        elif self.num_steady == SKIPPED_STEPS + PROFILED_STEPS:
            profile.stop()


@contextmanager
def listening(llm: LLM, log: Log) -> Iterator[Log]:
    """Subscribe a log for the block. The core has no unsubscribe, so a function in between drops
    the log."""
    logs = [log]

    def forward(event: Event) -> None:
        for each in logs:
            each(event)

    llm.engine.client.core.subscribe(forward)
    try:
        yield log
    finally:
        logs.clear()


@dataclass(frozen=True)
class StepTimes:
    """Times of a steady run: the mean, median and longest step."""

    mean_s: float
    median_s: float
    longest_s: float
    num_steps: int

    @property
    def detail(self) -> dict[str, str]:
        found = {"steps": str(self.num_steps), "median": f"{self.median_s * 1e3:.3f} ms"}
        return found | {"longest": f"{self.longest_s * 1e3:.3f} ms"}


def steady_times(steps: Sequence[Done], batch: int, skip: int = SKIPPED_STEPS) -> StepTimes:
    """Return the times of the longest run of steps in which `batch` rows get a token each and
    nothing else is computed. Its first `skip` steps do not count. Raises ValueError if fewer than
    two remain."""
    longest: list[Done] = []
    current: list[Done] = []
    for step in steps:
        if step.num_got == step.num_tokens == batch:
            current.append(step)
            longest = max(longest, current, key=len)
        else:
            current = []
    times = [step.at_s for step in longest[skip:]]
    if len(times) < 2:
        raise ValueError(f"of {len(steps)} steps {len(longest)} in a row were of {batch} rows")
    apart = [after - before for before, after in zip(times, times[1:], strict=False)]
    mean = (times[-1] - times[0]) / len(apart)
    return StepTimes(mean, statistics.median(apart), max(apart), len(apart))


def decode_lengths(batch: int, context: int, steps: int, budget: int) -> tuple[int, int]:
    """Prompt and output tokens with which `batch` rows decode together for `steps` steps, around
    the context on average. budget: tokens of a step. Rows whose prompt was early decode while the
    other prompts are computed."""
    prompt_steps = math.ceil(batch * context / max(1, budget - batch))
    window = SKIPPED_STEPS + steps
    prompt = max(1, context - prompt_steps // 2 - SKIPPED_STEPS - steps // 2)
    return prompt, prompt_steps + window + 4


def generate_tokens(llm: LLM, requests: Sequence[Request]) -> list[list[int]]:
    """Generate greedily, without an end of sequence before the last token."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=r.output_len, ignore_eos=True, detokenize=False)
        for r in requests
    ]
    outputs = llm.generate([r.prompt for r in requests], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def decode(
    bench: Bench,
    llm: LLM,
    batch: int,
    context: int,
    steps: int,
    profile: DeviceProfile | None = None,
) -> StepTimes:
    """Time steps of `batch` rows with about `context` tokens each."""
    budget = llm.engine.config.scheduler.max_num_batched_tokens or 8192
    prompt, output = decode_lengths(batch, context, steps, budget)
    requests = [
        Request(request.prompt, output)
        for request in random_requests(
            llm.engine.spec.vocab_size, batch, prompt, prompt, bench.seed
        )
    ]
    with listening(llm, StepLog(batch, profile)) as log:
        tokens = generate_tokens(llm, requests)
    if any(len(each) != output for each in tokens):
        raise ValueError("an output has another length than was asked for")
    return steady_times(log.steps, batch)


def best_decode(
    bench: Bench, llm: LLM, batch: int, context: int, steps: int, rounds: int
) -> StepTimes:
    """Return the fastest of some rounds, since the first may include compilation."""
    found = [decode(bench, llm, batch, context, steps) for _ in range(rounds)]
    return min(found, key=lambda times: times.mean_s)
