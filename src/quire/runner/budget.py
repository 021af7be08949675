"""How many tokens a step may have on a CPU, so that nobody who decodes waits long for a prefill.

Derived from shapes and the number of threads alone, not measured: chunks are cut in the same places
in every run, so rounding is the same too.
"""

from quire.base.model_spec import ModelSpec

STEP_S = 0.25
MOST_TOKENS = 256
FEWEST_TOKENS = 64  # below this, matrix products lose more than latency gains
GEMM_FLOPS_PER_THREAD = {"bfloat16": 5e11, "float32": 1e11, "float64": 5e10}


def cpu_token_budget(spec: ModelSpec, dtype: str, num_threads: int) -> int:
    """Tokens that this many threads compute in about a quarter of a second: a multiple of 16
    between 64 and 256."""
    rate = GEMM_FLOPS_PER_THREAD.get(dtype, 1e11) * num_threads
    tokens = int(STEP_S * rate / (2 * linear_parameters(spec)))
    return min(MOST_TOKENS, max(FEWEST_TOKENS, tokens // 16 * 16))


def linear_parameters(spec: ModelSpec) -> int:
    """Weights that each token is multiplied with, head and embedding aside."""
    attention = spec.hidden_size * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
    dense, experts = 3 * spec.hidden_size * spec.intermediate_size, spec.experts
    if experts is None:
        return spec.num_layers * (attention + dense)
    num_sparse = sum(experts.is_sparse(layer) for layer in range(spec.num_layers))
    sparse = spec.hidden_size * (experts.num_experts + 3 * experts.num_chosen * experts.inner_size)
    return spec.num_layers * (attention + dense) + num_sparse * (sparse - dense)
