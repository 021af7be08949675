"""Token budget of a step: at first from measured kernels, then from measured steps.

Each decoding row gets one token per step, so a step with a prompt should not take longer than
`STEP_S`. The time of a token depends on the machine, its load and the contexts. Only steps
with a prompt that were large or slow are counted, because a small step mostly reads the weights.

    time of a step = time of reading the weights + tokens x time of a token

Steps of different sizes reveal the fixed time. If it is most of `STEP_S`, few tokens would slow
prompts down and hardly speed answers up. Then a step may take twice the fixed time.

The budget uses the median of the last three steps, so one disturbed step changes nothing. It
changes only by more than a margin, so it does not oscillate.

The core's results on a CPU do not depend on where chunks are cut (docs/inside/cpu.md).
"""

import math
from collections import deque

from quire.base.plan import Plan
from quire.base.settings.config import EngineConfig
from quire.models.checkpoint.formats import weight_formats
from quire.ops.weights.formats import measured_speed
from quire.spec.model_spec import ModelSpec

STEP_S = 0.25
MAX_TOKENS = 256  # maximum budget, which memory is planned for
MIN_TOKENS, STRIDE = 16, 8
UNMEASURED_TOKENS = 64  # without the core: an estimate, which the first steps correct
NUM_STEPS, MIN_STEPS = 3, 2
NUM_TIMES, MIN_TIMES = 3, 2  # of steps of about one size
STALE_STEPS = 32  # steps after which the time of another size is outdated
MAX_FIXED_SHARE = 0.8  # of a step's time
MAX_GROWTH = 3  # at a time
RAISE, LOWER = 1.05, 0.9  # margins: estimate over the next budget, and under this one


def first_budget(config: EngineConfig, spec: ModelSpec, num_threads: int) -> int:
    """Return the number of tokens that take a quarter of a second at the measured rate, rounded by
    `bounded_tokens`. config: with all derived values filled in."""
    layers = weight_formats(config.model).layers
    speed = measured_speed(config.model.dtype if layers is None else layers.format)
    if speed is None:
        return UNMEASURED_TOKENS
    operations = 2 * max(1, linear_parameters(spec))
    return bounded_tokens(STEP_S * speed.tile_flops * num_threads / operations)


def bounded_tokens(tokens: float) -> int:
    """Return the number of tokens as a multiple of 8 between 16 and 256, rounded down."""
    return int(min(MAX_TOKENS, max(MIN_TOKENS, tokens))) // STRIDE * STRIDE


def linear_parameters(spec: ModelSpec) -> int:
    """Return the number of weights that a token is multiplied with, except head and embedding."""
    attention = spec.hidden_size * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
    if spec.latent is not None:
        attention = spec.latent.parameters(spec.hidden_size, spec.num_heads)
    mixing = spec.num_layers * attention
    if spec.linear_layers:
        gates = spec.hidden_size * spec.head_dim * spec.num_heads
        num_linear = len(spec.linear_layers)
        linear = num_linear * spec.linear_attention.parameters(spec.hidden_size)
        mixing = (spec.num_layers - num_linear) * (attention + gates) + linear
    dense, experts = 3 * spec.hidden_size * spec.intermediate_size, spec.experts
    if experts is None:
        return mixing + spec.num_layers * dense
    num_sparse = sum(experts.is_sparse(layer) for layer in range(spec.num_layers))
    has_gate = experts.shared_size > 0 and experts.has_shared_gate
    num_gates = experts.num_experts + (1 if has_gate else 0)
    sparse = spec.hidden_size * (num_gates + 3 * experts.token_size)
    return mixing + spec.num_layers * dense + num_sparse * (sparse - dense)


class StepBudget:
    """Token budget that adapts to steps' times. num_tokens: the budget, at first the config's."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._steps: deque[tuple[int, float]] = deque(maxlen=NUM_STEPS)  # tokens and seconds
        self._times = _StepTimes()

    @property
    def target_s(self) -> float:
        """Return the maximum time of a step with a prompt, in seconds."""
        return max(STEP_S, 2 * (self._times.fixed_s or 0.0))

    def observe(self, plan: Plan, duration_s: float) -> int:
        """Record a step's time; return the budget of the next steps."""
        num_tokens = plan.num_scheduled_tokens
        if duration_s <= 0 or num_tokens == 0:
            return self.num_tokens
        self._times.add(num_tokens, duration_s)
        has_prompt = num_tokens > len(plan.rows)
        if has_prompt and (2 * num_tokens >= self.num_tokens or duration_s > self.target_s):
            self._steps.append((num_tokens, duration_s))
            if len(self._steps) >= MIN_STEPS:
                self._follow()
        return self.num_tokens

    def _follow(self) -> None:
        tokens = sorted(map(self._time_for, self._steps))[len(self._steps) // 2]
        if tokens >= RAISE * (self.num_tokens + STRIDE) or tokens <= LOWER * self.num_tokens:
            target_tokens = bounded_tokens(min(tokens, MAX_GROWTH * self.num_tokens))
            if target_tokens == self.num_tokens == MIN_TOKENS and self._times.fixed_s is None:
                target_tokens = 2 * MIN_TOKENS  # find out whether larger steps take much longer
            self.num_tokens = target_tokens
            self._steps.clear()

    def _time_for(self, step: tuple[int, float]) -> float:
        """Estimate how many tokens fit into a step's target time. It is the mean of two models: all
        time is proportional to tokens, or the fixed time is added. In fact they overlap in part."""
        num_tokens, duration_s = step
        fixed_s = min(self._times.fixed_s or 0.0, MAX_FIXED_SHARE * duration_s)
        if_proportional = self.target_s / duration_s
        if_added = (self.target_s - fixed_s) / (duration_s - fixed_s)
        return num_tokens * math.sqrt(if_proportional * if_added)


class _StepTimes:
    """Recent times of steps, by size in powers of two."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._last: dict[int, int] = {}  # number of the last step of this size
        self._times: dict[int, deque[tuple[float, int]]] = {}

    def add(self, num_tokens: int, duration_s: float) -> None:
        size = num_tokens.bit_length()
        self._num_steps += 1
        if self._is_forgotten(size):
            self._times[size] = deque(maxlen=NUM_TIMES)
        self._times[size].append((duration_s, num_tokens))
        self._last[size] = self._num_steps

    @property
    def fixed_s(self) -> float | None:
        """Return the time of a step without tokens: the intercept of the line through the smallest
        and the largest steps. None until there are two sizes."""
        known = [
            sorted(times)[(len(times) - 1) // 2]  # a disturbed step takes longer, never shorter
            for size, times in sorted(self._times.items())
            if len(times) >= MIN_TIMES and not self._is_forgotten(size)
        ]
        if not known or known[-1][1] < 2 * known[0][1]:
            return None
        (short_s, few), (long_s, many) = known[0], known[-1]
        token_s = max(0.0, (long_s - short_s) / (many - few))
        return max(0.0, short_s - token_s * few)

    def _is_forgotten(self, size: int) -> bool:
        return self._num_steps - self._last.get(size, -STALE_STEPS) > STALE_STEPS
