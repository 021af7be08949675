"""Compare prompt attention by packages' kernels with a softmax, with fakes of the packages.

Covers `ops/prompt_kernels/flashinfer.py`, `ops/prompt_kernels/flash_attention.py`,
`ops/prompt_kernels/cudnn.py` and `ops/prompt_kernels/base.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

from quire.base.errors import ConfigError
from quire.base.plugins import GPU_ATTENTION
from quire.ops.attention import package_prompts, select
from quire.ops.attention.base import KVLayout
from quire.ops.attention.package_prompts import KERNELS, PackageBackend, choose
from quire.ops.attention.select import make_backend
from quire.ops.attention.triton_gpu import TritonBackend
from quire.ops.attention_inputs import Scores
from quire.ops.kernels.launch import INTERPRETED
from quire.ops.prompt_kernels import base
from quire.ops.prompt_kernels.base import Heads, PagedStep, PromptKernel
from quire.ops.prompt_kernels.cudnn import CuDNN
from quire.ops.prompt_kernels.flash_attention import FlashAttention3
from quire.ops.prompt_kernels.flashinfer import FlashInfer
from quire.spec.cache_group import CacheGroup
from tests.kernels.test_attention import (
    TOLERANCE,
    Case,
    make_contents,
    run_step,
    softmax_rows,
    write_before,
)

PROMPTS = ((0, 70), (0, 64))
CHUNKS = ((33, 70), (0, 65))
MIXED = ((20, 1), (0, 70), (3, 2))


def attend_rows(
    q_QNH: torch.Tensor,
    k_CKH: torch.Tensor,
    v_CKH: torch.Tensor,
    scale: float,
    soft_cap: float,
    window_left: int,
) -> torch.Tensor:
    """Return attention of the last Q of C tokens, [Q, N, H]. window_left: visible keys before a
    query; -1 for all. soft_cap: 0 for none."""
    group = q_QNH.shape[1] // k_CKH.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k_CKH, v_CKH))
    scores = torch.einsum("qnh,cnh->nqc", q_QNH.double(), k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    key = torch.arange(len(k), device=k.device)
    query = key[len(k) - len(q_QNH) :, None]
    hidden = key > query
    if window_left >= 0:
        hidden |= key < query - window_left
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("nqc,cnh->qnh", weights, v).to(q_QNH.dtype)


class PrefillWrapper:
    """Fake of `flashinfer.BatchPrefillWithPagedKVCacheWrapper`. plans: its plans so far."""

    plans: list[dict[str, Any]]

    def __init__(self, workspace: torch.Tensor, kv_layout: str) -> None:
        assert workspace.dtype == torch.uint8 and kv_layout == "HND"
        self.plans = []

    def plan(self, starts: torch.Tensor, block_starts: torch.Tensor, blocks: torch.Tensor,
             last_lens: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int,
             block_size: int, **rest: Any) -> None:  # fmt: skip
        assert starts.device.type == block_starts.device.type == last_lens.device.type == "cpu"
        assert {x.dtype for x in (starts, block_starts, blocks, last_lens)} == {torch.int32}
        assert int(last_lens.min()) >= 1 and int(last_lens.max()) <= block_size
        assert len(blocks) == int(block_starts[-1]) and rest.pop("causal")
        self.plans.append(locals() | rest)

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], out: Any) -> None:
        plan = self.plans[-1]
        shape = plan["num_kv_heads"], plan["block_size"], plan["head_dim"]
        assert all(x.shape[1:] == shape and x.stride(-1) == 1 for x in kv)
        assert len(q) == int(plan["starts"][-1]) and q.dtype == plan["q_data_type"]
        for row, last in enumerate(plan["last_lens"].tolist()):
            tokens = slice(*plan["starts"][row : row + 2].tolist())
            blocks = plan["blocks"][slice(*plan["block_starts"][row : row + 2].tolist())]
            length = (len(blocks) - 1) * plan["block_size"] + last
            k, v = (x[blocks.long()].transpose(1, 2).flatten(0, 1)[:length] for x in kv)
            cap, window = plan["logits_soft_cap"] or 0.0, plan["window_left"]
            out[tokens] = attend_rows(q[tokens], k, v, plan["sm_scale"], cap, window)


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, cache_seqlens: torch.Tensor,
    page_table: torch.Tensor, cu_seqlens_q: torch.Tensor, max_seqlen_q: int,
    softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float,
) -> torch.Tensor:  # fmt: skip
    """Fake of `flash_attn_interface.flash_attn_with_kvcache` on a paged cache [B, P, K, H]."""
    starts, out = cu_seqlens_q.tolist(), torch.zeros_like(q)
    assert causal and cache_seqlens.dtype == page_table.dtype == cu_seqlens_q.dtype == torch.int32
    assert window_size == (-1, -1) or window_size[1] == 0
    assert max_seqlen_q >= max(b - a for a, b in zip(starts, starts[1:], strict=False))
    for row, length in enumerate(cache_seqlens.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        blocks = page_table[row, : -(-length // k_cache.shape[1])].long()
        k, v = (x[blocks].flatten(0, 1)[:length] for x in (k_cache, v_cache))
        out[tokens] = attend_rows(q[tokens], k, v, softmax_scale, softcap, window_size[0])
    return out


FLASHINFER = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=PrefillWrapper)
FLASH_ATTENTION_3 = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)


class Installed:
    """Make a kernel's package appear installed. attended: steps that the kernel served."""

    def __init__(self, kernel: PromptKernel, module: Any, patch: pytest.MonkeyPatch) -> None:
        self.kernel, self.attended = kernel, list[PagedStep]()
        patch.setattr(kernel, "why_not", lambda heads: None)
        patch.setattr(kernel, "load", lambda: module)
        attend = kernel.attend

        def count(*given: Any) -> None:
            self.attended.append(given[3])
            attend(*given)

        patch.setattr(kernel, "attend", count)


@pytest.fixture(params=["flashinfer", "flash_attention_3", "cudnn"])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Installed:
    kernel, module = {
        "flashinfer": (FlashInfer(), FLASHINFER),
        "flash_attention_3": (FlashAttention3(), FLASH_ATTENTION_3),
        "cudnn": (CuDNN(SDPBackend.MATH), None),
    }[request.param]
    return Installed(kernel, module, monkeypatch)


def check(
    installed: Installed, case: Case, device: torch.device, is_served: bool
) -> PackageBackend:
    contents, tables = make_contents(case), case.tables()
    backend = PackageBackend(case.layout(torch.float32, device), installed.kernel)
    write_before(backend, case, contents, tables)
    installed.attended.clear()  # steps that wrote earlier tokens
    got = run_step(backend, case, contents, tables)
    assert len(installed.attended) == is_served
    wanted = softmax_rows(case, contents)
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=0, atol=2e-5)
    return backend


def test_package_serves_prompts(installed: Installed, device: torch.device) -> None:
    backend = check(installed, Case(PROMPTS, group_size=2, kv_heads=2), device, True)
    assert backend.name == installed.kernel.name
    assert backend.can_be_recorded and not backend.takes_any_lengths


def test_packages_except_cudnn_serve_later_chunks(
    installed: Installed, device: torch.device
) -> None:
    is_served = installed.kernel.name != "cudnn"
    check(installed, Case(CHUNKS, group_size=3, block_size=5), device, is_served)


def test_only_flash_attention_3_serves_prompts_with_decoding_rows(
    installed: Installed, device: torch.device
) -> None:
    """Drafts in flight may shorten decoding rows; FlashAttention 3 reads lengths on the device."""
    is_served = installed.kernel.name == "flash_attention_3"
    check(installed, Case(MIXED), device, is_served)


@pytest.mark.parametrize("extra", [{"window": 20}, {"soft_cap": 3.0}])
def test_packages_except_cudnn_serve_windows_and_soft_caps(
    installed: Installed, extra: dict[str, Any], device: torch.device
) -> None:
    is_served = installed.kernel.name != "cudnn"
    check(installed, Case(CHUNKS, **extra), device, is_served)


def test_triton_serves_what_no_package_supports(installed: Installed, device: torch.device) -> None:
    check(installed, Case(((20, 1), (5, 30))), device, False)
    check(installed, Case(PROMPTS, sinks=True), device, False)
    check(installed, Case(PROMPTS, spans=((0, 3, 20),)), device, False)
    check(installed, Case(PROMPTS, chunk=20), device, False)


def test_rows_without_tokens_are_skipped(installed: Installed, device: torch.device) -> None:
    """A recorded step has such rows, and -1 in their tables."""
    case = Case(PROMPTS)
    contents, tables = make_contents(case), case.tables()
    backend = PackageBackend(case.layout(torch.float32, device), installed.kernel)
    run_step(backend, case, contents, tables)
    step = backend._step
    assert step is not None
    pad = torch.nn.functional.pad
    padded = replace(
        step,
        query_starts_S1=pad(step.query_starts_S1, (0, 1), value=134),
        context_lens_S=pad(step.context_lens_S, (0, 1)),
        block_tables_SL=(pad(step.block_tables_SL[0], (0, 2, 0, 1), value=-1),),
        query_lens_host=np.array([70, 64, 0], np.int32),
        context_lens_host=np.array([70, 64, 0], np.int32),
    )
    backend.prepare(padded)
    q = torch.cat([*contents.q, contents.q[0][:3]]).to(device)
    got = backend.run(1, q, Scores(case.scale))[:134]
    assert installed.attended[-1].step is padded
    torch.testing.assert_close(got.cpu().double(), softmax_rows(case, contents), rtol=0, atol=2e-5)


def test_flashinfer_plans_once_per_step(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    installed = Installed(FlashInfer(), FLASHINFER, monkeypatch)
    case = Case(PROMPTS)
    contents, tables = make_contents(case), case.tables()
    backend = PackageBackend(case.layout(torch.float32, device), installed.kernel)
    for _ in range(2):
        run_step(backend, case, contents, tables, layer=0)
        run_step_again = torch.cat(contents.q).to(device)
        backend.run(1, run_step_again, Scores(case.scale))
    [(wrapper, _)] = installed.kernel._planned.values()
    assert isinstance(wrapper, PrefillWrapper) and len(wrapper.plans) == 2


CUDA = Heads(128, torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize("name", ["flashinfer", "flash_attention_3"])
def test_package_selected_by_name_must_be_installed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: None)
    layout = Case().layout(torch.float32, torch.device("cpu"))
    package = KERNELS[name].package
    with pytest.raises(
        ConfigError,
        match=f"attention_backend {name} cannot be used here: the package {package} is not"
        " installed; take auto",
    ):
        make_backend(name, layout)
    with pytest.raises(ConfigError, match="reads keys and values of the model's dtype, not int8"):
        make_backend(name, replace(layout, kv_format="int8"))
    with pytest.raises(ConfigError, match=f"deterministic needs .*not {name}"):
        make_backend(name, layout, deterministic=True)


def test_why_not_names_the_unmet_requirement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: object())
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    for kernel in (FlashInfer(), FlashAttention3(), CuDNN()):
        assert kernel.why_not(CUDA) is None
        assert kernel.why_not(replace(CUDA, device=torch.device("cpu"))) == (
            "it is for GPUs, not cpu"
        )
        assert "not torch.float32" in str(kernel.why_not(replace(CUDA, dtype=torch.float32)))
    assert "not 80" in str(FlashInfer().why_not(replace(CUDA, head_dim=80)))
    assert "not 256" in str(CuDNN().why_not(replace(CUDA, head_dim=256)))
    assert "not 320" in str(FlashAttention3().why_not(replace(CUDA, head_dim=320)))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    assert "torch with cuDNN is not installed" in str(CuDNN().why_not(CUDA))
    capability[0] = (8, 6)
    assert "capability 9.0, this GPU has 8.6" in str(FlashAttention3().why_not(CUDA))
    capability[0] = (7, 5)
    assert "capability 8.0, this GPU has 7.5" in str(FlashInfer().why_not(CUDA))


class Scaled(TritonBackend):
    """Backend whose results are multiplied by a factor."""

    def __init__(self, layout: KVLayout, factor: float) -> None:
        super().__init__(layout)
        self._factor = factor

    def run(self, *given: Any, **named: Any) -> torch.Tensor:
        return super().run(*given, **named) * self._factor


@dataclass
class Clock:
    """Return times from a list."""

    times: list[float]

    def __call__(self, run: Callable[[], object], device: torch.device) -> float:
        return self.times.pop(0)


def one_prompt(device: torch.device) -> KVLayout:
    group = CacheGroup("full", (0,), 1, 16)
    return KVLayout((group,), (4,), 16, torch.float32, device)


@pytest.mark.parametrize(("times", "wanted"), [([2.0, 1.0], "a"), ([1.0, 2.0], "triton")])
def test_choose_returns_the_fastest_backend(
    times: list[float], wanted: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    layout = one_prompt(device)
    makers = {"triton": lambda: TritonBackend(layout), "a": lambda: Scaled(layout, 1.001)}
    with caplog.at_level("INFO"):
        assert choose(makers, layout, Clock(times)) == wanted
    assert f"taking {wanted}" in caplog.text


def test_choose_rejects_wrong_and_failing_packages(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    layout = one_prompt(device)

    def fail() -> TritonBackend:
        raise RuntimeError("no kernel image")

    makers = {"triton": lambda: TritonBackend(layout), "b": lambda: Scaled(layout, 1.5),
              "c": lambda: Scaled(layout, torch.nan), "d": fail}  # fmt: skip
    assert choose(makers, layout, Clock([3.0])) == "triton"
    assert "by b differs by" in caplog.text and "by c differs by nan" in caplog.text
    assert "by d failed and is not used: no kernel image" in caplog.text
    with pytest.raises(RuntimeError, match="no kernel image"):
        choose({"d": fail}, layout, Clock([]))


def test_auto_measures_only_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN comes with torch, and only its name selects it."""
    layout, measured = Case().layout(torch.bfloat16, torch.device("cuda")), []
    serving = {"cudnn"}
    monkeypatch.setattr(
        package_prompts, "why_not", lambda k, layout: None if k.name in serving else "missing"
    )

    def measure(names: tuple[str, ...], *heads: Any) -> str:
        measured.append((names, *heads[:3]))
        return names[-1]

    monkeypatch.setattr(package_prompts, "_measured", measure)
    assert package_prompts.fastest_for_prompts(layout) == "triton" and not measured
    serving |= {"flashinfer", "flash_attention_3"}
    assert package_prompts.fastest_for_prompts(layout) == "flash_attention_3"
    assert measured == [(("flashinfer", "flash_attention_3"), 1, 32, 16)]


def test_auto_selects_the_backend_that_was_measured_fastest(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(select, "fastest", lambda layout: "triton")
    monkeypatch.setattr(select, "fastest_for_prompts", lambda layout: "flashinfer")
    monkeypatch.setattr(FlashInfer, "why_not", lambda self, heads: None)
    layout = Case().layout(torch.float32, device)
    assert make_backend("auto", layout).name == "flashinfer"
    fixed = make_backend("auto", layout, deterministic=True)
    assert isinstance(fixed, TritonBackend) and fixed.name == "triton"


def test_triton_64_selects_small_tiles(device: torch.device) -> None:
    case = Case(((0, 70), (20, 1)))
    contents, tables = make_contents(case), case.tables()
    backend = make_backend("triton_64", case.layout(torch.float32, device))
    assert isinstance(backend, TritonBackend) and backend.name == "triton"
    assert backend._cut.long_rows == 64 and backend._machine.long_warps == 4
    write_before(backend, case, contents, tables)
    got = run_step(backend, case, contents, tables)
    torch.testing.assert_close(got.cpu().double(), softmax_rows(case, contents), rtol=0, atol=2e-5)


@pytest.mark.skipif(INTERPRETED, reason="packages need a GPU")
@pytest.mark.parametrize("rows", [PROMPTS, CHUNKS, MIXED])
@pytest.mark.parametrize("name", KERNELS)
def test_real_package_equals_softmax(
    name: str, rows: tuple[tuple[int, int], ...], device: torch.device
) -> None:
    case = Case(rows, group_size=4, kv_heads=2, head_dim=128)
    layout = case.layout(torch.bfloat16, device)
    kernel = KERNELS[name]()
    if (reason := package_prompts.why_not(kernel, layout)) is not None:
        pytest.skip(reason)
    contents, tables = make_contents(case), case.tables()
    rounded = {k: [x.bfloat16() for x in getattr(contents, k)] for k in ("q", "k", "v")}
    backend = PackageBackend(layout, kernel)
    write_before(backend, case, contents, tables)
    got = run_step(backend, case, contents, tables)
    wanted = softmax_rows(case, replace(contents, **rounded))
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=0, atol=TOLERANCE[torch.bfloat16])


def test_setting_names_all_backends() -> None:
    assert {"auto", "cpu", "torch", "reference", *GPU_ATTENTION} == set(select.NAMES)
