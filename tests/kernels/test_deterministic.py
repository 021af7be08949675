"""A token has the same bits in any batch, in any chunks of its prompt, decoded or recomputed.

The interpreter multiplies with numpy, where a row's bits depend on its position in the matrix. Here
products are sums in a fixed order, so that any difference comes from the kernels.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError
from quire.models.load.loading import load_model
from quire.models.parts import experts
from quire.models.parts.determinism import make_deterministic
from quire.ops.attention import triton_gpu
from quire.ops.attention.base import KVLayout
from quire.ops.attention.triton_gpu import TritonBackend
from quire.ops.attention_inputs import Scores
from quire.ops.kernels.attention import attention, attention_merge
from quire.ops.kernels.attention.attention_plan import Cut
from quire.ops.kernels.launch import INTERPRETED
from quire.ops.kernels.sampling.logprobs import token_logprobs
from quire.ops.weights import device_weights
from quire.spec.model_spec import load_spec
from tests.kernels.test_attention import (
    DTYPES,
    Case,
    Contents,
    make_contents,
    on,
    poison,
    run_step,
    softmax_rows,
    write_before,
)
from tests.kernels.test_model import used  # noqa: F401 (a fixture)
from tests.support.models.paged_forward import RowPart, make_step
from tests.support.models.reference_checkpoints import checkpoint

SMALL = Cut(align=16, fixed_chunk=32, split_tiles=2, short_chunk=16, long_chunk=32)
# A sequence as one prompt, in several chunkings, and decoded.
LENGTH = 75
BLOCK_BYTES = 2 * 2 * 2 * 4 * 8 * 4  # of the tiny llama, with 4 tokens of float32
CHUNKINGS = {
    "prompt": [LENGTH],
    "chunks": [31, 17, 1, 1, 25],
    "small": [3, 9, 20, 15, 2, 26],
    "decoded": [28] + [1] * 4 + [35] + [1] * 8,
}


def exact_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """Compute bits that depend only on row, column, and how many inputs come in one call."""
    total = np.zeros_like(d.data)
    a_data, b_data = a.data.astype(total.dtype), b.data.astype(total.dtype)
    for k in range(a_data.shape[1]):
        total += a_data[:, k : k + 1] * b_data[k : k + 1]
    return interpreter.TensorHandle(total + d.data, d.dtype.scalar)


@pytest.fixture(autouse=True)
def exact_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(attention_merge, "AT_ONCE", 2)  # each takes time
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", exact_dot)


# ---- attention -------------------------------------------------------------------------------


def one_sequence(case: Case) -> tuple[Contents, Case]:
    """Return the contents of row 0, whose tokens are all new, and of three other rows."""
    case = replace(case, rows=((0, LENGTH), (20, 40), (70, 1), (0, 3)))
    return make_contents(case), case


def in_chunks(
    backend: TritonBackend,
    case: Case,
    contents: Contents,
    lens: Sequence[int],
    others: Sequence[int] = (),
) -> torch.Tensor:
    """Return results [T, N, H] of row 0, computed in steps of `lens` tokens.

    others: rows that precede it in every step; their earlier keys are written first.
    """
    layout, tables = backend._layout, case.tables(seed=len(lens))
    if others:
        write_before(backend, case, contents, tables)
    found, start = [], 0
    for num in lens:
        parts = [RowPart(case.rows[r][0], sum(case.rows[r]), (tables[r],)) for r in others]
        parts.append(RowPart(start, start + num, (tables[0],)))
        backend.prepare(on(layout.device, make_step(parts, case.block_size)))
        q, k, v = (
            torch.cat(
                [values[r][case.rows[r][0] :] for r in others] + [values[0][start : start + num]]
            ).to(layout.device, layout.dtype)
            for values in (contents.q, contents.k, contents.v)
        )
        backend.write(1, k, v)
        sinks = contents.sinks.to(layout.device) if case.sinks else None
        out = backend.run(1, q, Scores(case.scale, case.soft_cap, sinks))
        found.append(out[len(out) - num :])
        start += num
    return torch.cat(found)


def all_chunkings(
    case: Case, dtype: torch.dtype, device: torch.device, deterministic: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    contents, case = one_sequence(case)

    def backend() -> TritonBackend:
        made = TritonBackend(case.layout(dtype, device), deterministic=deterministic, cut=case.cut)
        poison(made, case)
        return made

    for name, lens in CHUNKINGS.items():
        yield name, in_chunks(backend(), case, contents, lens)
    yield "batch", in_chunks(backend(), case, contents, [40, 35], others=[1, 2, 3])


CASES = {
    "plain": Case(group_size=4, cut=SMALL),
    "heads": Case(group_size=3, kv_heads=2, cut=SMALL, head_dim=20),
    "window": Case(group_size=4, cut=SMALL, window=37),
    "chunk": Case(group_size=4, cut=SMALL, chunk=37),
    "narrow": Case(group_size=4, cut=SMALL, window=5, block_size=3),
    "soft_cap": Case(group_size=2, cut=SMALL, soft_cap=3.0),
    "sinks": Case(group_size=4, cut=SMALL, sinks=True),
    "sinks_window": Case(group_size=4, cut=SMALL, sinks=True, window=20, soft_cap=5.0),
    "int8": Case(group_size=4, cut=SMALL, kv_format="int8"),
    "int8_sinks": Case(group_size=4, cut=SMALL, kv_format="int8", sinks=True, soft_cap=5.0),
}


QUICK_CASES = ("sinks_window", "int8")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if name in QUICK_CASES else pytest.mark.slow)
        for name, case in CASES.items()
    ],
)
def test_attention_has_the_same_bits_in_any_chunks(case: Case, device: torch.device) -> None:
    (_, wanted), *rest = all_chunkings(case, torch.float32, device)
    for name, got in rest:
        assert torch.equal(got, wanted), name
    if case.kv_format == "auto":
        contents, alone = one_sequence(case)
        exact = softmax_rows(alone, contents)[:LENGTH]
        torch.testing.assert_close(wanted.cpu().double(), exact, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_attention_in_chunks_has_the_same_bits_in_every_dtype(
    dtype: torch.dtype, device: torch.device
) -> None:
    (_, wanted), *rest = all_chunkings(CASES["plain"], dtype, device)
    for name, got in rest:
        assert torch.equal(got, wanted), name


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 20])
def test_spans_do_not_change_the_bits_of_other_tokens(
    window: int | None, device: torch.device
) -> None:
    """Nor do another row of the step, or a span's start in an earlier step."""
    case = Case(((0, 75), (20, 40)), 4, cut=SMALL, window=window, spans=((0, 10, 60),))
    contents, tables = make_contents(case), case.tables()

    def run(case: Case, rows: list[int]) -> torch.Tensor:
        layout = case.layout(torch.float32, device, num_blocks=20)
        backend = TritonBackend(layout, deterministic=True, cut=SMALL)
        poison(backend, case)
        write_before(backend, case, contents, tables)
        return run_step(backend, case, contents, tables, rows)

    both, first, causal = run(case, [0, 1]), run(case, [0]), run(replace(case, spans=()), [0, 1])
    assert torch.equal(both[:75], first)
    assert torch.equal(both[:10], causal[:10]) and torch.equal(both[59:], causal[59:])
    assert not torch.equal(both[10:59], causal[10:59])
    rest = replace(case, rows=((33, 42), (20, 40)))
    assert torch.equal(run(rest, [0]), both[33:75])
    wanted = softmax_rows(case, contents)
    torch.testing.assert_close(both.cpu().double(), wanted, rtol=0, atol=2e-5)


def test_bits_differ_without_deterministic_mode(device: torch.device) -> None:
    """This shows that the tests above can fail."""
    chunkings = all_chunkings(CASES["plain"], torch.float32, device, deterministic=False)
    (_, wanted), (_, got) = next(chunkings), next(chunkings)
    assert not torch.equal(got, wanted)


def test_less_memory_for_parts_gives_the_same_bits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory shrinks until no row is split and nothing is merged."""
    case = replace(CASES["sinks"], rows=((100, 1), (90, 20), (0, 60)))
    contents, found, splits = make_contents(case), [], []
    for most in (1 << 28, 120 * 4 * 4 * (32 + 2), 90 * 4 * 4 * (32 + 2), 0):
        monkeypatch.setattr(triton_gpu, "PARTS_BYTES", most)
        layout = case.layout(torch.float32, device)
        backend = TritonBackend(layout, deterministic=True, cut=case.cut)
        write_before(backend, case, contents, case.tables())
        found.append(run_step(backend, case, contents, case.tables()))
        work = backend._work[0]
        assert work is not None and 4 * 4 * (32 + 2) * work.bounds.slots <= most
        splits.append(work.cut.split_tiles)
    assert splits == [2, 1, 0, 0]
    assert all(torch.equal(got, found[0]) for got in found)


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(replace(SMALL, fixed_chunk=32), id="small"),
        pytest.param(Cut(), id="usual", marks=pytest.mark.slow),
    ],
)
def test_splitting_a_row_does_not_change_its_bits(cut: Cut, device: torch.device) -> None:
    """There are more parts than are loaded together; one case has the usual chunks."""
    before = 300 if cut.align == 16 else 1100
    case = Case(((before, 1), (before - 10, 21)), cut=cut, group_size=4)
    contents = make_contents(case)
    layout = case.layout(torch.float32, device)
    backend = TritonBackend(layout, deterministic=True, cut=case.cut)
    write_before(backend, case, contents, case.tables())
    split = run_step(backend, case, contents, case.tables())
    backend._cut = replace(backend._cut, split_tiles=0)
    assert torch.equal(run_step(backend, case, contents, case.tables()), split)
    wanted = softmax_rows(case, contents)
    torch.testing.assert_close(split.cpu().double(), wanted, rtol=0, atol=2e-5)


class Launches:
    """Wrap a kernel and record the fusion option of each launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.fuses = kernel, []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.fuses.append(kwargs.get("enable_fp_fusion", True))
            self.kernel[grid](*args, **kwargs)

        return launch


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_mode_disables_fused_multiply_adds(
    deterministic: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default mode lets the compiler fuse. The interpreter never fuses."""
    case = Case(((70, 1), (20, 9)), cut=SMALL)
    attend = Launches(attention._attention_kernel)
    name = "_ordered_kernel" if deterministic else "_merge_kernel"
    merge = Launches(getattr(attention_merge, name))
    monkeypatch.setattr(attention, "_attention_kernel", attend)
    monkeypatch.setattr(attention_merge, name, merge)
    layout = case.layout(torch.float32, device)
    backend = TritonBackend(layout, deterministic=deterministic, cut=case.cut)
    write_before(backend, case, make_contents(case), case.tables())
    run_step(backend, case, make_contents(case), case.tables())
    assert attend.fuses == merge.fuses == [not deterministic]


# ---- whole models ----------------------------------------------------------------------------


def loaded(
    architecture: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.nn.Module, KVLayout]:
    """Return the model with the layers that a GPU uses, and a layout for its KV memory."""
    monkeypatch.setattr(device_weights, "can_pack", lambda dtype, device: False)
    monkeypatch.setattr(experts, "experts_class", lambda device: experts.StackedExperts)
    folder = checkpoint(architecture)
    spec = load_spec(folder)
    model = load_model(folder, spec, dtype, device)
    blocks = (40,) * len(spec.cache_groups)
    return model, KVLayout(spec.cache_groups, blocks, 4, dtype, device)


@torch.inference_mode()
def states_and_logits(
    model: torch.nn.Module,
    layout: KVLayout,
    lens: Sequence[int],
    others: Sequence[int] = (),
    deterministic: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states and logits of a prompt, computed in steps of `lens` tokens.

    others: lengths of other prompts, which precede it in every step.
    """
    backend = TritonBackend(layout, deterministic=deterministic, cut=MODEL_CUT)
    prompt = [(7 * i + i * i) % 97 for i in range(sum(lens))]
    found, start = [], 0
    for num in lens:
        parts = [
            RowPart(0, length, ([i, *range(20 + 10 * i, 30 + 10 * i)],) * len(layout.groups))
            for i, length in enumerate(others)
        ]
        table = [3 + 2 * i if 3 + 2 * i < 20 else 4 + 2 * i - 18 for i in range(16)]
        parts.append(RowPart(start, start + num, (table,) * len(layout.groups)))
        step = on(layout.device, make_step(parts, 4))
        ids = [5 * i % 97 for length in others for i in range(length)]
        ids += prompt[start : start + num]
        backend.prepare(step)
        hidden = model(torch.tensor(ids, device=layout.device), step.positions_T, backend)
        found.append((hidden[len(ids) - num :], model.logits(hidden)[len(ids) - num :]))
        start += num
    states, logits = zip(*found, strict=True)
    return torch.cat(states), torch.cat(logits)


MODEL_CUT = replace(SMALL, fixed_chunk=16)
STEPS = {
    "chunks": ([12, 1, 1, 7, 6], ()),
    "decoded": ([23] + [1] * 4, ()),
    "batch": ([13, 14], (9, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "half"),
    [
        ("qwen3_5_text", True),  # has two layers, qwen3_5 four
        ("qwen3_5", True),
        ("qwen3_moe", False),
        ("llama", True),
        ("llama", False),
        ("mistral", False),
    ],
)
def test_models_give_the_same_bits_in_any_batch(
    architecture: str,
    half: bool,
    device: torch.device,
    used: set[str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dtype = torch.float16 if half else torch.float32
    model, layout = loaded(architecture, dtype, device, monkeypatch)
    make_deterministic(model)
    states, logits = states_and_logits(model, layout, [27])
    assert used >= {"matmul", "norm"} and ("moe" in used) == (architecture == "qwen3_moe")
    assert states.isfinite().all() and len(states) == 27
    for name, (lens, others) in STEPS.items():
        got_states, got_logits = states_and_logits(model, layout, lens, others)
        assert torch.equal(got_states, states), name
        assert torch.equal(got_logits, logits), name
    if not half:
        other = states_and_logits(model, layout, STEPS["decoded"][0], deterministic=False)[0]
        assert not torch.equal(other, states), "the test could not fail"
        torch.testing.assert_close(other, states, atol=1e-4, rtol=1e-4)


def test_logprobs_of_a_row_do_not_depend_on_the_batch(device: torch.device) -> None:
    logits = torch.randn(9, 5000, generator=torch.Generator().manual_seed(0)).to(device)
    chosen = torch.arange(9, device=device) * 500
    together = token_logprobs(logits, chosen, 3)
    for row in (0, 4, 8):
        alone = token_logprobs(logits[row : row + 1].clone(), chosen[row : row + 1], 3)
        assert torch.equal(alone.logprobs[0], together.logprobs[row])
        assert torch.equal(alone.token_ids[0], together.token_ids[row])


# ---- the engine ------------------------------------------------------------------------------

PROMPT = [(5 * i + 3) % 97 for i in range(21)]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "attention_backend": "triton",
    "block_size": 4,
    "max_model_len": 32,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 32,
    "disable_log_stats": True,
    "kv_cache_memory_bytes": 24 * BLOCK_BYTES,
}
# Number of other requests, and settings; each request is sent twice.
ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    "in a batch": (2, {}),
    "in chunks, without a cache": (
        0,
        {"max_num_batched_tokens": 9, "enable_prefix_caching": False},
    ),
    "preempted": (2, {"kv_cache_memory_bytes": 11 * BLOCK_BYTES, "max_num_batched_tokens": 13}),
}


def answers(num_others: int, settings: dict[str, Any]) -> list[Any]:
    """Return tokens and logprobs of the prompt's two responses; the second has a prefix hit."""
    where = {"device": "cpu" if INTERPRETED else "cuda"}
    # The others start small and grow while the last, which is preempted first, is computed.
    drawn = {"temperature": 0.9, "seed": 1, "logprobs": 1, "ignore_eos": True}
    params = [SamplingParams(**drawn, max_tokens=20) for _ in range(num_others)]
    params.append(SamplingParams(**drawn, max_tokens=5))
    prompts = [{"prompt_token_ids": [3 + i] * 5} for i in range(num_others)]
    prompts.append({"prompt_token_ids": PROMPT})
    with LLM(str(checkpoint("llama")), **SETTINGS | where | settings) as llm:
        rounds = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
    was_preempted = any(outputs[-1].metrics.num_preemptions for outputs in rounds)
    assert was_preempted == ("kv_cache_memory_bytes" in settings)
    return [
        [{token: each.logprob for token, each in at.items()} for at in last.outputs[0].logprobs]
        for *_, last in rounds
    ]


@functools.cache
def answers_alone() -> list[Any]:
    """Return the responses to the prompt alone, which all others must equal."""
    return answers(0, {"deterministic": True})


@pytest.mark.parametrize(
    "engine",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ENGINES),
    ],
)
def test_request_has_the_same_bits_in_any_engine(
    engine: str,
    used: set[str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_weights, "can_pack", lambda *_: False)
    num_others, settings = ENGINES[engine]
    alone = answers_alone()
    assert alone[0] == alone[1]
    assert answers(num_others, settings | {"deterministic": True}) == alone
    assert "matmul" in used


def test_cpu_rejects_deterministic_mode() -> None:
    with pytest.raises(ConfigError, match="deterministic is only for GPUs"):
        LLM(str(checkpoint("llama")), device="cpu", deterministic=True)
