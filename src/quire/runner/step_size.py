"""How many tokens a step begins with on a CPU, so that nobody who decodes waits long for a prefill.

This is from what was measured of the kernels; while steps run, `engine/loop/step_budget.py` follows
how long they take. Where chunks are cut changes no bit of the core's results (docs/inside/cpu.md).
"""

from quire.base.config import EngineConfig
from quire.base.model_spec import ModelSpec
from quire.models.formats import weight_formats
from quire.ops.formats import measured_speed

STEP_S = 0.25
MOST_TOKENS = 256  # what memory is planned for
FEWEST_TOKENS, STRIDE = 16, 8
UNMEASURED_TOKENS = 64  # without the core: a guess, which the first steps correct


def first_budget(config: EngineConfig, spec: ModelSpec, num_threads: int) -> int:
    """Return the tokens that take a quarter of a second at the measured rate, as `bounded_tokens`.
    config: with all derived values filled in."""
    layers = weight_formats(config.model).layers
    speed = measured_speed(config.model.dtype if layers is None else layers.format)
    if speed is None:
        return UNMEASURED_TOKENS
    operations = 2 * max(1, linear_parameters(spec))
    return bounded_tokens(STEP_S * speed.tile_flops * num_threads / operations)


def bounded_tokens(tokens: float) -> int:
    """Return so many tokens as a multiple of 8 between 16 and 256, rounded down."""
    return int(min(MOST_TOKENS, max(FEWEST_TOKENS, tokens))) // STRIDE * STRIDE


def linear_parameters(spec: ModelSpec) -> int:
    """Count the weights that each token is multiplied with, head and embedding aside."""
    attention = spec.hidden_size * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
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
    num_gates = experts.num_experts + (1 if experts.shared_size else 0)
    sparse = spec.hidden_size * (num_gates + 3 * experts.token_size)
    return mixing + spec.num_layers * dense + num_sparse * (sparse - dense)
