"""The least time of a step or a kernel: bytes and operations counted by formula.

No torch. A model's weights multiply each token once. Reading them and multiplying with them
overlap, so the longer of the two counts. The same holds for keys and values and attention's
products, which come after. The rest (norms, activations, sampling, launches) is small or should be
hidden.

    floor = max(weight bytes / bandwidth, 2 x parameters x tokens / rate)
          + max(KV bytes / bandwidth, attention operations / rate)
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from quire.models.outline import HEAD, LINEAR, ROUTER, outline
from quire.spec.model_spec import DTYPE_BYTES, ModelSpec

GB, TERA = 1e9, 1e12


@dataclass(frozen=True)
class Limits:
    """bytes_per_s: read and written together. flops_per_s: of 16-bit matrix products."""

    bytes_per_s: float
    flops_per_s: float
    name: str = ""


# Measured on an H200; its data sheet says 4.8 TB/s and 989 TFLOP/s.
H200 = Limits(4.3e12, 790e12, "4.3 TB/s, 790 TFLOP/s")


@dataclass(frozen=True)
class Cost:
    """num_bytes, flops: what is done first (the weights, or all of a kernel); kv_bytes, kv_flops:
    of attention, behind it."""

    num_bytes: float = 0
    flops: float = 0
    kv_bytes: float = 0
    kv_flops: float = 0

    def lower_bound_s(self, limits: Limits) -> float:
        first = max(self.num_bytes / limits.bytes_per_s, self.flops / limits.flops_per_s)
        return first + max(self.kv_bytes / limits.bytes_per_s, self.kv_flops / limits.flops_per_s)

    @property
    def all_bytes(self) -> float:
        return self.num_bytes + self.kv_bytes

    @property
    def all_flops(self) -> float:
        return self.flops + self.kv_flops


@dataclass(frozen=True)
class Weights:
    """Parameters that multiply tokens, by what decides how many are read.

    layers: by every token. head: by sampled tokens. experts: of all experts of all layers together,
    of which a token takes num_chosen of num_experts.
    """

    layers: int
    head: int
    experts: int
    num_chosen: int
    num_experts: int

    def share_of_experts_hit(self, num_tokens: int) -> float:
        """Return the expected share of experts, if tokens choose evenly and independently."""
        if self.experts == 0:
            return 0.0
        return 1.0 - (1.0 - self.num_chosen / self.num_experts) ** num_tokens

    def read(self, num_tokens: int) -> float:
        """Return the parameters that a sampling step reads."""
        return self.layers + self.head + self.experts * self.share_of_experts_hit(num_tokens)

    def multiplied(self, num_tokens: int, num_sampled: int) -> float:
        """Return the sum of parameters times tokens."""
        chosen = self.experts * self.num_chosen / max(self.num_experts, 1)
        return num_tokens * (self.layers + chosen) + num_sampled * self.head


@functools.cache  # an outline of a mixture takes most of a second
def weights_of(spec: ModelSpec) -> Weights:
    options = spec.experts
    layers = head = experts = 0
    for part in outline(spec).parts:
        count = 1
        for size in part.shape:
            count *= size
        if part.kind == HEAD:
            head += count
        elif any(".experts." in name for name in part.tensors):
            experts += count
        elif part.kind in (LINEAR, ROUTER):
            layers += count
    if options is None:
        return Weights(layers, head, 0, 0, 0)
    return Weights(layers, head, experts, options.num_chosen, options.num_experts)


def step_cost(spec: ModelSpec, rows: Sequence[tuple[int, int]], num_sampled: int = -1) -> Cost:
    """Return the cost of a step over rows (context after it, new tokens). num_sampled rows sample,
    or all if it is below 0. Raises KeyError for a dtype without a width."""
    weights, width = weights_of(spec), DTYPE_BYTES[spec.dtype]
    num_tokens = sum(new for _, new in rows)
    sampled = len(rows) if num_sampled < 0 else num_sampled
    pairs = sum(seen_pairs(context, new) for context, new in rows)
    return Cost(
        num_bytes=weights.read(num_tokens) * width,
        flops=2 * weights.multiplied(num_tokens, sampled),
        kv_bytes=sum(context for context, _ in rows) * spec.kv_bytes_per_token(width),
        kv_flops=attention_flops(pairs, spec.num_heads, spec.head_dim) * spec.num_layers,
    )


def decode_cost(spec: ModelSpec, batch: int, context: int) -> Cost:
    """Return the cost of a token for each of `batch` rows of one length."""
    return step_cost(spec, [(context, 1)] * batch)


def seen_pairs(context: int, new: int) -> int:
    """Return the number of pairs of a query and a visible key; `new` tokens end a context."""
    return new * context - new * (new - 1) // 2


def attention_flops(pairs: int, num_heads: int, head_dim: int) -> int:
    """Return the operations of q k^T and of the weighted sum of values, two for each product."""
    return 4 * pairs * num_heads * head_dim


def run_floor_s(spec: ModelSpec, lengths: Sequence[tuple[int, int]], limits: Limits) -> float:
    """Return the least time of requests (prompt, output tokens) that all run at once. Prompts run
    in steps of any size; then each step adds a token to each remaining request."""
    weights, width = weights_of(spec), DTYPE_BYTES[spec.dtype]
    prompts = step_cost(spec, [(prompt, prompt) for prompt, _ in lengths])
    total = prompts.lower_bound_s(limits)
    kv_token = spec.kv_bytes_per_token(width)
    order = sorted((output, prompt) for prompt, output in lengths)
    longest = order[-1][0] if order else 0
    ended = 0
    kv = sum(prompt for _, prompt in order)
    for step in range(1, longest):  # the first token comes from the prompt's step
        while ended < len(order) and order[ended][0] <= step:
            kv -= order[ended][1] + step - 1
            ended += 1
        rows = len(order) - ended
        kv += rows
        products = 2 * weights.multiplied(rows, rows) / limits.flops_per_s
        reading = weights.read(rows) * width / limits.bytes_per_s
        total += max(products, reading) + kv * kv_token / limits.bytes_per_s
    return total
