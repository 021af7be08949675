"""The token budget of a step follows the measured step times, on a virtual clock with CPUs of
several speeds.

Covers `runner/setup/step_size.py`.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from benchmarks.virtual.dry_run import VOCAB_SIZE, dry_request, dry_run
from quire.base.clock import FakeClock
from quire.base.masks import MaskPromise
from quire.base.messages import Abort, MeasuredRates
from quire.base.plan import Plan, StepResult
from quire.base.requests.validation import RequestLimits
from quire.base.settings.config import SchedulerConfig, config_from_flat
from quire.engine.attachments.recorder import Recorder
from quire.engine.loop.core import EngineCore
from quire.engine.recording.files import read_recording
from quire.ops.weights.formats import variants
from quire.runner.derive import derive_config
from quire.runner.setup.step_size import (
    MAX_TOKENS,
    MIN_TOKENS,
    STEP_S,
    StepBudget,
    bounded_tokens,
    first_budget,
)
from quire.serve.python.llm import LLM
from quire.tools.replay import replay_all
from tests.runner.test_memory_plan import shape
from tests.support.kernels.kernel_speeds import keep_figures, own_figures

WEIGHTS = 0.44e9  # weights of Qwen3-0.6B that a token is multiplied with
THREADS = 2
SLOW, FAST = 0.8e11, 5e11  # FLOP/s of a thread
MAX_GAP_S = 0.3
LENGTH = 50_000


@dataclass
class Cpu:
    """An executor whose steps take as long on the clock as on such a CPU. read_s: time per step to
    read the weights; attention_s: time per token and thousand tokens of context; wait_s: added to
    any step; disturbed: factors on step times, by step number."""

    clock: FakeClock
    flops: float
    read_s: float = 0.03
    attention_s: float = 0.0
    wait_s: float = 0.0
    disturbed: dict[int, float] = field(default_factory=dict)
    plans: deque[Plan] = field(default_factory=deque)
    steps: list[tuple[Plan, float]] = field(default_factory=list)

    def start(self, on_result: Callable[[], None]) -> None:
        pass

    def copy_bytes_per_s(self) -> float:
        return 0.0

    def submit(self, plan: Plan, masks: MaskPromise | None = None) -> None:
        self.plans.append(plan)

    def is_ready(self) -> bool:
        return bool(self.plans)

    def next_result(self) -> StepResult:
        plan = self.plans.popleft()
        multiply_s = 2 * WEIGHTS * plan.num_scheduled_tokens / (self.flops * THREADS)
        contexts = (plan.computed_bound + plan.num_tokens) / 1000
        attention_s = self.attention_s * float((plan.num_tokens * contexts).sum())
        seconds = max(self.read_s, multiply_s) + attention_s + self.wait_s
        seconds *= self.disturbed.get(len(self.steps), 1.0)
        self.clock.advance(seconds)
        self.steps.append((plan, seconds))
        num = len(plan.sample_rows)
        token_ids = np.full((num, 1), len(self.steps) % VOCAB_SIZE, np.int32)
        return StepResult(plan.step_id, token_ids, np.ones(num, np.int32), duration_s=seconds)

    def close(self) -> None:
        self.plans.clear()


def engine(cpu: Cpu, first: int | None, num_rows: int = 64) -> EngineCore:
    config = SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=MAX_TOKENS)
    scheduler, _ = dry_run(20_000, 16, config, LENGTH, enable_prefix_caching=False)
    budget = None if first is None else StepBudget(first)
    limits = RequestLimits(VOCAB_SIZE, LENGTH, 5, num_rows)
    return EngineCore(scheduler, cpu, cpu.clock, limits, budget)


def decode(core: EngineCore, num: int, prompt: int = 3) -> None:
    """Run until this many rows decode."""
    for i in range(num):
        core.add(dry_request(f"decoding {i}", [7] * prompt, 20_000))
    while core.scheduler.num_waiting or any(
        sequence.num_computed_tokens < prompt for sequence in core.scheduler.rows.sequences()
    ):
        core.step()


def add_prompts(core: EngineCore, prompts: Iterable[int]) -> None:
    for number, length in enumerate(prompts):
        core.add(dry_request(f"prompt {number}", [5] * length, 1))


def compute(core: EngineCore, cpu: Cpu, prompts: Iterable[int]) -> tuple[list[Plan], list[float]]:
    """Return the steps that compute these prompts, and the duration of each."""
    begin = len(cpu.steps)
    add_prompts(core, prompts)
    while any(name.startswith("prompt") for name in core.scheduler.lifecycle.sequences):
        core.step()
    plans, seconds = zip(*cpu.steps[begin:], strict=True)
    return list(plans), list(seconds)


@pytest.mark.parametrize("first", [None, 16, 64, 256])
@pytest.mark.parametrize("flops", [SLOW, FAST], ids=["slow", "fast"])
def test_budget_converges_to_the_target_step_time(flops: float, first: int | None) -> None:
    """A measured first budget (None) is right from the start. A wrong one is corrected within a few
    steps."""
    cpu = Cpu(FakeClock(), flops)
    measured = bounded_tokens(STEP_S * flops * THREADS / (2 * WEIGHTS))
    core = engine(cpu, first or measured)
    decode(core, 3)
    plans, seconds = compute(core, cpu, [2000, 3000, 700])
    learning = 0 if first is None else 20 if first == 16 else 4
    assert max(seconds[learning:]) <= MAX_GAP_S
    whole = [s for plan, s in zip(plans, seconds, strict=True) if plan.num_tokens.max() > 1]
    assert np.median(whole[learning:-1]) >= 0.8 * STEP_S
    assert 0.9 * measured <= core.scheduler.memory.rates.step_tokens <= 1.2 * measured


def test_prompts_do_not_stall_decoding_rows() -> None:
    """Without a budget, a step of 256 tokens takes more than a second on this CPU."""
    gaps = {}
    for first in (None, 40):
        cpu = Cpu(FakeClock(), SLOW)
        core = engine(cpu, first)
        decode(core, 3)
        plans, _ = compute(core, cpu, [1024])
        ends = np.cumsum([seconds for _, seconds in cpu.steps])
        rows = [plan.rows[plan.num_tokens == 1] for plan, _ in cpu.steps]
        got = [end for end, each in zip(ends, rows, strict=True) if 0 in each]
        gaps[first] = max(np.diff(got))
        assert sum(int(plan.num_tokens.max()) for plan in plans if plan.num_tokens.max() > 1) > 900
    assert gaps[None] > 1.2 and gaps[40] <= MAX_GAP_S


def test_budget_shrinks_with_long_contexts() -> None:
    cpu = Cpu(FakeClock(), FAST, attention_s=1e-4)
    core = engine(cpu, MAX_TOKENS)
    decode(core, 2)
    plans, seconds = compute(core, cpu, [30_000])
    assert max(seconds[3:]) <= MAX_GAP_S
    sizes = [plan.num_scheduled_tokens for plan in plans]
    assert sizes[0] == MAX_TOKENS and sizes[-3] < 100
    compute(core, cpu, [6000])  # the budget grows again
    assert core.scheduler.memory.rates.step_tokens > 150


def test_noise_in_step_times_does_not_change_the_budget() -> None:
    """Step times vary by a tenth around the target."""
    rng = np.random.default_rng(5)
    budget = StepBudget(64)
    sizes = set()
    for i in range(400):
        seconds = budget.num_tokens / 300 * rng.uniform(0.9, 1.1)
        budget.observe(plan_of(budget.num_tokens - 1), seconds)
        if i > 10:
            sizes.add(budget.num_tokens)
    assert len(sizes) == 1 and 0.85 < sizes.pop() / 300 / STEP_S < 1.1


def test_outlier_step_times_do_not_change_the_budget() -> None:
    cpu = Cpu(FakeClock(), SLOW, disturbed={12: 20.0, 20: 8.0, 30: 0.01})
    core = engine(cpu, 40)
    decode(core, 2)
    plans, _ = compute(core, cpu, [1500])
    sizes = [plan.num_scheduled_tokens for plan in plans]
    assert len(sizes) > 35 and set(sizes[:-1]) == {40}


@pytest.mark.parametrize("throttled", [0.3, 0.5, 0.7])
def test_throttled_cpu_gets_smaller_steps_until_it_recovers(throttled: float) -> None:
    """All steps become slower from one step to the next, as on battery or when the CPU is hot."""
    cpu = Cpu(FakeClock(), SLOW * 3)
    full = bounded_tokens(STEP_S * cpu.flops * THREADS / (2 * WEIGHTS))
    core = engine(cpu, full)
    decode(core, 3)
    compute(core, cpu, [2000])
    cpu.flops, cpu.read_s = cpu.flops * throttled, cpu.read_s / throttled
    _, seconds = compute(core, cpu, [2000])
    assert max(seconds[:2]) > 1.1 * STEP_S and max(seconds[4:]) <= MAX_GAP_S
    assert core.scheduler.memory.rates.step_tokens <= 1.25 * throttled * full
    cpu.flops, cpu.read_s = cpu.flops / throttled, cpu.read_s * throttled
    _, seconds = compute(core, cpu, [3000, 2000])
    assert max(seconds) <= MAX_GAP_S
    assert core.scheduler.memory.rates.step_tokens >= 0.8 * full


def plan_of(*num_tokens: int) -> Plan:
    """Return a plan with one decoding row and other rows of these token counts."""
    counts = np.asarray([1, *num_tokens], np.int32)
    rows = np.arange(len(counts), dtype=np.int32)
    return Plan(0, rows, counts, np.zeros(len(counts), np.int32), rows)


def test_uninformative_steps_do_not_change_the_budget() -> None:
    budget = StepBudget(128)
    for _ in range(20):
        budget.observe(plan_of(*[1] * 40), 0.2)  # only decoding
        budget.observe(plan_of(*[1] * 200), 3.0)  # also if that is slow
        budget.observe(plan_of(20), 0.2)  # small: reading the weights dominates
        budget.observe(plan_of(150), 0.0)  # not timed
    assert budget.num_tokens == 128
    budget.observe(plan_of(20), 0.5)  # small, and yet it takes too long
    budget.observe(plan_of(20), 0.5)
    assert budget.num_tokens == MIN_TOKENS


def test_budget_stays_within_its_bounds() -> None:
    budget = StepBudget(64)
    for _ in range(4):
        budget.observe(plan_of(255), 1e-6)
    assert budget.num_tokens == MAX_TOKENS
    for _ in range(2):
        budget.observe(plan_of(255), 1e6)
    assert budget.num_tokens == MIN_TOKENS
    sizes = [bounded_tokens(n) for n in (0, 1, 16, 31.9, 32, 255.9, 256, 1e30, float("inf"))]
    assert sizes == [16, 16, 16, 24, 32, 248, 256, 256, 256]


def test_slow_weight_reads_do_not_starve_prompts() -> None:
    """Every step takes at least 1.4 s here. A budget of 16 tokens would make prompts four times
    slower and decoding at most twice as fast."""
    cpu = Cpu(FakeClock(), 4e11 * WEIGHTS / 14e9, read_s=1.4)
    core = engine(cpu, 16)
    decode(core, 1)
    for _ in range(5):
        core.step()
    plans, seconds = compute(core, cpu, [3000])
    assert max(seconds[10:]) <= 2 * 1.4 * 1.1
    assert np.median([plan.num_scheduled_tokens for plan in plans]) >= 64


@pytest.mark.parametrize("first", [16, 64, 256])
def test_contention_for_cores_does_not_starve_prompts(first: int) -> None:
    """Threads wait 0.35 s in each step, whatever its size. 16 tokens per step give 37 tokens/s, 40
    give 70. No row has decoded alone before."""
    cpu = Cpu(FakeClock(), SLOW, read_s=0.0, wait_s=0.35)
    core = engine(cpu, first)
    decode(core, 2, prompt=500)
    plans, seconds = compute(core, cpu, [4000])
    assert np.median(seconds[10:]) <= 2 * 0.35 * 1.1
    sizes = [plan.num_scheduled_tokens for plan in plans[10:]]
    assert 40 <= np.median(sizes) <= 80
    assert sum(size < 32 for size in sizes) < 0.2 * len(sizes)  # while it probes smaller steps


def test_one_long_pause_does_not_count_as_the_cost_of_small_steps() -> None:
    cpu = Cpu(FakeClock(), SLOW, disturbed={8: 300.0, 30: 300.0})
    core = engine(cpu, 40)
    decode(core, 2)
    for _ in range(40):
        core.step()
    assert max(compute(core, cpu, [2000])[1]) <= MAX_GAP_S


def test_prefill_rate_is_measured_with_small_steps_too() -> None:
    """Without this rate, preempted sequences are always recomputed and never swapped."""
    cpu = Cpu(FakeClock(), SLOW / 3)
    core = engine(cpu, 16)
    decode(core, 1)
    compute(core, cpu, [300])
    assert core.scheduler.memory.rates.step_tokens == 16
    true = SLOW / 3 * THREADS / (2 * WEIGHTS)
    assert core.scheduler.memory.rates.prefill_tokens_per_s == pytest.approx(true, rel=0.2)


# ---- the scheduler ---------------------------------------------------------------------------


def test_configured_budget_is_not_adapted() -> None:
    cpu = Cpu(FakeClock(), SLOW)
    core = engine(cpu, None)
    decode(core, 1)
    plans, _ = compute(core, cpu, [2000])
    assert core.scheduler.memory.rates.step_tokens == 0
    assert [plan.num_scheduled_tokens for plan in plans[:7]] == [MAX_TOKENS] * 7


def test_small_budget_still_serves_all_decoding_rows_and_a_prompt() -> None:
    """A step never exceeds the number of tokens that memory is planned for."""
    cpu = Cpu(FakeClock(), FAST)
    core = engine(cpu, None, num_rows=256)
    decode(core, 40)
    core.scheduler.control(MeasuredRates(step_tokens=16), 0.0)
    plan, *_ = compute(core, cpu, [100])[0]
    assert plan.num_tokens.tolist() == [1] * 40 + [16]
    core.scheduler.control(MeasuredRates(step_tokens=1000), 0.0)
    plan, *_ = compute(core, cpu, [1000])[0]
    assert plan.num_scheduled_tokens == MAX_TOKENS
    core.scheduler.control(MeasuredRates(), 0.0)
    for i in range(200):
        core.add(dry_request(f"more {i}", [7] * 3, 20_000))
    while core.scheduler.num_waiting:
        core.step()
    core.scheduler.control(MeasuredRates(step_tokens=16), 0.0)
    core.step()
    assert cpu.steps[-1][0].num_scheduled_tokens == 240


def test_replay_reproduces_the_budgets(tmp_path: Path) -> None:
    cpu = Cpu(FakeClock(), SLOW, disturbed=dict.fromkeys(range(20, 30), 3.0))
    core = engine(cpu, 256)
    recorder = Recorder(core.scheduler, tmp_path, 10_000_000)
    core.attach(recorder)
    decode(core, 3)
    compute(core, cpu, [1500, 400])
    core.control(Abort("decoding 0"))
    core.step()
    core.close()
    sizes = [plan.num_scheduled_tokens for plan, _ in cpu.steps if plan.num_tokens.max() > 1]
    assert len({size for size, _ in itertools.groupby(sizes)}) > 3
    outcome = replay_all(read_recording(tmp_path))
    assert outcome.difference is None and outcome.num_steps == len(cpu.steps)


# ---- the first budget ------------------------------------------------------------------------


@pytest.mark.skipif(not variants(), reason="the C++ core is not built")
def test_first_budget_comes_from_measured_kernel_speeds(tmp_path: Path) -> None:
    spec = shape("qwen3-0.6b")
    found = {}
    with own_figures(tmp_path):
        for flops, settings in itertools.product((SLOW, FAST), ({}, {"quantization": "int8"})):
            keep_figures({}, flops)
            config = config_from_flat(model="shape:qwen3-0.6b", dtype="bfloat16", **settings)
            config = derive_config(config, spec, "cpu")
            assert config.scheduler.max_num_batched_tokens == MAX_TOKENS  # for memory
            found[flops, len(settings)] = first_budget(config, spec, THREADS)
        assert found == {(SLOW, 0): 40, (SLOW, 1): 40, (FAST, 0): 256, (FAST, 1): 256}
        keep_figures({"int8": variants()[-1]}, SLOW)  # nine times as many operations of int8
        assert first_budget(config, spec, THREADS) == 256
        config = config_from_flat(model="shape:qwen3-0.6b", dtype="float64")
        assert first_budget(derive_config(config, spec, "cpu"), spec, THREADS) == 64


@pytest.mark.parametrize("configured", [None, 100])
def test_engine_adapts_the_budget_unless_one_is_configured(configured: int | None) -> None:
    with LLM(
        "demo",
        device="cpu",
        max_num_batched_tokens=configured,
        max_model_len=64,
        disable_log_stats=True,
    ) as llm:
        scheduler = llm.engine.client.core.scheduler
        assert scheduler.token_budget == (configured or MAX_TOKENS)
        assert scheduler.memory.rates.step_tokens == (0 if configured else MAX_TOKENS)
