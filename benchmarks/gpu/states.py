"""Cases of the kernels of layers that remember a state: the short convolution, and the delta rule
token by token and in chunks.

Shape legend: T tokens, S rows with as many of them each, which begin with a state; C channels, N
value heads, D and E the sizes of their vectors.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.context import Bench, Made
from benchmarks.gpu.floors import Cost
from quire.ops.attention_inputs import DeltaHeads
from quire.ops.kernels.attention import delta_chunks, delta_rule, states

NEXT_80B = DeltaHeads(16, 32, 128, 128)  # Qwen3-Next-80B-A3B
TINY = DeltaHeads(1, 2, 16, 16)
WIDTH = 4
BLOCK_SIZE = 16

# Module, rows, tokens of each; and for a run that only sees that they work.
SHAPES = {
    "states": ((1, 1), (64, 1), (1, 2048), (8, 1024)),
    "delta_rule": ((1, 1), (8, 1), (64, 1), (256, 1), (1, 2048)),
    "delta_chunks": ((1, 64), (1, 512), (1, 2048), (1, 8192), (8, 1024)),
}
TINY_SHAPES = ((2, 1), (1, 19))


@dataclass(frozen=True)
class Layer:
    """A layer's inputs, its states, and a step over them. Each row continues from a block and
    leaves its state in the next one, or in the same if it has a token."""

    heads: DeltaHeads
    x_TC: torch.Tensor
    weight_CW: torch.Tensor
    gates_TG: torch.Tensor
    rate_N: torch.Tensor
    shift_N: torch.Tensor
    states_BZ: torch.Tensor
    step: states.StateStep

    @property
    def state_bytes(self) -> int:
        """Of a row's convolution."""
        return 4 * self.heads.channels * (WIDTH - 1)


def layer_of(bench: Bench, rows: int, tokens: int) -> Layer:
    heads = TINY if bench.is_tiny else NEXT_80B
    total, device = rows * tokens, bench.device
    dtype = bench.dtype if bench.dtype.itemsize == 2 else torch.float16
    before = BLOCK_SIZE + BLOCK_SIZE // 2
    length = -(-(before + tokens) // BLOCK_SIZE)
    tables = torch.full((rows, length), -1, dtype=torch.int32, device=device)
    order = torch.randperm(2 * rows, device=device).to(torch.int32).view(rows, 2)
    tables[:, 1], tables[:, -1] = order[:, 0], order[:, -1 if length > 2 else 0]
    size = heads.channels * (WIDTH - 1) + heads.memory_size
    return Layer(
        heads,
        bench.randn(total, heads.channels, dtype=dtype),
        bench.randn(heads.channels, WIDTH, dtype=dtype),
        bench.randn(total, 2 * heads.values, dtype=dtype),
        torch.rand(heads.values, device=device),
        bench.randn(heads.values, dtype=torch.float32),
        bench.randn(2 * rows, size, dtype=torch.float32) * 0.1,
        states.StateStep(
            torch.arange(rows + 1, dtype=torch.int32, device=device) * tokens,
            torch.full((rows,), before + tokens, dtype=torch.int32, device=device),
            tables,
            tables,
            BLOCK_SIZE,
        ),
    )


def convolve_case(bench: Bench, rows: int, tokens: int) -> Made:
    layer = layer_of(bench, rows, tokens)
    cost = Cost(num_bytes=2 * layer.x_TC.nbytes + 2 * rows * layer.state_bytes)
    given = layer.x_TC, layer.weight_CW, layer.states_BZ, layer.step
    return lambda: states.convolve(*given), cost


def delta_case(bench: Bench, rows: int, tokens: int, in_chunks: bool) -> Made:
    """Make a delta rule: each token's query, key and value once, and three products with the
    memory."""
    layer = layer_of(bench, rows, tokens)
    heads, total = layer.heads, len(layer.x_TC)
    out = layer.x_TC.new_empty(total, heads.values, heads.value_dim)
    moved = layer.x_TC.nbytes + layer.gates_TG.nbytes + out.nbytes
    cost = Cost(
        num_bytes=moved + 2 * rows * 4 * heads.memory_size, flops=6 * total * heads.memory_size
    )
    given = (
        layer.x_TC,
        layer.gates_TG,
        layer.rate_N,
        layer.shift_N,
        heads,
        layer.states_BZ,
        layer.step,
        out,
    )
    if in_chunks:
        chunks = delta_chunks.Chunks(few=0)
        return lambda: delta_chunks.delta_chunks(*given, chunks), cost
    return lambda: delta_rule.delta_rule(*given), cost


def gated_case(bench: Bench, module: str, tokens: int) -> Made:
    """Make the norm of the delta rule's output, with gates, or attention's gate. Gates are a part
    of wider rows."""
    from quire.ops.kernels import gate, norm

    heads = TINY if bench.is_tiny else NEXT_80B
    size = heads.values * heads.value_dim
    x, wide = bench.randn(tokens, size), bench.randn(tokens, 3 * size)
    cost = Cost(num_bytes=3 * x.nbytes)
    if module == "gate":
        return lambda: gate.sigmoid_mul(x, wide[:, :size]), cost
    weight = bench.randn(heads.value_dim)
    x_TNE, gate_TNE = (
        each.unflatten(1, (heads.values, heads.value_dim)) for each in (x, wide[:, size : 2 * size])
    )
    return lambda: norm.gated_norm(x_TNE, gate_TNE, weight, 1e-6), cost


def cases(is_tiny: bool) -> Iterator[tuple[str, str, Callable[[Bench], Made]]]:
    """Yield (module, name, maker) of each case."""
    for module in ("norm", "gate"):
        for tokens in (2, 9) if is_tiny else (64, 8192):
            gated = lambda b, m=module, t=tokens: gated_case(b, m, t)  # noqa: E731
            yield module, f"gates of linear layers, {tokens} tokens", gated
    for module, shapes in SHAPES.items():
        for rows, tokens in TINY_SHAPES if is_tiny else shapes:
            name = f"{rows} rows of {tokens} tokens"
            if module == "states":
                make = lambda b, r=rows, t=tokens: convolve_case(b, r, t)  # noqa: E731
            else:
                chunks = module == "delta_chunks"
                make = lambda b, r=rows, t=tokens, c=chunks: delta_case(b, r, t, c)  # noqa: E731
            yield module, name, make
