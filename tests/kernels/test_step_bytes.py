"""Compare the bytes that a decode step moves with the minimum: weights, keys and values once, and
the activations between the launches.

Triton's interpreter shows the addresses of every load and store. For torch's operations, the sizes
of their tensors count. Repeated reads of a launch count once, as with a cache. Two models that
differ only in their number of layers show the bytes of a layer; the rest are the bytes per step. So
the test detects a cast weight, an extra write and read of an activation, or a second copy of the
logits.

Shape legend: D model dim, F feed-forward dim, N query heads, K KV heads, H head dim, V vocabulary.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.runtime.interpreter as interpreter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from quire import SamplingParams
from quire.base.plan import BlockWrites, Plan, RowStart
from quire.base.settings.config import config_from_flat
from quire.models.checkpoint.source import resolve_model
from quire.ops import gpu
from quire.ops.host import native
from quire.ops.kernels import embedding
from quire.ops.kernels.launch import INTERPRETED
from quire.runner.build import build_runner
from quire.runner.gpu.graphs import launch_step
from quire.runner.gpu.sizes import Size
from quire.runner.model_runner import ModelRunner
from quire.runner.step_ops import Needs, StepShape

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="it looks into Triton's interpreter")

D, F, N, K, H, V = 64, 96, 4, 2, 16, 1999
ROWS, CONTEXT, BLOCK = 4, 23, 16
WIDTH = 2  # bytes of float16
CONFIG = {
    "model_type": "llama",
    "hidden_size": D,
    "intermediate_size": F,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "head_dim": H,
    "vocab_size": V,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
# Operations that read (or write) only as much of their first tensor as they return (or take).
PARTIAL = {"index", "index_select", "gather", "embedding", "take_along_dim"}
PARTIAL_WRITES = {"index_put_", "index_copy_", "scatter_", "_index_put_impl_"}
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "lift_fresh"}
FREE |= {"_local_scalar_dense", "resize_"}
# Bytes as a share of float32 logits: sampling reads them once, in 16 bits.
LOGIT_PASSES = 0.75
# Row deltas, inputs, embedding, factors of the rotation, the first norm, attention's plan; rows
# that sample, head, two launches of sampling, the step's end, a copy of the results.
STEP_LAUNCHES = 12
REST_BYTES = 3000  # of a row: ids, positions, factors of the rotation, the first norm and the last


@dataclass
class Traffic:
    """launches: kernels and operations, in their order, with the bytes of each."""

    launches: list[tuple[str, int]] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(num for _, num in self.launches)


class CountingMode(TorchDispatchMode):
    """Count torch's operations; views and allocations cost nothing."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = tensors((args, kwargs))
        made = new_tensors(given, tensors(out))
        if name not in FREE and (made or func._schema.is_mutable):
            self._traffic.launches.append((name, bytes_of(name, given, made)))
        return out


def tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def new_tensors(given: list[torch.Tensor], made: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors with new memory: the names of `to` and `reshape` do not show if they copy."""
    old = {tensor.untyped_storage().data_ptr() for tensor in given}
    return [tensor for tensor in made if tensor.untyped_storage().data_ptr() not in old]


def bytes_of(name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> int:
    """Return bytes of distinct inputs and outputs; writes in place do not count."""
    if name in PARTIAL:
        return 2 * sum(t.nbytes for t in made) + sum(t.nbytes for t in given[1:])
    if name in PARTIAL_WRITES:
        return sum(t.nbytes for t in given[1:]) + given[-1].nbytes
    places = {(t.data_ptr(), t.nbytes) for t in given}
    return sum(num for _, num in places) + sum(t.nbytes for t in made)


class Launches:
    """Count Triton's launches: the distinct bytes that each loads, and that it stores."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._loaded: list[np.ndarray] = []
        self._stored: list[np.ndarray] = []

    @contextmanager
    def counted(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        builder, run = interpreter.InterpreterBuilder, interpreter.InterpretedFunction.run
        load, store = builder.create_masked_load, builder.create_masked_store

        def counting_load(own: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            self._loaded.append(places(pointers, mask))
            return load(own, pointers, mask, *rest)

        def counting_store(own: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._stored.append(places(pointers, mask))
            return store(own, pointers, value, mask, *rest)

        def counting_run(own: Any, *args: Any, **kwargs: Any) -> Any:
            self._loaded, self._stored = [], []
            with _disable_current_modes():  # the interpreter's own copies of arguments
                result = run(own, *args, **kwargs)
            num = distinct_bytes(self._loaded) + distinct_bytes(self._stored)
            self._traffic.launches.append((own.fn.__name__, num))
            return result

        with monkeypatch.context() as patch:
            patch.setattr(builder, "create_masked_load", counting_load)
            patch.setattr(builder, "create_masked_store", counting_store)
            patch.setattr(interpreter.InterpretedFunction, "run", counting_run)
            yield


def places(pointers: Any, mask: Any) -> np.ndarray:
    """Return the address and bytes of each element that is accessed, [num, 2]."""
    size = pointers.dtype.element_ty.primitive_bitwidth // 8
    inside = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)  # masks may be integers
    first = pointers.data[inside].astype(np.int64).ravel()
    return np.stack((first, np.full_like(first, size)), axis=1)


def distinct_bytes(touched: list[np.ndarray]) -> int:
    if not touched:
        return 0
    return int(np.unique(np.concatenate(touched), axis=0)[:, 1].sum())


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run kernels on the CPU's tensors, without the C++ core."""
    native.core.cache_clear()
    monkeypatch.setattr(native, "INTERFACE_VERSION", -1)
    monkeypatch.setattr(gpu, "is_on_gpu", lambda tensor: True)
    with pytest.warns(UserWarning, match="it was built from other sources"):
        assert native.core() is None
    yield
    native.core.cache_clear()


@dataclass
class DecodingGraph:
    """Work that runs the launches of a decoding step's graph."""

    runner: ModelRunner
    size: Size
    needs: Needs
    graph = None

    @property
    def num_row_slots(self) -> int:
        """See Work."""
        return self.size.rows

    def first(self, shape: StepShape) -> list[torch.Tensor]:
        """See Work."""
        launch_step(self.runner, self.size, self.needs, self.runner.backend)
        return []

    def second(self) -> list[torch.Tensor]:
        """See Work."""
        return []


def find_graph(runner: ModelRunner, plan: Plan, needs: Needs, runs: Any = None) -> DecodingGraph:
    """Replace `find_recorded` for plans of rows with one token each."""
    return DecodingGraph(runner, Size(len(plan.rows)), needs)


def step_of(
    layers: int,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: int = ROWS,
    sizes: dict[str, int] | None = None,
    context: int = CONTEXT,
) -> Traffic:
    """Return the traffic of one decode step: the second of all rows, at this context length. The
    earlier contents of blocks do not matter. sizes: other entries of the config."""
    directory.mkdir()
    config = CONFIG | {"num_hidden_layers": layers} | (sizes or {})
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    settings = {"load_format": "dummy", "dtype": "float16", "device": "cpu", "max_num_seqs": 8}
    settings |= {"attention_backend": "triton", "block_size": BLOCK, "max_model_len": 128}
    settings |= {"kv_cache_memory_bytes": 1 << 20}
    source = resolve_model(str(directory))
    runner = build_runner(config_from_flat(model=str(directory), **settings), source).runner
    runner.run(plan_of(1, rows, starts=True, context=context))
    traffic = Traffic()
    with Launches(traffic).counted(monkeypatch), CountingMode(traffic):
        result = runner.run(plan_of(2, rows, context=context))
    assert result.token_ids.shape == (rows, 1) and not result.row_errors
    return traffic


def plan_of(step_id: int, num_rows: int, starts: bool = False, context: int = CONTEXT) -> Plan:
    """Return a plan in which each row computes its next token and samples."""
    rows, ones = np.arange(num_rows, dtype=np.int32), np.ones(num_rows, np.int32)
    known = context - 2 + step_id  # tokens of a row; the last of them is not computed yet
    written = BlockWrites()
    started: tuple[RowStart, ...] = ()
    if starts:
        tokens = np.arange(known, dtype=np.int32)
        greedy = SamplingParams(temperature=0.0)
        started = tuple(
            RowStart(r, tokens + r, known - 1, known, greedy, seed=r) for r in range(num_rows)
        )
        blocks = -(-context // BLOCK)
        row, index = (each.ravel().astype(np.int32) for each in np.indices((num_rows, blocks)))
        written = BlockWrites(0 * row, row, index, row * blocks + index)
    return Plan(
        step_id=step_id,
        rows=rows,
        num_tokens=ones,
        computed_bound=ones * (known - 1),
        sample_rows=rows,
        num_candidates=-ones,
        started=started,
        block_writes=written,
    )


def layer_weights() -> int:
    """Return the elements of four products and two norms."""
    return (N + 2 * K) * H * D + N * H * D + 2 * F * D + F * D + 2 * D


def layer_activations() -> int:
    """Return the elements that a layer's nine launches read and write for a token, and the float32
    factors of its rotation."""
    norms = 2 * 4 * D
    heads = (N + 2 * K) * H
    attention = (D + heads) + 2 * heads + 2 * N * H + (N * H + D)
    gate = (D + 2 * F) + 3 * F + (F + D)
    return norms + attention + gate


def test_layer_moves_its_bytes_once(
    as_on_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = step_of(1, tmp_path / "short", monkeypatch)
    long = step_of(2, tmp_path / "long", monkeypatch)
    assert len(long.launches) - len(short.launches) == 9, long.launches
    assert len(short.launches) - 9 == STEP_LAUNCHES, short.launches
    kv = ROWS * CONTEXT * 2 * K * H
    wanted = WIDTH * (layer_weights() + kv + ROWS * layer_activations())
    found = long.total - short.total
    assert 0.98 * wanted < found < 1.03 * wanted, f"{found:.0f} bytes, {wanted} expected"

    logits = ROWS * V
    head = WIDTH * (V * D + ROWS * D + logits)
    rest = ROWS * REST_BYTES
    once = short.total - found
    assert head < once < head + LOGIT_PASSES * 4 * logits + rest, f"{once} bytes, head {head}"


def test_casts_are_counted_and_views_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cast counts as a read of the weight and a wider write. Rows that no launch reads do not
    count."""
    traffic = Traffic()
    weight, x = torch.ones(V, D, dtype=torch.float16), torch.ones(ROWS, D)
    with CountingMode(traffic), torch.inference_mode():
        torch.nn.functional.linear(x, weight.float().view(-1, D))
    product = 4 * (V * D + ROWS * D + ROWS * V)
    assert traffic.total == 2 * V * D + 4 * V * D + product

    traffic.launches.clear()
    with Launches(traffic).counted(monkeypatch):
        embedding.embedding(torch.tensor([5, 5, 7]), weight)
    # Two rows of the table, three of the result, three ids.
    assert traffic.launches == [("_embedding_kernel", 2 * D * 2 + 3 * D * 2 + 3 * 8)]
