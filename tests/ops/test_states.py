"""Compare layers with states, in all backends, with loops over whole sequences in float64.

Covers `ops/attention/core_states.py` and `ops/attention/states.py`.
"""

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from quire.base.errors import ConfigError
from quire.ops.attention.base import AttentionBackend, KVLayout
from quire.ops.attention.cpu import CpuBackend, variants
from quire.ops.attention.reference import ReferenceBackend
from quire.ops.attention.states import RecordedInputs
from quire.ops.attention.torch_cpu import TorchBackend
from quire.ops.attention.traced import TracedAttention
from quire.ops.attention_inputs import AttentionStep, DeltaHeads
from quire.ops.host.threads import set_num_threads
from quire.spec.cache_group import STATE, CacheGroup
from tests.support.cases import pairwise, slow_but

CPU = torch.device("cpu")
P = 4  # tokens of a block
HEADS = DeltaHeads(keys=2, values=4, key_dim=8, value_dim=6)
WIDTH = 4
NUM_BLOCKS = 64
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def layout_of(dtype: torch.dtype, heads: DeltaHeads = HEADS, width: int = WIDTH) -> KVLayout:
    size = heads.channels * (width - 1) + heads.memory_size
    group = CacheGroup(STATE, (0, 1), state_size=size)
    return KVLayout((group,), (NUM_BLOCKS,), P, dtype, CPU)


def step_of(rows: Sequence[tuple[int, int, list[int]]]) -> AttentionStep:
    """Return a step. rows: tokens before the step, tokens in it, and the row's table."""
    lens = np.array([count for _, count, _ in rows], np.int32)
    contexts = np.array([before + count for before, count, _ in rows], np.int32)
    longest = max(len(table) for *_, table in rows)
    tables = [table + [-1] * (longest - len(table)) for *_, table in rows]
    total = int(lens.sum())
    return AttentionStep(
        torch.zeros(total, dtype=torch.int64),
        torch.from_numpy(np.concatenate(([0], np.cumsum(lens))).astype(np.int32)),
        torch.from_numpy(contexts),
        (torch.full((total,), -1),),
        (torch.tensor(tables, dtype=torch.int32),),
        lens,
        contexts,
    )


class Inputs:
    """A layer's inputs for one sequence, and the expected outputs by loops in float64.

    With each output comes the units of rounding (eps / 2) that sums in a narrower type may be off.
    """

    def __init__(
        self, seed: int, length: int, heads: DeltaHeads, dtype: torch.dtype, width: int = WIDTH
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        shared = torch.Generator().manual_seed(7)
        self.heads = heads
        self.x = torch.randn(length, heads.channels, generator=draw).to(dtype)
        self.gates = torch.randn(length, 2 * heads.values, generator=draw).to(dtype)
        self.weight = torch.randn(heads.channels, width, generator=shared).to(dtype)
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        self.rate = torch.rand(heads.values, generator=shared).to(sums) + 0.1
        self.shift = torch.randn(heads.values, generator=shared).to(sums)

    def convolved(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Each of the W products and sums is off by less than a unit of the sum of magnitudes. The
        slope of SiLU is below 1.1, and its exponential is off by 4 units."""
        x, weight = self.x.double(), self.weight.double()
        width = weight.shape[1]
        padded = torch.cat([torch.zeros(width - 1, x.shape[1], dtype=x.dtype), x])
        terms = torch.stack([weight[:, w] * padded[w : w + len(x)] for w in range(width)])
        return F.silu(terms.sum(0)), (2.2 * width + 8) * terms.abs().sum(0)

    def remembered(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the delta rule to x itself as queries, keys and values.

        A column of the memory is M' = (1 - b k k^T) g M + b k v with b, g and |k| at most 1.
        So earlier errors do not grow. A step adds at most u (D for each dot product and each norm,
        and some for the gates) times g |M| + |v|.
        """
        heads, x, gates = self.heads, self.x.double(), self.gates.double()
        size, times = heads.keys * heads.key_dim, heads.values // heads.keys
        out = torch.zeros(len(x), heads.values, heads.value_dim, dtype=torch.float64)
        bound = torch.zeros_like(out)
        memory = torch.zeros(heads.values, heads.key_dim, heads.value_dim, dtype=torch.float64)
        off = torch.zeros_like(out[0])
        for t, row in enumerate(x):
            for n in range(heads.values):
                at = n // times * heads.key_dim
                q, k = row[at : at + heads.key_dim], row[size + at : size + at + heads.key_dim]
                v = row[2 * size + n * heads.value_dim :][: heads.value_dim]
                q = q / (q.square().sum() + 1e-6).sqrt() / heads.key_dim**0.5
                k = k / (k.square().sum() + 1e-6).sqrt()
                time = gates[t, heads.values + n] + self.shift[n].double()
                decay = torch.exp(-self.rate[n].double() * F.softplus(time))
                step = (4 * heads.key_dim + 100) * (decay * memory[n].norm(dim=0) + v.abs())
                memory[n] *= decay
                memory[n] += torch.outer(k, gates[t, n].sigmoid() * (v - memory[n].T @ k))
                off[n] = decay * off[n] + step
                out[t, n] = memory[n].T @ q
                bound[t, n] = (off[n] + step) * q.norm()
        return out, bound


def projected(parts: Sequence[tuple[Inputs, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens of several sequences, as views of wider rows."""
    x = torch.cat([each.x[first:end] for each, first, end in parts])
    gates = torch.cat([each.gates[first:end] for each, first, end in parts])
    other = torch.full((len(x), 5), torch.nan, dtype=x.dtype)
    rows = torch.cat([other, x, other, gates], dim=1)
    width = x.shape[1]
    return rows[:, 5 : 5 + width], rows[:, 10 + width :]


def assert_within(
    made: torch.Tensor, wanted: tuple[torch.Tensor, torch.Tensor], times: float = 1.0
) -> None:
    """Check `made`, which has sums in float32 and was rounded to its dtype."""
    exact, units = wanted
    kind = torch.finfo(made.dtype)
    rounding = exact.abs().clamp(min=kind.smallest_normal) * kind.eps / 2
    bound = times * (units * 2**-24 * 1.01 + rounding)
    assert ((made.double() - exact).abs() <= bound).all()


def run(
    backend: AttentionBackend,
    inputs: Sequence[Inputs],
    layer: int,
    seed: int,
    max_tokens: int = 3 * P,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Compute sequences in steps of up to `max_tokens` tokens each, with random snapshots.

    After some steps a sequence rewinds to a snapshot and computes the rest again.
    """
    choose = random.Random(seed)
    free = list(range(NUM_BLOCKS))
    choose.shuffle(free)
    done = [0] * len(inputs)
    tables: list[list[int]] = [[] for _ in inputs]
    made: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in inputs]
    while any(count < len(each.x) for count, each in zip(done, inputs, strict=True)):
        rows, parts = [], []
        for i, each in enumerate(inputs):
            left = len(each.x) - done[i]
            count = choose.randint(0, min(left, max_tokens))
            if count == 0:
                continue
            table = tables[i]
            last = (done[i] + count - 1) // P
            for index in range(len(table), last + 1):
                wanted = index == last or choose.random() < 0.5
                table.append(free.pop() if wanted else -1)
            rows.append((done[i], count, list(table)))
            parts.append((i, done[i], done[i] + count))
        if not rows:
            continue
        backend.prepare(step_of(rows))
        one = inputs[0]
        x, gates = projected([(inputs[i], first, end) for i, first, end in parts])
        convolved = backend.convolve(layer, x, one.weight)
        out = backend.delta_rule(layer, x, gates, one.rate, one.shift, one.heads)
        at = 0
        for i, first, end in parts:
            made[i] = made[i][:first]
            made[i] += zip(convolved[at:], out[at:], strict=True)
            made[i] = made[i][:end]
            at += end - first
            done[i] = end
            recorded = [k for k, block in enumerate(tables[i]) if block >= 0 and (k + 1) * P <= end]
            if recorded and choose.random() < 0.2:
                back = choose.choice(recorded)
                free += [block for block in tables[i][back + 1 :] if block >= 0]
                del tables[i][back + 1 :]
                done[i] = (back + 1) * P
    return [(torch.stack([c for c, _ in each]), torch.stack([o for _, o in each])) for each in made]


def run_drafting(
    backend: AttentionBackend, inputs: Sequence[Inputs], seed: int, max_tokens: int = 2 * P
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Compute sequences in steps of up to `max_tokens` tokens each.

    The last tokens of some rows are wrong drafts, which are rejected.
    """
    choose, one = random.Random(seed), inputs[0]
    nothing = Inputs(seed + 99, max_tokens, one.heads, one.x.dtype)
    tables = [list(range(i, NUM_BLOCKS, len(inputs))) for i in range(len(inputs))]
    done = [0] * len(inputs)
    made: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in inputs]
    while alive := [i for i, each in enumerate(inputs) if done[i] < len(each.x)]:
        rows, parts, has_drafts, counts = [], [], [], []
        for i in alive:
            num = choose.randint(1, min(max_tokens, len(inputs[i].x) - done[i]))
            wrong = choose.choice([0, 0, choose.randint(0, max_tokens)])
            rows.append((done[i], num + wrong, tables[i]))
            parts += [(inputs[i], done[i], done[i] + num), (nothing, 0, wrong)]
            has_drafts.append(wrong > 0)
            counts.append(num)
        recorded = RecordedInputs(backend, np.array(has_drafts))
        recorded.prepare(step_of(rows))
        x, gates = projected(parts)
        convolved = recorded.convolve(0, x, one.weight)
        out = recorded.delta_rule(0, convolved, gates, one.rate, one.shift, one.heads)
        right = np.array(counts, np.int32)[np.array(has_drafts)]
        if len(right):
            recorded.settle(right)
        at = 0
        for i, num, (_, width, _) in zip(alive, counts, rows, strict=True):
            made[i] += zip(convolved[at : at + num], out[at : at + num], strict=True)
            done[i] += num
            at += width
    return [(torch.stack([c for c, _ in each]), torch.stack([o for _, o in each])) for each in made]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("backend", [ReferenceBackend, TorchBackend])
def test_rejected_drafts_leave_no_states(
    backend: type[ReferenceBackend] | type[TorchBackend], seed: int
) -> None:
    inputs = [Inputs(seed * 10 + i, 23 + 5 * i, HEADS, torch.float64) for i in range(3)]
    plain, other = (backend(layout_of(torch.float64)) for _ in range(2))
    alone = [at_once(plain, each, is_layer=True) for each in inputs]
    for one, made in zip(alone, run_drafting(other, inputs, seed), strict=True):
        torch.testing.assert_close(made[0], one[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(made[1], one[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_core_has_the_same_bits_after_rejected_drafts(dtype: torch.dtype, variant: str) -> None:
    inputs = [Inputs(i, 33 + 5 * i, HEADS, dtype) for i in range(3)]
    backends = [CpuBackend(layout_of(dtype), variant=variant) for _ in range(4)]
    alone = [at_once(backends[0], each, is_layer=True) for each in inputs]
    for seed, backend in enumerate(backends[1:]):
        for one, other in zip(alone, run_drafting(backend, inputs, seed), strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("seed", slow_but(range(5), 0, 1))
@pytest.mark.parametrize("backend", [ReferenceBackend, TorchBackend])
def test_sequences_in_steps_of_any_length_equal_float64(
    backend: type[ReferenceBackend] | type[TorchBackend], seed: int
) -> None:
    dtype = torch.float64
    inputs = [Inputs(seed * 10 + i, 23 + 5 * i, HEADS, dtype) for i in range(3)]
    made = run(backend(layout_of(dtype)), inputs, seed % 2, seed)
    for each, (convolved, out) in zip(inputs, made, strict=True):
        torch.testing.assert_close(convolved, each.convolved()[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(out, each.remembered()[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_torch_chunks_equal_float64(dtype: torch.dtype, atol: float) -> None:
    """There are more tokens than in one of torch's chunks. A head may decay by e^1000 at one token
    and not at all at the next."""
    inputs = Inputs(1, 150, HEADS, dtype)
    inputs.rate[0], inputs.rate[1] = 100.0, 16.0
    inputs.gates[::7, HEADS.values] = 10.0
    inputs.gates[1::7, HEADS.values :] = -30.0
    convolved, out = at_once(TorchBackend(layout_of(dtype)), inputs)
    torch.testing.assert_close(convolved.double(), inputs.convolved()[0], rtol=0, atol=atol)
    torch.testing.assert_close(out.double(), inputs.remembered()[0], rtol=0, atol=atol)


# Heads and the convolution's width: sizes that no vector divides, and N = K, N = 4 K.
SHAPES = [
    (DeltaHeads(1, 1, 8, 8), 2),
    (DeltaHeads(2, 2, 13, 7), 3),
    (DeltaHeads(1, 4, 32, 33), 4),
    (DeltaHeads(2, 8, 20, 64), 4),
    (DeltaHeads(1, 2, 256, 40), 4),
]


@pytest.mark.parametrize(
    ("shape", "variant", "dtype"), pairwise(SHAPES, list(variants()), FLOATS), ids=str
)
def test_core_is_exact_up_to_rounding(
    shape: tuple[DeltaHeads, int], variant: str, dtype: torch.dtype
) -> None:
    heads, width = shape
    inputs = [Inputs(i, 23 + 5 * i, heads, dtype, width) for i in range(3)]
    made = run(CpuBackend(layout_of(dtype, heads, width), variant=variant), inputs, 1, 4)
    for each, (convolved, out) in zip(inputs, made, strict=True):
        assert_within(convolved, each.convolved())
        assert_within(out, each.remembered())


@pytest.fixture
def threads() -> Iterator[Callable[[int | None], None]]:
    yield set_num_threads
    set_num_threads(None)


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize(("heads", "width"), [*SHAPES, (DeltaHeads(4, 8, 64, 80), 4)], ids=str)
def test_core_has_the_same_bits_in_any_steps(
    heads: DeltaHeads, width: int, variant: str, threads: Callable[[int | None], None]
) -> None:
    dtype = torch.float32
    inputs = [Inputs(i, 33 + 5 * i, heads, dtype, width) for i in range(3)]
    found = []
    for seed, count in (0, 1), (1, 2), (2, 3):
        threads(count)
        backend = CpuBackend(layout_of(dtype, heads, width), variant=variant)
        found.append(run(backend, inputs, 0, seed))
    backend = CpuBackend(layout_of(dtype, heads, width), variant=variant)
    found.append([at_once(backend, each) for each in inputs])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])


def at_once(
    backend: AttentionBackend, inputs: Inputs, is_layer: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a whole sequence in one step, which stores only the last state. is_layer: the delta
    rule takes the convolution's output."""
    length = len(inputs.x)
    table = [-1] * ((length - 1) // P) + [3]
    backend.prepare(step_of([(0, length, table)]))
    x, gates = projected([(inputs, 0, length)])
    convolved = backend.convolve(0, x, inputs.weight)
    qkv = convolved if is_layer else x
    return convolved, backend.delta_rule(0, qkv, gates, inputs.rate, inputs.shift, inputs.heads)


@pytest.mark.parametrize("backend", [ReferenceBackend, TorchBackend, CpuBackend])
def test_earlier_contents_of_blocks_do_not_matter(
    backend: type[ReferenceBackend] | type[TorchBackend] | type[CpuBackend],
) -> None:
    inputs = [Inputs(i, 40, HEADS, torch.float32) for i in range(3)]
    fresh, used = backend(layout_of(torch.float32)), backend(layout_of(torch.float32))
    used.prepare(step_of([(0, 1, [block]) for block in range(NUM_BLOCKS)]))
    nan = torch.full((NUM_BLOCKS, HEADS.channels), torch.nan)
    one = inputs[0]
    used.convolve(0, nan, one.weight)
    gates = torch.zeros(NUM_BLOCKS, 2 * HEADS.values)
    used.delta_rule(0, nan, gates, one.rate, one.shift, HEADS)
    for a, b in zip(run(fresh, inputs, 0, 1), run(used, inputs, 0, 1), strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])


@pytest.mark.parametrize("backend", [TorchBackend, CpuBackend])
def test_torch_and_core_equal_transformers(backend: type[TorchBackend] | type[CpuBackend]) -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    each = Inputs(3, 70, HEADS, torch.float32)
    convolved, out = at_once(backend(layout_of(torch.float32)), each)
    their_own = theirs.causal_conv1d_fn(each.x.T[None], each.weight, None, activation="silu")
    exact, units = each.convolved()
    assert_within(convolved, (their_own[0].T.double(), units), times=2)
    size = HEADS.keys * HEADS.key_dim
    q, k, v = (
        x.unflatten(1, (-1, n))[None]
        for x, n in zip(
            each.x.split([size, size, HEADS.values * HEADS.value_dim], 1),
            (HEADS.key_dim, HEADS.key_dim, HEADS.value_dim),
            strict=True,
        )
    )
    strength, time = each.gates.chunk(2, 1)
    decay = -each.rate * F.softplus(time + each.shift)
    remembered, _ = theirs.torch_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g=decay[None],
        beta=strength.sigmoid()[None],
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=True,
    )
    exact, units = each.remembered()
    assert_within(out, (remembered[0].double(), units), times=2)
    assert_within(remembered[0], (exact, units))


def test_backend_without_states_rejects_them() -> None:
    with pytest.raises(ConfigError, match="traced cannot run models whose layers have states"):
        AttentionBackend.convolve(TracedAttention(), 0, torch.zeros(1, 1), torch.zeros(1, 1))
