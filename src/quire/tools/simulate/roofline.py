"""Estimate a model's step times on an absent device, from its shape and the device's data sheet.

A step takes at least the time of a roofline, and in practice more. The shares of the peak rates
that steps reach are assumed to be the same for all devices. With access to the device, measure them
instead (`quire bench calibrate`).
"""

from dataclasses import dataclass

import torch

from quire.base.errors import ConfigError
from quire.models.checkpoint.formats import weight_formats
from quire.runner.memory_plan import block_bytes_of
from quire.spec.cache_group import STATE
from quire.spec.model_spec import DTYPE_BYTES, ModelSpec
from quire.tools.devices import CPU, SPEEDS, Speed
from quire.tools.limits import Limits, StepCost, measure_limits, step_cost
from quire.tools.sizing.fit import Fit
from quire.tools.step_times import Attention, Roofline

MEMORY_SHARE = 0.85  # share of the memory's peak bytes per second
FLOPS_SHARE = 0.55  # share of the peak operations per second, for products of many rows
ATTENTION_SHARE = 0.4  # share of the peak operations per second, for attention
COPY_SHARE = 0.8  # share of a link's peak bytes per second
GPU_STEP_S, CPU_STEP_S = 300e-6, 200e-6  # fixed time of a step
EXCHANGE_S = 8e-6  # latency of a sum over several devices
SUMS_PER_LAYER = 2  # after attention, and after the feed-forward layer
CPU_COPY_BYTES_PER_S = 4e9


@dataclass(frozen=True)
class Rates:
    """The rates that steps reach, per second."""

    flops: float  # operations in matrix products
    attention: float  # operations in attention
    memory: float  # bytes of the memory
    host: float  # bytes over the link to the host
    peers: float  # bytes over the links to other devices

    @classmethod
    def of_gpu(cls, speed: Speed, is_in_8: bool) -> "Rates":
        flops = speed.flops_8 if is_in_8 else speed.flops_16
        return cls(
            FLOPS_SHARE * flops,
            ATTENTION_SHARE * speed.flops_16,
            MEMORY_SHARE * speed.memory,
            COPY_SHARE * speed.host,
            COPY_SHARE * speed.peers,
        )

    @classmethod
    def of_cpu(cls, limits: Limits) -> "Rates":
        """Return the rates measured on this machine."""
        memory = limits.bytes_per_s
        return cls(limits.flops_per_s, limits.flops_per_s, memory, CPU_COPY_BYTES_PER_S, memory)


def roofline_of(found: Fit) -> Roofline:
    """Return a model's step times on its device, or on the devices that share each layer.

    Raises ConfigError for a device without a data sheet."""
    model = found.config.model
    formats, dtype = weight_formats(model), getattr(torch, model.dtype)
    if found.device.kind == CPU:
        rates = Rates.of_cpu(measure_limits(dtype, torch.device("cpu"), formats.layers))
    else:
        rates = Rates.of_gpu(_speed_of(found), model.quantization in ("fp8", "int8"))
    return roofline(found, step_cost(found.spec, dtype, formats), rates)


def roofline(found: Fit, cost: StepCost, rates: Rates) -> Roofline:
    """Return step times from a step's cost and the device's rates. cost: of the whole model."""
    num_ranks = found.config.parallel.tensor_parallel_size
    spec, on_cpu = found.spec.of_ranks(num_ranks), found.device.kind == CPU
    token_bytes = spec.hidden_size * DTYPE_BYTES[found.config.model.dtype]
    sums = SUMS_PER_LAYER * spec.num_layers if num_ranks > 1 else 0
    per_sum = 2 * (num_ranks - 1) / num_ranks * token_bytes / rates.peers
    share = 1 / num_ranks
    head_s = 2 * cost.head * share / rates.flops
    weights_s, expert_s, chosen = _reading(found.spec, cost, rates.memory * num_ranks)
    return Roofline(
        weights_s=weights_s,
        token_s=2 * cost.layers * share / rates.flops + sums * per_sum,
        attention=tuple(_attention(found, spec, rates)),
        copy_s=sum(block_bytes_of(found.config, spec)) / rates.host,
        sample_s=head_s,
        fixed_s=(CPU_STEP_S if on_cpu else GPU_STEP_S) + sums * EXCHANGE_S,
        expert_s=expert_s,
        chosen=chosen,
        copy_bytes_per_s=rates.host,
    )


def _reading(spec: ModelSpec, cost: StepCost, bytes_per_s: float) -> tuple[float, float, float]:
    """Return three values: seconds to read the weights that all tokens use, seconds to read all
    experts, and the share of experts per token. `cost` counts one token's experts."""
    experts, total_s = spec.experts, cost.weight_bytes / bytes_per_s
    if experts is None:
        return total_s, 0.0, 1.0
    num_sparse = sum(experts.is_sparse(layer) for layer in range(spec.num_layers))
    elements = num_sparse * 3 * spec.hidden_size * experts.num_chosen * experts.inner_size
    of_token_s = total_s * elements / (cost.layers + cost.head)
    chosen = experts.num_chosen / experts.num_experts
    return total_s - of_token_s, of_token_s / chosen, chosen


def _attention(found: Fit, spec: ModelSpec, rates: Rates) -> list[Attention]:
    """Return the cost of attention by window.

    Layers with linear attention are omitted, as reading their state takes little time."""
    size = found.config.cache.block_size
    parts = []
    for group, fit in zip(spec.cache_groups, found.groups, strict=True):
        if group.kind == STATE:
            continue
        products = 4 * len(group.layers) * spec.num_heads * spec.head_dim
        context_s = fit.block_bytes / size / rates.memory
        parts.append(Attention(context_s, products / rates.attention, group.window))
    return parts


def _speed_of(found: Fit) -> Speed:
    speed = SPEEDS.get(found.device.name)
    if speed is None:
        raise ConfigError(
            f"the speed of {found.device.name} is not known: choose a device of"
            f" {', '.join(SPEEDS)}, or give step times measured there with --fit."
        )
    return speed
