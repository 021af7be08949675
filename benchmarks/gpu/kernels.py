"""Piece `kernels`: every module of `quire.ops.kernels` alone, at the shapes of real models.

A case makes its tensors and gives the minimum of reads, writes and products. Repeated reads of a
kernel lower its share. Attention has pieces of its own.

Shape legend: T tokens, R rows, D model dim, F feed-forward dim, N query heads, K KV heads, H head
dim, V vocabulary, B blocks, E experts, C chosen experts.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu import few_rows, quantised, row_state, states
from benchmarks.gpu.context import Bench, Made
from benchmarks.gpu.floors import Cost
from benchmarks.gpu.report import timed_row

# Modules without a case here, and why.
ELSEWHERE = {
    "attention": "the pieces attention, paged and rivals",
    "attention_merge": "a part of attention's launches",
    "attention_plan": "one launch a step; it is in the engine's steps",
    "attention_tiles": "no kernel of its own",
    "draft_runs": "the piece guesses: one launch of a step that guesses",
    "latent": "no piece has a model with latent attention",
    "launch": "no kernel of its own",
    "rotary_attention": "behind a switch, which no piece turns on",
    "tiles": "no kernel of its own",
    "sampling_filtered": "parts of sampling's launches",
    "sampling_scan": "parts of sampling's launches",
    "verify": "two launches of a step with draft tokens; it is in the piece guesses",
}


@dataclass(frozen=True)
class Model:
    """Sizes of one architecture."""

    name: str
    size: int  # D
    inner: int  # F, of one expert in a mixture
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 128
    has_norm: bool = False  # of queries and keys
    layers: int = 32


LLAMA = Model("Llama-3.1-8B", 4096, 14336, 32, 8, 128256)
QWEN = Model("Qwen3-0.6B", 1024, 3072, 16, 8, 151936, has_norm=True, layers=28)
MIXTURE = Model("Qwen3-30B-A3B", 2048, 768, 32, 4, 151936, has_norm=True, layers=48)
TINY = Model("tiny", 64, 48, 4, 2, 300, head_dim=16, has_norm=True, layers=2)
EXPERTS, CHOSEN = 128, 8


@dataclass(frozen=True)
class KernelCase:
    """make: tensors on the bench's device, the call that is timed, and what it costs at least."""

    module: str
    name: str
    make: Callable[[Bench], Made]


def norm_case(bench: Bench, model: Model, tokens: int) -> Made:
    from quire.ops.kernels import norm

    x, residual = (bench.randn(tokens, model.size) for _ in range(2))
    weight = bench.randn(model.size)
    # x and the residual in, the sum and the result out.
    cost = Cost(num_bytes=4 * x.nbytes + weight.nbytes)
    return lambda: norm.add_rms_norm(x, residual, weight, 1e-5), cost


def silu_case(bench: Bench, model: Model, tokens: int) -> Made:
    from quire.ops.kernels import gate

    x = bench.randn(tokens, 2 * model.inner)
    return lambda: gate.silu_mul(x), Cost(num_bytes=1.5 * x.nbytes)


def embedding_case(bench: Bench, model: Model, tokens: int) -> Made:
    from quire.ops.kernels import embedding

    table = bench.randn(model.vocab, model.size)
    ids = bench.randint(model.vocab, tokens)
    rows = tokens * model.size * table.element_size()
    return lambda: embedding.embedding(ids, table), Cost(num_bytes=2 * rows + ids.nbytes)


def rotary_case(bench: Bench, model: Model, tokens: int) -> Made:
    from quire.ops.kernels.attention import rotary_write
    from quire.ops.rotary import rotary_rows

    heads, kv_heads, size = model.heads, model.kv_heads, model.head_dim
    qkv = bench.randn(tokens, heads + 2 * kv_heads, size)
    num_blocks = -(-tokens // 16) * 2
    kv = torch.zeros(2, kv_heads, num_blocks, 16, size, dtype=bench.dtype, device=bench.device)
    slots = torch.randperm(num_blocks * 16, device=bench.device)[:tokens].contiguous()
    frequencies = torch.rand(size // 2, dtype=torch.float64, device=bench.device)
    rows = rotary_rows(bench.randint(4096, tokens), frequencies, 1.0, bench.dtype)
    weight = bench.randn(heads + kv_heads, size) if model.has_norm else None
    cost = Cost(num_bytes=2 * qkv.nbytes + rows.nbytes + slots.nbytes)
    return lambda: rotary_write.rotary_write(qkv, rows, slots, kv, weight, 1e-6), cost


def factors_case(bench: Bench, model: Model, tokens: int) -> Made:
    from quire.ops.kernels import rotary_rows

    positions = bench.randint(4096, tokens)
    frequencies = torch.rand(model.head_dim // 2, dtype=torch.float64, device=bench.device)
    cost = Cost(num_bytes=tokens * 2 * model.head_dim * 4 + positions.nbytes)
    return lambda: rotary_rows.rotary_rows(positions, frequencies, 1.0), cost


def write_case(bench: Bench, model: Model, tokens: int) -> Made:
    from quire.ops.kernels.attention import attention_write

    k, v = (bench.randn(tokens, model.kv_heads, model.head_dim) for _ in range(2))
    num_blocks = -(-tokens // 16)
    kv = torch.zeros(
        2, model.kv_heads, num_blocks, 16, model.head_dim, dtype=bench.dtype, device=bench.device
    )
    slots = torch.randperm(num_blocks * 16, device=bench.device)[:tokens].contiguous()
    layer = attention_write.layer_kv(kv, "auto")
    cost = Cost(num_bytes=2 * (k.nbytes + v.nbytes) + slots.nbytes)
    return lambda: attention_write.write_kv(layer, k, v, slots), cost


def blocks_case(bench: Bench, model: Model, count: int, which: str) -> Made:
    from quire.ops.kernels.attention import blocks

    total = 2 * count + 8
    shape = (2, model.layers, model.kv_heads, total, 16, model.head_dim)
    kv = torch.zeros(shape, dtype=bench.dtype, device=bench.device)
    ids = torch.randperm(total, device=bench.device).to(torch.int32)
    source, to = ids[:count].contiguous(), ids[count : 2 * count].contiguous()
    cost = Cost(num_bytes=2 * kv.nbytes // total * count)
    if which == "copy":
        pairs = torch.stack((source, to)).contiguous()
        return lambda: blocks.copy_blocks(kv, pairs), cost
    if which == "gather":
        return lambda: blocks.gather_blocks(kv, source), cost
    values = blocks.gather_blocks(kv, source)
    return lambda: blocks.scatter_blocks(kv, to, values), cost


def sampling_case(bench: Bench, model: Model, rows: int, which: str) -> Made:
    from quire.ops.kernels.sampling import sampling

    logits = bench.randn(rows, model.vocab) * 3
    filtered = which == "filtered"
    column = torch.ones(rows, device=bench.device)
    whole = torch.zeros(rows, dtype=torch.int64, device=bench.device)
    columns = sampling.SamplingColumns(
        temperature=column * (0.0 if which == "greedy" else 0.8),
        top_k=whole + (50 if filtered else 0),
        top_p=column * (0.9 if filtered else 1.0),
        min_p=column * 0.0,
        seeds=whole + 1,
        sample_index=whole,
    )
    positions = whole + 100
    call = lambda: sampling.sample(logits, columns, positions, has_filters=filtered)  # noqa: E731
    return call, Cost(num_bytes=logits.nbytes)


def edits_case(bench: Bench, model: Model, rows: int) -> Made:
    from quire.ops.kernels.sampling import sampling_edits as kernel
    from quire.ops.sampling.logit_edits import RowEdits, make_edit_table

    logits = bench.randn(rows, model.vocab)
    tokens = bench.randint(model.vocab, rows, 64, dtype=torch.int32)
    edits = RowEdits(bad_words=[[5], [7, 9]], min_tokens=8, stop_token_ids=[3], bias={4: 1.0})
    table = make_edit_table([edits], bench.device)
    slots = torch.zeros(rows, dtype=torch.int32, device=bench.device)
    which = torch.arange(rows, device=bench.device)
    lengths = torch.full_like(which, 60)
    cost = Cost(num_bytes=logits.nbytes + 4 * logits.numel())
    return lambda: kernel.edit_logits(logits, table, slots, tokens, which, lengths, lengths), cost


def mask_case(bench: Bench, model: Model, rows: int) -> Made:
    """Make masks that forbid nearly everything, as JSON's masks do."""
    from quire.ops.kernels.sampling import mask as kernel
    from quire.ops.sampling.logit_edits import RowMasks, num_words

    logits = bench.randn(rows, model.vocab)
    words = torch.zeros(rows, num_words(model.vocab), dtype=torch.int32, device=bench.device)
    words[:, 0] = 1
    row_indices = torch.arange(rows, dtype=torch.int32, device=bench.device)
    masks = RowMasks(row_indices, words)
    return lambda: kernel.apply_masks(logits, masks), Cost(num_bytes=logits.nbytes + words.nbytes)


def penalties_case(bench: Bench, model: Model, rows: int, length: int) -> Made:
    """Make penalties. All positions are read; counts and logits of present tokens change."""
    from quire.ops.kernels.sampling import penalties as kernel
    from quire.ops.sampling.penalties import Penalties

    logits = bench.randn(rows, model.vocab, dtype=torch.float32)
    tokens = bench.randint(model.vocab, rows, length, dtype=torch.int32)
    which = torch.arange(rows, device=bench.device)
    lengths = torch.full_like(which, length)
    counts = torch.zeros(rows, model.vocab, dtype=torch.int32, device=bench.device)
    column = torch.ones(rows, device=bench.device)
    penalty_params = Penalties(column * 0.1, column * 0.1, column)
    call = lambda: kernel.apply_penalties(  # noqa: E731
        logits, which, tokens, lengths, lengths // 2, penalty_params, None, counts
    )
    return call, Cost(num_bytes=tokens.nbytes + rows * length * (4 * 4))


def logprobs_case(bench: Bench, model: Model, rows: int) -> Made:
    from quire.ops.kernels.sampling import logprobs

    logits = bench.randn(rows, model.vocab)
    chosen = bench.randint(model.vocab, rows)
    return lambda: logprobs.token_logprobs(logits, chosen, 5), Cost(num_bytes=logits.nbytes)


def philox_case(bench: Bench, model: Model, rows: int) -> Made:
    from quire.ops.kernels.sampling import philox

    streams = [torch.arange(rows, device=bench.device) for _ in range(3)]
    return lambda: philox.uniform(*streams, model.vocab), Cost(num_bytes=4 * rows * model.vocab)


def matmul_case(bench: Bench, model: Model, tokens: int) -> Made:
    """Make the products of `--deterministic`, of a layer's gate and up."""
    from quire.ops.kernels import matmul

    x, weight = bench.randn(tokens, model.size), bench.randn(2 * model.inner, model.size)
    out_bytes = tokens * 2 * model.inner * x.element_size()
    cost = Cost(num_bytes=x.nbytes + weight.nbytes + out_bytes, flops=2 * tokens * weight.numel())
    return lambda: matmul.matmul(x, weight), cost


def route_case(bench: Bench, tokens: int) -> Made:
    from quire.ops.kernels import moe

    logits = bench.randn(tokens, EXPERTS)
    cost = Cost(num_bytes=logits.nbytes + tokens * CHOSEN * 8)
    return lambda: moe.moe_route(logits, CHOSEN, True), cost


def sort_case(bench: Bench, tokens: int) -> Made:
    from quire.ops.kernels import moe_sort

    ids = chosen_experts(bench, tokens, EXPERTS)
    return lambda: moe_sort.sort_by_expert(ids, EXPERTS, 64), Cost(num_bytes=2 * ids.nbytes)


def chosen_experts(bench: Bench, tokens: int, experts: int) -> torch.Tensor:
    """Return experts chosen evenly and independently, without repeats for a token: int32 [T, C]."""
    scores = torch.rand(tokens, experts, device=bench.device)
    return scores.topk(min(CHOSEN, experts), dim=1).indices.to(torch.int32).contiguous()


def experts_case(bench: Bench, model: Model, tokens: int) -> Made:
    """Make both products of one layer; the weights of the chosen experts are read once."""
    from quire.ops.kernels import moe

    num_experts = bench.pick(EXPERTS, 16)
    gate_up = bench.randn(num_experts, 2 * model.inner, model.size) * 0.02
    down = bench.randn(num_experts, model.size, model.inner) * 0.02
    x, ids = bench.randn(tokens, model.size), chosen_experts(bench, tokens, num_experts)
    weights = torch.full(ids.shape, 1 / CHOSEN, device=bench.device)
    hit = len(ids.unique())
    each = 3 * model.inner * model.size
    cost = Cost(
        num_bytes=hit * each * x.element_size() + 2 * x.nbytes, flops=2 * ids.numel() * each
    )
    return lambda: moe.moe_experts(x, ids, weights, gate_up, down), cost


def adapters_case(bench: Bench, model: Model, rows: int, rank: int) -> Made:
    """Make both launches of a layer's gate and up, for rows of which each has another adapter."""
    from quire.ops.adapters import AdapterPart, LayerSize
    from quire.runner.gpu.adapters import DeviceSlots

    layer, count = LayerSize(model.size, (model.inner, model.inner), True), min(rows, 8)
    slots = DeviceSlots(count, [layer], rank, bench.dtype, bench.device, rows)
    ups = [bench.randn(rank, 2 * model.inner).cpu() for _ in range(count)]
    down = bench.randn(rank, model.size).cpu() * 0.02
    for slot, up in enumerate(ups):
        halves = enumerate(up.split(model.inner, dim=1))
        parts = [AdapterPart(i * model.inner, down, half, 1.0) for i, half in halves]
        slots.put(slot, slots.prepare({0: parts}))
    slots.set_rows(np.arange(rows, dtype=np.int32) % count)
    slots.group(torch.arange(rows + 1, dtype=torch.int32, device=bench.device), rows)
    x, out = bench.randn(rows, model.size), bench.randn(rows, 2 * model.inner)
    numbers = rank * 2 * (model.size + model.inner)
    num_bytes = count * numbers * x.element_size() + x.nbytes + 2 * out.nbytes
    cost = Cost(num_bytes=num_bytes, flops=2 * rows * numbers)
    return lambda: slots.add(out, x, 0), cost


def cases(is_tiny: bool) -> Iterator[KernelCase]:
    """Yield all cases; is_tiny: few and small, to test them."""
    models = [TINY] if is_tiny else [LLAMA, QWEN]
    mixture = TINY if is_tiny else MIXTURE
    steps = (2, 9) if is_tiny else (256, 8192)
    for model in models:
        for tokens in steps:
            for module, make in (
                ("norm", norm_case),
                ("gate", silu_case),
                ("rotary_rows", factors_case),
                ("rotary_write", rotary_case),
                ("embedding", embedding_case),
                ("attention_write", write_case),
            ):
                name = f"{model.name}, {tokens} tokens"
                yield KernelCase(module, name, lambda b, m=model, t=tokens, f=make: f(b, m, t))
    for tokens in (1, 6) if is_tiny else (1, 4, 32, 256, 2048, 8192):
        name = f"{mixture.name}, {tokens} tokens"
        yield KernelCase("moe", f"experts, {name}", lambda b, t=tokens: experts_case(b, mixture, t))
    for tokens in steps:
        yield KernelCase("moe", f"route, {tokens} tokens", lambda b, t=tokens: route_case(b, t))
        yield KernelCase("moe_sort", f"{tokens} tokens", lambda b, t=tokens: sort_case(b, t))
    if importlib.util.find_spec("quire.ops.kernels.matmul") is not None:
        for tokens in (2, 9) if is_tiny else (1, 32, 256, 2048):
            name = f"{models[0].name}, {tokens} tokens"
            yield KernelCase("matmul", name, lambda b, t=tokens: matmul_case(b, models[0], t))
    for rows, rank in ((3, 2),) if is_tiny else ((1, 16), (64, 16), (2048, 16), (64, 256)):
        name = f"{models[0].name}, {rows} rows of rank {rank}"
        yield KernelCase(
            "adapters", name, lambda b, n=rows, r=rank: adapters_case(b, models[0], n, r)
        )
    yield from (KernelCase(*each) for each in few_rows.cases(is_tiny))
    yield from (KernelCase(*each) for each in quantised.cases(is_tiny))
    yield from (KernelCase(*each) for each in states.cases(is_tiny))
    yield from _sampling_cases(models[-1], 2 if is_tiny else 256)
    rows = 2 if is_tiny else 256
    for (module, which), make in row_state.CASES.items():
        yield KernelCase(module, f"{which}, {rows} rows", lambda b, f=make: f(b, rows))
    for which in ("copy", "gather", "scatter"):
        count = 2 if is_tiny else 64
        name = f"{which}, {models[0].name}, {count} blocks"
        yield KernelCase(
            "blocks", name, lambda b, w=which, n=count: blocks_case(b, models[0], n, w)
        )


def _sampling_cases(model: Model, rows: int) -> Iterator[KernelCase]:
    name = f"{model.name}, {rows} rows"
    for which in ("greedy", "random", "filtered"):
        yield KernelCase(
            "sampling", f"{which}, {name}", lambda b, w=which: sampling_case(b, model, rows, w)
        )
    yield KernelCase("sampling_edits", name, lambda b: edits_case(b, model, rows))
    yield KernelCase("mask", name, lambda b: mask_case(b, model, rows))
    length = 2048 if rows > 2 else 20
    yield KernelCase(
        "penalties", f"{name} of {length}", lambda b: penalties_case(b, model, rows, length)
    )
    yield KernelCase("logprobs", f"{name}, 5 best", lambda b: logprobs_case(b, model, rows))
    yield KernelCase("philox", name, lambda b: philox_case(b, model, rows))


def measure(bench: Bench, case: KernelCase) -> None:
    """Measure one row of the table."""
    call, cost = case.make(bench)
    took = bench.time(call)
    name = f"{case.module}: {case.name}"
    bench.report.add(timed_row(name, took.cold_s, cost, bench.measured, detail=took.detail))


def run(bench: Bench) -> None:
    """Measure all cases, one after the other."""
    for case in cases(bench.is_tiny):
        bench.attempt(f"{case.module}: {case.name}", lambda c=case: measure(bench, c))
