"""Measure the machine's limits (fastest matrix product, fastest read) and count a step's work.

A step takes at least the time of its arithmetic at the matrix peak. It also takes at least the time
of reading its weights once at the memory's speed. The larger one is the limit (a roofline).

Both limits can change during a benchmark. A virtual machine with two cores read 89 GB/s, and 51 a
minute later. Two cores of an EPYC read as fast on two chiplets, or on one. So the limits are
measured before and after, and the better ones count.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from quire.models.checkpoint.formats import AS_THEY_ARE, WeightFormats
from quire.models.parts.experts import ExpertList
from quire.models.parts.layers import Linear, LMHead
from quire.models.registry import make_model
from quire.ops.linear import linear
from quire.ops.weights.device_weights import Weight, pack_weight, packed_weight_bytes
from quire.ops.weights.formats import Quantization
from quire.spec.model_spec import ModelSpec

ROUNDS = 7
NUM_PIECES = 8


@dataclass(frozen=True)
class Limits:
    """Measured limits: operations per second in one dtype, and bytes read per second."""

    flops_per_s: float
    bytes_per_s: float

    def better(self, other: "Limits") -> "Limits":
        """Return the better value of each limit."""
        return Limits(
            max(self.flops_per_s, other.flops_per_s), max(self.bytes_per_s, other.bytes_per_s)
        )


@dataclass(frozen=True)
class StepCost:
    """The minimum work of a step.

    Excludes attention, norms and sampling. A mixture of experts counts one token's experts only.
    """

    layers: int  # weights (elements) that multiply each token
    head: int  # weights (elements) that multiply each sampled token
    weight_bytes: int  # bytes read once in a step that samples

    def flops(self, num_tokens: int, num_sampled: int) -> int:
        return 2 * (num_tokens * self.layers + num_sampled * self.head)

    def min_s(self, num_tokens: int, num_sampled: int, limits: Limits) -> float:
        """Return the minimum time within the machine's limits, in seconds."""
        arithmetic = self.flops(num_tokens, num_sampled) / limits.flops_per_s
        return max(arithmetic, self.weight_bytes / limits.bytes_per_s)


def step_cost(
    spec: ModelSpec, dtype: torch.dtype, formats: WeightFormats = AS_THEY_ARE
) -> StepCost:
    """Return the cost of a step, from a model without memory for weights."""
    modules = list(_counted(make_model(spec, dtype, torch.device("meta"))))
    layers = [m.weight for m in modules if isinstance(m, Linear)]
    heads = [m.weight for m in modules if isinstance(m, LMHead)]
    weight_bytes = sum(_stored_bytes(weight, formats.layers) for weight in layers)
    weight_bytes += sum(_stored_bytes(weight, formats.head) for weight in heads)
    in_layers, in_heads = (sum(each.numel() for each in group) for group in (layers, heads))
    return StepCost(in_layers, in_heads, weight_bytes)


def _counted(module: nn.Module) -> Iterator[nn.Module]:
    """Yield all modules, but only as many experts as one token uses."""
    yield module
    if isinstance(module, ExpertList):
        for experts in module.children():
            yield from itertools.islice(experts.children(), module.num_chosen)
        return
    for child in module.children():
        yield from _counted(child)


def _stored_bytes(weight: torch.Tensor, quantization: Quantization | None) -> int:
    if quantization is None:
        return weight.numel() * weight.itemsize
    return packed_weight_bytes(weight.shape, weight.dtype, torch.device("cpu"), quantization)


def measure_limits(
    dtype: torch.dtype, device: torch.device, quantization: Quantization | None = None
) -> Limits:
    """Measure both limits. This takes about a second on a small machine."""
    return Limits(gemm_flops_per_s(dtype, device, quantization), read_bytes_per_s(device))


def gemm_flops_per_s(
    dtype: torch.dtype, device: torch.device, quantization: Quantization | None = None
) -> float:
    """Measure [M, K] times [K, N], packed or not, at sizes large enough to reach the peak.

    A product and its addition count as two operations, also with quantized weights."""
    tokens, size = (1024, 2048) if device.type == "cpu" else (8192, 8192)
    x_TK = torch.randn(tokens, size, device=device).to(dtype)
    weight_NK = torch.randn(size, size, device=device).to(dtype)
    weights: list[Weight] = [weight_NK]
    if device.type == "cpu":
        weights.append(pack_weight(weight_NK, quantization))
    fastest = min(_best_s(partial(linear, x_TK, weight), device) for weight in weights)
    return 2 * tokens * size * size / fastest


def read_bytes_per_s(device: torch.device, cpu_bytes: int = 1 << 30) -> float:
    """Measure sums by all threads, over more memory than any cache holds.

    On a CPU the memory is read in pieces that take a few milliseconds. No cache still holds a piece
    when its turn comes again. The fastest piece is one without contention by other processes.
    """
    num = cpu_bytes if device.type == "cpu" else (4 << 30)
    values = torch.ones(num // 4, device=device)
    if device.type != "cpu":
        return num / _best_s(values.sum, device)
    pieces = values.view(NUM_PIECES, -1)
    fastest = min(_best_s(piece.sum, device, 1) for _ in range(ROUNDS) for piece in pieces)
    return num / NUM_PIECES / fastest


def _best_s(work: Callable[[], object], device: torch.device, rounds: int = ROUNDS) -> float:
    """Return the shortest time of several runs; the first run is a warm-up unless it is the only
    one."""
    best = float("inf")
    for round_ in range(rounds + (rounds > 1)):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if round_ > 0 or rounds == 1:
            best = min(best, time.perf_counter() - began)
    return best
