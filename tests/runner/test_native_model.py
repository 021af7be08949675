"""A model's program in the C++ core equals its operations; the bits of its logits are stable."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.base.settings.config import ModelConfig
from quire.models.checkpoint.formats import AS_THEY_ARE, weight_formats
from quire.models.load.loading import LoadOptions, load_model
from quire.models.parts.layers import Attention
from quire.ops.attention.base import AttentionBackend, KVLayout
from quire.ops.attention.select import make_backend
from quire.ops.attention_inputs import DeltaHeads, Scores
from quire.ops.elementwise import add, gelu_mul, gelu_tanh_mul, scale, sigmoid_mul, soft_cap
from quire.ops.embedding import embedding
from quire.ops.host.native import core
from quire.ops.host.threads import set_num_threads
from quire.ops.linear import linear
from quire.ops.moe import moe_experts, moe_route
from quire.ops.norms import gated_norm, layer_norm
from quire.ops.trace.program import Kind
from quire.ops.weights.device_weights import pack_weight
from quire.ops.weights.formats import Quantization
from quire.runner.native_model import NativeModel, OperationModel, native_or_same
from quire.runner.native_program import trace
from quire.spec.cache_group import STATE, CacheGroup
from tests.support.cases import in_turn
from tests.support.models.checkpoints import VOCAB, random_tokens, write_checkpoint
from tests.support.models.paged_forward import (
    CPU,
    RowPart,
    make_layout,
    make_step,
    run_paged,
    run_step,
)
from tests.support.models.quick import one_of_each_kind

if core() is None:
    pytest.skip("the C++ core is not built", allow_module_level=True)

SEQUENCES = random_tokens(23, 5, 61)
WHOLE = [[23], [5], [61]]
CUTS = [[1, 20, 2], [0, 0, 4, 1], [33, 1, 1, 1, 25]]
FORMATS = {
    "as they are": AS_THEY_ARE,
    **{
        f"{name} of {group}": weight_formats(
            ModelConfig(quantization=name, quantization_group_size=group, quantized_head=head)
        )
        for name, group, head in [
            ("int8", 0, "int8"),
            ("int8", 32, "none"),
            ("int4", 32, "int4"),
            ("fp8", 0, "fp8"),
        ]  # fmt: skip
    },
}


@pytest.mark.parametrize("variant", one_of_each_kind("mistral", "qwen3_5", "opt", "qwen3"))
def test_program_equals_the_operations(variant: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, variant)
    model = load_model(tmp_path, checkpoint.spec, torch.float32, CPU)
    expected = run_paged(model, checkpoint.spec, SEQUENCES, WHOLE, backend="torch")
    result = run_paged(model, checkpoint.spec, SEQUENCES, CUTS, backend="cpu", native=True)
    # Compared to float64, both are off by up to 6e-5 if a state passes through all tokens.
    has_states = any(group.kind == STATE for group in checkpoint.spec.cache_groups)
    torch.testing.assert_close(result, expected, rtol=0, atol=1.2e-4 if has_states else 3e-5)


class SomeOperations:
    """The operations that the models above lack, one after another."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.table, self.weight = (
            torch.randn(*shape, generator=generator) for shape in ((VOCAB, 24), (24,))
        )
        sinks = torch.tensor([1.0, -torch.inf, -2.0])
        self.attentions = [
            (Attention(0, Scores(0.7, 1.5)), sinks),
            (Attention(1, Scores(0.7)), sinks + 1.0),
            (Attention(2, Scores(0.7, 0.5)), None),
        ]

    def __call__(
        self, ids_T: torch.Tensor, _positions: torch.Tensor, backend: AttentionBackend
    ) -> torch.Tensor:
        x_TD = scale(layer_norm(embedding(ids_T, self.table), self.weight, None, 1e-5), 2.5)
        total_TF = add(gelu_mul(x_TD), gelu_tanh_mul(x_TD))
        q, k, v, _ = x_TD.view(-1, 6, 4).split([3, 1, 1, 1], dim=1)
        for attention, sinks in self.attentions:
            total_TF = add(total_TF, attention(q, k, v, backend, sinks))
        return total_TF

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        return hidden_RD


def test_program_supports_each_operation() -> None:
    """Layers alternate between full attention and a window."""
    groups = CacheGroup("full", (0, 2), 1, 4, None), CacheGroup("window", (1,), 1, 4, 7)
    model, ids = SomeOperations(), torch.tensor(random_tokens(90)[0])
    found = []
    for name in ("reference", "cpu"):
        backend = make_backend(name, KVLayout(groups, (24, 24), 4, torch.float32, CPU))
        run = native_or_same(model, backend)
        assert isinstance(run, NativeModel) == (name == "cpu")
        pieces = []
        for start, end in ((0, 40), (40, 89), (89, 90)):
            step = make_step([RowPart(start, end, (range(23), range(1, 24)))], 4)
            backend.prepare(step)
            pieces.append(run(ids[start:end], step.positions_T, backend))
        found.append(torch.cat(pieces))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-5)


def test_phases_are_timed_on_request() -> None:
    """Each instruction is in one phase. A new measurement resets the times."""
    groups = CacheGroup("full", (0, 2), 1, 4, None), CacheGroup("window", (1,), 1, 4, 7)
    backend = make_backend("cpu", KVLayout(groups, (24, 24), 4, torch.float32, CPU))
    model, ids = NativeModel(SomeOperations(), backend), torch.tensor(random_tokens(40)[0])
    step = make_step([RowPart(0, 40, (range(23), range(1, 24)))], 4)
    backend.prepare(step)

    def run() -> list[float]:
        model(ids, step.positions_T, backend)
        return [seconds for _, seconds in model.compiled.phase_times()]

    model.compiled.time_phases()
    once, twice = run(), run()
    assert all(0 < before < after for before, after in zip(once, twice, strict=True))
    kinds = [each.kind for phase, _ in model.compiled.phase_times() for each in phase]
    assert kinds == [each.kind for each in trace(SomeOperations())[0].instructions]
    assert kinds.count(Kind.ATTEND) == len(groups) + 1
    model.compiled.time_phases()
    assert sum(seconds for _, seconds in model.compiled.phase_times()) == 0


class StatesAndAttention:
    """A layer with a state, whose convolution, delta rule and gates read columns of one product,
    then attention with a gate. only_core: without operations that torch rounds differently."""

    HEADS = DeltaHeads(keys=2, values=4, key_dim=8, value_dim=12)
    WIDTH, SIZE = 3, 48

    def __init__(self, only_core: bool) -> None:
        generator = torch.Generator().manual_seed(4)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.only_core, heads = only_core, self.HEADS
        self.sizes = [heads.channels, heads.values * heads.value_dim, 2 * heads.values]
        self.table = random(VOCAB, self.SIZE)
        self.inputs = pack_weight(random(sum(self.sizes), self.SIZE) / 7)
        self.convolution = random(heads.channels, self.WIDTH)
        self.rate, self.shift = random(heads.values).exp(), random(heads.values)
        self.norm, self.attention = random(heads.value_dim), Attention(1, Scores(0.7))

    def __call__(
        self, ids_T: torch.Tensor, _positions: torch.Tensor, backend: AttentionBackend
    ) -> torch.Tensor:
        rows = linear(embedding(ids_T, self.table), self.inputs)
        qkv, gate, gates = rows.split(self.sizes, dim=1)
        qkv = backend.convolve(0, qkv, self.convolution)
        out_TNE = backend.delta_rule(0, qkv, gates, self.rate, self.shift, self.HEADS)
        if not self.only_core:
            gate_TNE = gate.unflatten(1, out_TNE.shape[1:])
            out_TNE = gated_norm(out_TNE, gate_TNE, self.norm, 1e-6)
        q, k, v = out_TNE.split([2, 1, 1], dim=1)
        attended = self.attention(q, k, v, backend)
        return attended if self.only_core else sigmoid_mul(attended, gate[:, :24])

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        return hidden_RD


@pytest.mark.parametrize("only_core", [True, False])
def test_program_with_layer_states_equals_the_operations(only_core: bool) -> None:
    """The bits are equal if the core computes the operations; otherwise the values are close."""
    model = StatesAndAttention(only_core)
    heads = model.HEADS
    size = heads.channels * (model.WIDTH - 1) + heads.memory_size
    groups = CacheGroup(STATE, (0,), state_size=size), CacheGroup("full", (1,), 1, 12)
    ids, found = torch.tensor(random_tokens(90)[0]), []
    for name, is_native in ("cpu", True), ("cpu", False), ("reference", False):
        backend = make_backend(name, KVLayout(groups, (24, 24), 4, torch.float32, CPU))
        run = native_or_same(model, backend) if is_native else model
        assert isinstance(run, NativeModel) == is_native
        pieces = []
        for start, end in ((0, 41), (41, 89), (89, 90)):
            step = make_step([RowPart(start, end, (range(23), range(1, 24)))], 4)
            backend.prepare(step)
            pieces.append(run(ids[start:end], step.positions_T, backend))
        found.append(torch.cat(pieces))
    torch.testing.assert_close(found[0], found[2], rtol=1e-5, atol=2e-5)
    if only_core:
        assert torch.equal(found[0], found[1])


class ExpertsOfManyFormats:
    """A mixture whose experts are stored in different formats."""

    NUMBER, SIZE, INNER = 4, 64, 96

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.table, self.router = random(VOCAB, self.SIZE), random(self.NUMBER, self.SIZE)
        int8 = [Quantization("int8", group) for group in (32, 64)]
        formats = [*int8, Quantization("fp8", 32), None]
        shapes = (2 * self.INNER, self.SIZE), (self.SIZE, self.INNER)
        self.experts = [
            [pack_weight(random(*shape) / 8, formats[i - e]) for e in range(self.NUMBER)]
            for i, shape in enumerate(shapes)
        ]
        self.routes = pack_weight(self.router)

    def __call__(
        self, ids_T: torch.Tensor, _positions: torch.Tensor, _backend: AttentionBackend
    ) -> torch.Tensor:
        x_TD = embedding(ids_T, self.table)
        return moe_experts(x_TD, *moe_route(linear(x_TD, self.routes), 2, False), *self.experts)

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        return hidden_RD


def test_experts_may_differ_in_format_and_groups() -> None:
    model, ids = ExpertsOfManyFormats(), torch.tensor(random_tokens(40)[0])
    layout = KVLayout((CacheGroup("full", (0,), 1, 4, None),), (4,), 4, torch.float32, CPU)
    backend = make_backend("cpu", layout)
    run = native_or_same(model, backend)
    assert isinstance(run, NativeModel)

    def rows(start: int, end: int) -> torch.Tensor:
        step = make_step([RowPart(start, end, (range(4),))], 16)
        found: torch.Tensor = run(ids[start:end], step.positions_T, backend)
        return found

    whole = rows(0, 40)
    torch.testing.assert_close(whole, model(ids, ids, backend), rtol=1e-3, atol=1e-3)
    assert torch.equal(torch.cat([rows(i, i + 1) for i in range(40)]), whole)


@pytest.mark.parametrize(
    ("dtype", "max_error"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)], ids=str
)
def test_program_rounds_less_than_the_operations(
    dtype: torch.dtype, max_error: float, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path, "llama")
    exact = load_model(tmp_path, checkpoint.spec, torch.float64, CPU)
    expected = torch.cat(run_paged(exact, checkpoint.spec, SEQUENCES, WHOLE, dtype=torch.float64))
    model = load_model(tmp_path, checkpoint.spec, dtype, CPU)
    errors = []
    for native in (False, True):
        result = run_paged(
            model, checkpoint.spec, SEQUENCES, WHOLE, backend="cpu", dtype=dtype, native=native
        )
        errors.append(((torch.cat(result).double() - expected).norm() / expected.norm()).item())
    by_operations, by_program = errors
    assert by_program < min(by_operations, max_error)


@pytest.mark.parametrize(
    ("formats", "variant", "dtype"),
    in_turn(
        list(FORMATS),
        ["qwen3_tied", "mistral_window", "gpt2", "gemma2", "qwen3_next"],
        [torch.float32, torch.bfloat16, torch.float16],
    ),
    ids=str,
)
def test_logits_have_the_same_bits_alone_batched_and_chunked(
    variant: str, dtype: torch.dtype, formats: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path, variant)
    model = load_model(tmp_path, checkpoint.spec, dtype, CPU, LoadOptions(formats=FORMATS[formats]))

    def run(sequences: list[list[int]], cuts: list[list[int]], **rest: Any) -> list[torch.Tensor]:
        return run_paged(
            model, checkpoint.spec, sequences, cuts, backend="cpu", dtype=dtype, native=True, **rest
        )

    alone = [run([line], [[1] * len(line)])[0] for line in SEQUENCES]
    others = [
        run(SEQUENCES, WHOLE),
        run(SEQUENCES, CUTS, block_size=16),
        run(SEQUENCES, WHOLE, block_size=1, seed=3),
    ]
    set_num_threads(1)
    try:
        others.append(run(SEQUENCES, CUTS))
    finally:
        set_num_threads(None)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))


def test_layer_has_ten_phases(tmp_path: Path) -> None:
    """A layer has four products, one attention, and row operations between them."""
    checkpoint = write_checkpoint(tmp_path, "qwen3_tied")
    model = load_model(tmp_path, checkpoint.spec, torch.float32, CPU)
    draft, size = trace(model)
    kinds = [instruction.kind for instruction in draft.instructions]
    layers = checkpoint.spec.num_layers
    assert kinds.count(Kind.MULTIPLY) == 4 * layers
    assert kinds.count(Kind.ATTEND) == layers
    assert draft.widths[0] == size == checkpoint.spec.hidden_size
    quantised = load_model(
        tmp_path, checkpoint.spec, torch.float32, CPU, LoadOptions(formats=FORMATS["int8 of 0"])
    )
    assert max(trace(quantised)[0].phases) + 1 == 10 * layers + 1


def test_torch_uses_one_thread_alongside_the_core(tmp_path: Path) -> None:
    """This holds while a model runs operation by operation with the core's products."""
    checkpoint = write_checkpoint(tmp_path, "llama")
    model = load_model(tmp_path, checkpoint.spec, torch.float32, CPU)
    model.layers[0].mlp.register_forward_hook(lambda _mlp, _inputs, x: soft_cap(x, 1e9))
    attention = make_backend("cpu", make_layout(checkpoint.spec, 8, 4))
    run = native_or_same(model, attention)
    assert isinstance(run, OperationModel)
    found = []
    model.norm.register_forward_hook(lambda *_: found.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        run_step(run, attention, [1, 2, 3], make_step([RowPart(0, 3, ([0, 1],))], 4))
        assert (found, torch.get_num_threads()) == ([1], 3)
    finally:
        torch.set_num_threads(before)


def test_untraceable_model_runs_by_operations(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = write_checkpoint(tmp_path, "llama")
    model = load_model(tmp_path, checkpoint.spec, torch.float64, CPU)
    layout = make_layout(checkpoint.spec, 4, 4, torch.float32)
    assert native_or_same(model, make_backend("torch", layout)) is model
    assert native_or_same(model, make_backend("cpu", layout)) is model
    assert "operation by operation: a table holds torch.float64" in caplog.text
    packed = load_model(tmp_path, checkpoint.spec, torch.float32, CPU)
    assert isinstance(native_or_same(packed, make_backend("cpu", layout)), NativeModel)
