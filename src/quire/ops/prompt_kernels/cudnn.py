"""cuDNN's attention through torch, for whole prompts and first chunks.

torch gives cuDNN no causal mask for queries that follow other keys, so each row must begin its
sequence. Keys and values are gathered from the blocks first. Shape legend: as in base.py.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.ops.attention_inputs import Scores
from quire.ops.prompt_kernels.base import PagedStep, PromptKernel

MAX_HEAD_DIM = 128


class CuDNN(PromptKernel):
    """Kernel that torch brings along. `auto` does not measure it until it is proven on a GPU.
    sdp_backend: torch's implementation."""

    name = "cudnn"
    package = "torch with cuDNN"
    module = "torch"
    is_measured = False

    def __init__(self, sdp_backend: SDPBackend = SDPBackend.CUDNN_ATTENTION) -> None:
        self._sdp_backend = sdp_backend

    def why_not_on(self, capability: tuple[int, int], head_dim: int) -> str | None:
        """See PromptKernel."""
        if not torch.backends.cudnn.is_available():
            return f"the package {self.package} is not installed"
        if head_dim > MAX_HEAD_DIM or head_dim % 8:
            return f"it has heads of up to {MAX_HEAD_DIM} numbers, multiples of 8, not {head_dim}"
        return super().why_not_on(capability, head_dim)

    def serves(self, paged: PagedStep, scores: Scores) -> bool:
        """See PromptKernel."""
        step = paged.step
        begins = (step.query_lens_host == step.context_lens_host) | (step.query_lens_host == 0)
        is_plain = scores.soft_cap is None and paged.window is None
        return is_plain and paged.has_only_prompts and bool(begins.all())

    def attend(
        self,
        q_TNH: torch.Tensor,
        k_BPKH: torch.Tensor,
        v_BPKH: torch.Tensor,
        paged: PagedStep,
        scores: Scores,
        out_TNH: torch.Tensor,
    ) -> None:
        """See PromptKernel."""
        first = 0
        for row, length in enumerate(paged.step.query_lens_host.tolist()):
            if length == 0:
                continue
            blocks = paged.table_SL[row, : -(-length // paged.block_size)].clamp(min=0)
            k_1KCH, v_1KCH = (
                x_BPKH[blocks].flatten(0, 1)[None, :length].transpose(1, 2)
                for x_BPKH in (k_BPKH, v_BPKH)
            )
            tokens = slice(first, first + length)
            with sdpa_kernel(self._sdp_backend):
                found = F.scaled_dot_product_attention(
                    q_TNH[None, tokens].transpose(1, 2), k_1KCH, v_1KCH,
                    is_causal=True, scale=scores.scale, enable_gqa=True,
                )  # fmt: skip
            out_TNH[tokens] = found[0].transpose(0, 1)
            first += length
