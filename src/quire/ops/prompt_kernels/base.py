"""Interface of attention kernels that installed packages provide for prompts.

Shape legend: T tokens of the step, S rows, N query heads, K KV heads, H head dim, B blocks, P
tokens per block, L longest block table.

Keys and values of a layer are views [B, P, K, H] of quire's blocks, whose heads are far apart in
memory. Kernels read them in place.
"""

import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from quire.ops.attention_inputs import AttentionStep, Scores

MIN_PROMPT = 64  # tokens of a row that count as a prompt


@dataclass(frozen=True)
class Heads:
    """Properties of a layer's keys and values that decide whether a kernel serves them."""

    head_dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, eq=False)
class PagedStep:
    """A step for the layers of one cache group. table_SL: the group's block tables, int32.
    has_chunks: whether a token sees its own chunk of `window` tokens."""

    step: AttentionStep
    table_SL: torch.Tensor
    block_size: int
    window: int | None = None
    has_chunks: bool = False

    @property
    def has_prompt(self) -> bool:
        return int(self.step.query_lens_host.max(initial=0)) >= MIN_PROMPT

    @property
    def has_only_prompts(self) -> bool:
        """Whether each row with tokens is a prompt. The host knows the lengths of prompts exactly.
        Lengths of other rows may depend on drafts in flight."""
        lengths = self.step.query_lens_host
        return self.has_prompt and not ((lengths > 0) & (lengths < MIN_PROMPT)).any()


class PromptKernel(ABC):
    """Kernel of a package. name: of the attention backend. package: to install. module: to import.
    is_measured: whether `auto` measures it where the package is installed."""

    name: str
    package: str
    module: str
    is_measured = True

    def why_not(self, heads: Heads) -> str | None:
        """Return the reason why the kernel cannot serve these heads; None if it can."""
        if importlib.util.find_spec(self.module) is None:
            return f"the package {self.package} is not installed"
        if heads.device.type != "cuda":
            return f"it is for GPUs, not {heads.device.type}"
        if heads.dtype not in (torch.float16, torch.bfloat16):
            return f"it has float16 and bfloat16, not {heads.dtype}"
        return self.why_not_on(torch.cuda.get_device_capability(heads.device), heads.head_dim)

    def why_not_on(self, capability: tuple[int, int], head_dim: int) -> str | None:
        """Return the reason why the kernel cannot serve heads of this size on such a GPU."""
        if capability < (8, 0):
            return f"it needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
        return None

    def load(self) -> Any:
        """Import the package's module."""
        return importlib.import_module(self.module)

    def serves(self, paged: PagedStep, scores: Scores) -> bool:
        """Return whether the kernel can attend for all rows of a step without sinks and ends."""
        return paged.has_prompt

    @abstractmethod
    def attend(
        self,
        q_TNH: torch.Tensor,
        k_BPKH: torch.Tensor,
        v_BPKH: torch.Tensor,
        paged: PagedStep,
        scores: Scores,
        out_TNH: torch.Tensor,
    ) -> None:
        """Write the attention of a step's queries, [T, N, H], to `out`. Never waits for the GPU."""
