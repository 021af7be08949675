"""Compare Triton's latent attention with one softmax per row."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from quire.base.errors import ConfigError
from quire.ops.attention import triton_gpu
from quire.ops.attention.triton_gpu import TritonBackend
from quire.ops.kernels.attention import attention_merge
from quire.ops.kernels.attention.attention_plan import Cut
from quire.ops.kernels.launch import INTERPRETED
from tests.kernels.test_attention import COARSE, DTYPES, FINE, TOLERANCE
from tests.kernels.test_deterministic import SMALL, exact_dot
from tests.support.cases import slow_but
from tests.support.kernels.latent_cases import (
    Contents,
    Latents,
    as_int8,
    in_steps,
    make_contents,
    softmax_rows,
)

STEPS: list[tuple[int, ...]] = [(0, 30, 5, 0, 3), (9, 1, 7, 1, 70)]
CASES: dict[str, tuple[Latents, Cut]] = {
    "mixed": (Latents(), FINE),
    "uncut": (Latents(), Cut()),
    "one_head": (Latents(num_heads=1, size=24, num_values=16), FINE),
    "all_values": (Latents(num_heads=3, size=32, num_values=32, block_size=3), FINE),
    "heads_16": (Latents(num_heads=16, block_size=32), FINE),
    "heads_20": (Latents(num_heads=20, size=48, num_values=24), COARSE),
    "parts_of_heads": (Latents((7, 40, 2, 1, 33), num_heads=96), COARSE),
}


def make_backend(
    case: Latents, cut: Cut, dtype: torch.dtype, device: torch.device, **options: Any
) -> TritonBackend:
    """Return a backend whose blocks are full of NaN, the scales of int8 too."""
    backend = TritonBackend(case.layout(dtype, device), cut=cut, **options)
    for kv in backend._memory.kv:
        kv.fill_({"auto": torch.nan, "int8": 255, "fp8": 127}[case.kv_format])
    return backend


def check(
    case: Latents,
    cut: Cut,
    dtype: torch.dtype,
    device: torch.device,
    steps: list[tuple[int, ...]] = STEPS,
    **options: Any,
) -> None:
    contents = make_contents(case, dtype)
    backend = make_backend(case, cut, dtype, device, **options)
    found = in_steps(backend, case, contents, steps, device)
    stored = contents
    if case.kv_format == "int8":
        stored = Contents(contents.q, [as_int8(x) for x in contents.latents])
    for got, wanted in zip(found, softmax_rows(case, stored), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", slow_but(CASES, *CASES.keys() - {"heads_20", "heads_16", "uncut"}))
def test_latent_attention_equals_softmax(name: str, device: torch.device) -> None:
    case, cut = CASES[name]
    steps = [(0, 39, 0, 0, 30), (7, 1, 2, 1, 3)] if name == "parts_of_heads" else STEPS
    check(case, cut, torch.float32, device, steps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latent_attention_equals_softmax_in_every_dtype(
    dtype: torch.dtype, device: torch.device
) -> None:
    check(*CASES["mixed"], dtype, device)


@pytest.mark.parametrize("num_heads", [16, pytest.param(128, marks=pytest.mark.slow)])
def test_latent_attention_takes_deepseeks_shape(num_heads: int, device: torch.device) -> None:
    case = Latents((21, 2), num_heads=num_heads, size=576, num_values=512)
    check(case, FINE, torch.float32, device, [(20, 0), (1, 2)])


@pytest.mark.parametrize("num_heads", slow_but((4, 40), 4))
def test_int8_attention_equals_softmax_of_stored_values(
    num_heads: int, device: torch.device
) -> None:
    case = replace(CASES["mixed"][0], kv_format="int8", num_heads=num_heads)
    check(case, COARSE if num_heads > 32 else FINE, torch.float32, device)


@pytest.mark.parametrize("is_fixed", slow_but((False, True), True))
def test_fp8_products_in_float16_equal_softmax(is_fixed: bool, device: torch.device) -> None:
    """Large queries must not overflow. Latents are exact in fp8: the interpreter rounds wrongly."""
    case = Latents(kv_format="fp8")
    contents = make_contents(case)
    latents = [(x.to(torch.float8_e4m3fn).float() / 32).half() for x in contents.latents]
    contents = Contents([(x * 500).half() for x in contents.q], latents)
    backend = make_backend(
        case, FINE, torch.float16, device, deterministic=is_fixed, scales={1: (1 / 32, 1 / 32)}
    )
    found = in_steps(backend, case, contents, STEPS, device)
    for got, wanted in zip(found, softmax_rows(case, contents), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=5e-3)


@pytest.mark.parametrize("kv_format", slow_but(("auto", "int8"), "auto"))
def test_fixed_cut_gives_the_same_bits_in_any_chunks(
    kv_format: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences run alone and together, as one prompt, in chunks and token by token."""
    if INTERPRETED:
        monkeypatch.setattr(attention_merge, "AT_ONCE", 2)
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", exact_dot)
    case = Latents((75, 20, 40), num_heads=3, size=24, num_values=16, kv_format=kv_format)
    contents = make_contents(case)
    ways = {
        "prompt": [(75, 20, 40)],
        "alone": [(75, 0, 0), (0, 20, 40)],
        "chunks": [(31, 0, 39), (17, 20, 0), (1, 0, 0), (1, 0, 0), (25, 0, 1)],
        "decoded": [(28, 19, 40), (1, 0, 0), (1, 0, 0), (41, 1, 0), *[(1, 0, 0)] * 4],
    }
    wanted: list[torch.Tensor] = []
    for way, steps in ways.items():
        backend = make_backend(case, SMALL, torch.float32, device, deterministic=True)
        got = in_steps(backend, case, contents, steps, device, seed=len(steps))
        wanted = wanted or got
        assert all(map(torch.equal, got, wanted)), way
    for got, exact in zip(wanted, softmax_rows(case, contents), strict=True):
        atol = 2e-5 if kv_format == "auto" else 8e-2
        torch.testing.assert_close(got.double(), exact, rtol=0, atol=atol)


def test_nothing_is_written_for_padding(device: torch.device) -> None:
    """Unused rows of a recorded step have slot -1."""
    backend = make_backend(Latents(), FINE, torch.float32, device)
    kv = backend._layers[0]
    before = kv.k.clone()
    latents = torch.ones(2, 40, device=device)
    backend._write.write_latents(kv, latents, torch.tensor([-1, 17], device=device))
    changed = (kv.k != before) & ~(kv.k.isnan() & before.isnan())
    assert changed.nonzero()[:, 1:3].unique(dim=0).tolist() == [[1, 1]]


def test_large_latent_vectors_are_rejected(device: torch.device) -> None:
    layout = Latents(size=triton_gpu.MAX_LATENT + 2).layout(torch.float32, device)
    with pytest.raises(ConfigError, match="latent vectors of up to 640 numbers, not 642"):
        TritonBackend(layout)
