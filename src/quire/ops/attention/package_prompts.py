"""Attention backends whose prompts are attended by kernels of installed packages.

Everything else is the triton backend's: the blocks, their writes and moves, decoding rows, and each
step that a package's kernel does not serve. Decoding steps stay in graphs; a mixed step is recorded
in pieces, since packages need lengths on the host. Shape legend: as in `base.py`.

`auto` measures the packages that are installed, once per process and shape of heads, and logs the
result. A package whose results differ from triton's is not taken.
"""

import functools
import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from quire.base.errors import ConfigError
from quire.ops.attention.base import AttentionBackend, KVLayout
from quire.ops.attention.triton_gpu import TritonBackend
from quire.ops.attention_inputs import AttentionStep, Scores
from quire.ops.prompt_kernels.base import Heads, PagedStep, PromptKernel
from quire.ops.prompt_kernels.cudnn import CuDNN
from quire.ops.prompt_kernels.flash_attention import FlashAttention3
from quire.ops.prompt_kernels.flashinfer import FlashInfer
from quire.ops.registry import op
from quire.spec.cache_group import CHUNKED, FULL, STATE, CacheGroup

logger = logging.getLogger(__name__)

KERNELS: dict[str, type[PromptKernel]] = {
    kernel.name: kernel for kernel in (FlashInfer, FlashAttention3, CuDNN)
}
PROMPT = 2048  # tokens of the measured prompt
GROUP_SIZE = 4  # query heads of a KV head in the measurement
NUM_TIMES = 5  # measured runs, of which the fastest counts
TOLERANCE = 0.03  # absolute difference of results that bfloat16 explains


class PackageBackend(TritonBackend):
    """Triton's backend with a package's kernel for prompts. Raises ConfigError if the kernel cannot
    serve the layout."""

    def __init__(self, layout: KVLayout, kernel: PromptKernel) -> None:
        reason = why_not(kernel, layout)
        if reason is not None:
            raise ConfigError(
                f"attention_backend {kernel.name} cannot be used here: {reason}; take auto."
            )
        super().__init__(layout)
        self.name = kernel.name
        self.takes_any_lengths = False
        self._kernel = kernel
        self._paged: dict[int, PagedStep] = {}

    def prepare(self, step: AttentionStep) -> None:
        """See AttentionBackend."""
        super().prepare(step)
        self._paged = {}

    @op("attention")
    def run(
        self, layer: int, q_TNH: torch.Tensor, scores: Scores, out_TNH: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend for all rows, [T, N, H], by the package's kernel if it serves the step."""
        paged = self._paged_step(layer)
        is_plain = paged.step.ends_T is None and scores.sinks_N is None and not paged.has_chunks
        if not is_plain or not self._kernel.serves(paged, scores):
            return super().run(layer, q_TNH, scores, out_TNH)
        if out_TNH is None:
            out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        kv = self._layers[layer]
        k_BPKH, v_BPKH = kv.k.permute(1, 2, 0, 3), kv.v.permute(1, 2, 0, 3)
        self._kernel.attend(q_TNH, k_BPKH, v_BPKH, paged, scores, out_TNH)
        return out_TNH

    def _paged_step(self, layer: int) -> PagedStep:
        """Return the prepared step for a layer's group; one object per step and group."""
        step, group = self._step, self._location[layer][0]
        assert step is not None, "prepare comes first"
        if group not in self._paged:
            own, size = self._layout.groups[group], self._layout.block_size
            table_SL, has_chunks = step.block_tables_SL[group], own.kind == CHUNKED
            self._paged[group] = PagedStep(step, table_SL, size, own.window, has_chunks)
        return self._paged[group]


def why_not(kernel: PromptKernel, layout: KVLayout) -> str | None:
    """Return the reason why a package's kernel cannot serve the layout; None if it can."""
    if layout.kv_format != "auto":
        return f"it reads keys and values of the model's dtype, not {layout.kv_format}"
    sizes = {group.head_dim for group in layout.groups if group.kind != STATE}
    reasons = (kernel.why_not(Heads(size, layout.dtype, layout.device)) for size in sorted(sizes))
    return next((reason for reason in reasons if reason is not None), None)


def fastest_for_prompts(layout: KVLayout) -> str:
    """Return the name of the backend that is fastest for prompts: triton, or that of an installed
    package."""
    names = tuple(
        name for name, kernel in KERNELS.items()
        if kernel.is_measured and why_not(kernel(), layout) is None
    )  # fmt: skip
    if not names:
        return TritonBackend.name
    group = max((each for each in layout.groups if each.kind != STATE), key=lambda g: g.head_dim)
    heads = group.num_kv_heads, group.head_dim
    return _measured(names, *heads, layout.block_size, layout.dtype, layout.device)


@functools.cache
def _measured(
    names: tuple[str, ...],
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str:
    group = CacheGroup(FULL, (0,), num_kv_heads, head_dim)
    layout = KVLayout((group,), (-(-PROMPT // block_size),), block_size, dtype, device)
    makers: dict[str, Callable[[], AttentionBackend]] = {"triton": lambda: TritonBackend(layout)}
    makers |= {name: functools.partial(_make, name, layout) for name in names}
    return choose(makers, layout)


def _make(name: str, layout: KVLayout) -> AttentionBackend:
    return PackageBackend(layout, KERNELS[name]())


@torch.inference_mode()
def choose(
    makers: dict[str, Callable[[], AttentionBackend]],
    layout: KVLayout,
    seconds: Callable[[Callable[[], object], torch.device], float] | None = None,
) -> str:
    """Return the fastest of some backends for a prompt. The first one is the measure of results: a
    backend that fails or differs from it is not taken. seconds: times a call on a device."""
    time_of, found, expected = seconds or fastest_run, dict[str, float](), None
    for name, make in makers.items():
        try:
            backend = make()
            run = prompt_run(backend, layout)
            result = run()
            if expected is None:
                expected = result
            difference = float((result.float() - expected.float()).abs().max())
            if not difference <= TOLERANCE:
                logger.warning("attention by %s differs by %.3g and is not used", name, difference)
                continue
            found[name] = time_of(run, layout.device)
        except Exception as error:  # of any kind: a package must not stop the engine
            if expected is None:
                raise
            logger.warning("attention by %s failed and is not used: %s", name, error)
    best = min(found, key=found.__getitem__)
    times = ", ".join(f"{name} {1e6 * each:.0f} us" for name, each in found.items())
    logger.info("attention of a prompt of %d tokens: %s; taking %s", PROMPT, times, best)
    return best


def prompt_run(backend: AttentionBackend, layout: KVLayout) -> Callable[[], torch.Tensor]:
    """Prepare a step with one prompt and write its keys; return the call that attends."""
    [group], device = layout.groups, layout.device
    length = layout.num_blocks[0] * layout.block_size
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(length, num_heads, group.head_dim, generator=generator).to(device, layout.dtype)
        for num_heads in (GROUP_SIZE * group.num_kv_heads, *[group.num_kv_heads] * 2)
    )
    lengths = np.array([length], np.int32)
    order = torch.randperm(layout.num_blocks[0], generator=generator)
    slots = (order[:, None] * layout.block_size + torch.arange(layout.block_size)).flatten()
    step = AttentionStep(
        torch.arange(length, device=device),
        torch.tensor([0, length], dtype=torch.int32, device=device),
        torch.tensor([length], dtype=torch.int32, device=device),
        (slots.to(device),),
        (order[None].to(device, torch.int32),),
        lengths,
        lengths,
    )
    backend.prepare(step)
    backend.write(0, k, v)
    return functools.partial(backend.run, 0, q, Scores(group.head_dim**-0.5))


def fastest_run(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of some runs, after one to warm up."""
    times = []
    for _ in range(1 + NUM_TIMES):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])
