"""Cases of the piece `kernels` with quantised weights: linear layers, experts, tied embeddings.

A product must read its weight's bytes and x once, and write the result. Or it must multiply, at the
rate of 16-bit products, whatever format the weight has.
"""

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.context import Bench, Made
from benchmarks.gpu.floors import Cost
from quire.ops.weights.formats import Quantization
from quire.ops.weights.gpu_weights import GPUWeight, pack_for_gpu, quantise_for_gpu, stack_experts
from quire.ops.weights.stored_rows import Float4Rows, Float8Rows, IntegerRows

STEPS = (1, 16, 64, 256, 2048)
TINY_STEPS = (2, 9)


def random_weight(bench: Bench, outputs: int, inputs: int, form: str) -> GPUWeight:
    """Return a random weight. int8, int4 and fp8 are as `--quantization` makes them. awq is int4 in
    groups of 128 with zeros, blocks is fp8 with a scale for each 128 x 128."""
    if form in ("int8", "int4", "fp8"):
        group = {"int8": 128, "int4": 32, "fp8": 0}[form]
        return quantise_for_gpu(bench.randn(outputs, inputs), Quantization(form, group))
    device, groups = bench.device, -(-inputs // 128)
    scales = torch.rand(outputs, groups, device=device).bfloat16().float()
    if form == "mxfp4":
        codes = torch.randint(256, (outputs, inputs // 2), device=device).to(torch.uint8)
        exponents = torch.randint(118, 124, (outputs, inputs // 32), device=device)
        return pack_for_gpu(Float4Rows(codes, exponents.to(torch.uint8)), device)
    if form == "blocks":
        values = bench.randn(outputs, inputs).to(torch.float8_e4m3fn)
        return pack_for_gpu(Float8Rows(values, scales, 128), device)
    integers = torch.randint(-8, 8, (outputs, inputs), device=device).to(torch.int8)
    zeros = torch.randint(-8, 8, (outputs, groups), device=device).float()
    return pack_for_gpu(IntegerRows(integers, 4, scales, 128, zeros), device)


def product_case(bench: Bench, sizes: tuple[int, int], tokens: int, form: str) -> Made:
    """Make a product that expands codes within it."""
    from quire.ops.kernels import quantised

    (outputs, inputs), x = sizes, bench.randn(tokens, sizes[1])
    weight = random_weight(bench, outputs, inputs, form)
    moved = weight.nbytes + x.nbytes + tokens * outputs * x.element_size()
    cost = Cost(num_bytes=moved, flops=2 * tokens * outputs * inputs)
    return lambda: quantised.matmul(x, weight), cost


def rounded_case(bench: Bench, sizes: tuple[int, int], tokens: int, form: str) -> Made:
    """Make a product with activations and weight in e4m3."""
    from quire.ops.kernels import fp8_matmul

    (outputs, inputs), x = sizes, bench.randn(tokens, sizes[1])
    weight = random_weight(bench, outputs, inputs, form)
    moved = weight.nbytes + 2 * x.nbytes + tokens * outputs * x.element_size()
    cost = Cost(num_bytes=moved, flops=2 * tokens * outputs * inputs)
    return lambda: fp8_matmul.matmul(x, weight), cost


def rows_case(bench: Bench, vocab: int, size: int, tokens: int) -> Made:
    from quire.ops.kernels import quantised_rows

    weight = random_weight(bench, vocab, size, "int8")
    ids, dtype = bench.randint(vocab, tokens), bench.dtype
    cost = Cost(num_bytes=(1 + dtype.itemsize) * tokens * size)
    return lambda: quantised_rows.look_up(ids, weight, dtype), cost


def experts_case(bench: Bench, tokens: int, form: str) -> Made:
    """Make gpt-oss-20b's experts: 32 of 2880, 4 for a token."""
    from quire.ops.kernels import gate, quantised_moe

    experts, chosen, size = bench.pick(32, 6), bench.pick(4, 2), bench.pick(2880, 64)
    gate_up, down = (
        stack_experts(random_weight(bench, outputs, size, form) for _ in range(experts))
        for outputs in (2 * size, size)
    )
    scores = torch.rand(tokens, experts, device=bench.device)
    ids = scores.topk(chosen, dim=1).indices.to(torch.int32).contiguous()
    shares = torch.full(ids.shape, 1 / chosen, device=bench.device)
    x = bench.randn(tokens, size)
    hit = len(ids.unique()) / experts
    cost = Cost(
        num_bytes=hit * (gate_up.nbytes + down.nbytes) + 2 * x.nbytes,
        flops=2 * ids.numel() * 3 * size * size,
    )
    call = lambda: quantised_moe.moe_experts(  # noqa: E731
        x, ids, shares, gate_up, down, gate.silu_mul
    )
    return call, cost


def cases(is_tiny: bool) -> Iterator[tuple[str, str, Callable[[Bench], Made]]]:
    """Yield (kernel module, name, maker) of each case."""
    wide, narrow = ((130, 256), (96, 256)) if is_tiny else ((28672, 4096), (4096, 14336))
    steps = TINY_STEPS if is_tiny else STEPS
    for form in ("int4", "awq", "mxfp4", "int8", "fp8"):
        for tokens in steps:
            for outputs, inputs in (wide, narrow) if form == "int4" else (wide,):
                yield (
                    "quantised",
                    f"{form}, {outputs} x {inputs}, {tokens} tokens",
                    lambda b, s=(outputs, inputs), t=tokens, f=form: product_case(b, s, t, f),
                )
    for form in ("fp8", "blocks"):
        tokens = steps[-1]
        yield (
            "fp8_matmul",
            f"{form}, {wide[0]} x {wide[1]}, {tokens} tokens",
            lambda b, t=tokens, f=form: rounded_case(b, wide, t, f),
        )
    for tokens in (steps[0], steps[-1]):
        vocab, size = (300, 128) if is_tiny else (151936, 1024)
        yield (
            "quantised_rows",
            f"int8, {vocab} x {size}, {tokens} tokens",
            lambda b, t=tokens, v=vocab, d=size: rows_case(b, v, d, t),
        )
    for form in ("mxfp4", "int8"):
        for tokens in steps:
            yield (
                "quantised_moe",
                f"{form}, gpt-oss-20b, {tokens} tokens",
                lambda b, t=tokens, f=form: experts_case(b, t, f),
            )
