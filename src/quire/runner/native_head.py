"""An EAGLE-3 head whose passes are one call each into the C++ core.

Shape legend: T tokens, R rows, E what comes out of a pass, F numbers of the target that are read of
each token, V the target's vocabulary.
"""

import logging
from typing import Any

import torch

from quire.models.eagle3 import Eagle3
from quire.ops.attention.base import AttentionBackend
from quire.ops.attention.cpu import CpuBackend
from quire.ops.attention.traced import TracedAttention
from quire.ops.program import Untraceable
from quire.runner.native_model import NativePass
from quire.runner.native_program import TRACED_TOKENS, traced

logger = logging.getLogger(__name__)


class NativeHead:
    """Computes what the head does, in float32 between its weights. Raises Untraceable where the
    core cannot. The head is attached to its target before."""

    def __init__(self, head: Eagle3, backend: CpuBackend) -> None:
        self.num_read, self._head, self._backend = head.num_read, head, backend
        self._first = _native(head.first, head.num_read, head, backend)
        self._further = _native(head.further, head.num_out, head, backend)

    def first(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        read_TF: torch.Tensor | None,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """See Eagle3; float32."""
        assert read_TF is not None
        return self._run(self._first, ids_T, positions_T, read_TF)

    def further(
        self,
        ids_R: torch.Tensor,
        positions_R: torch.Tensor,
        out_RE: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """See Eagle3; float32."""
        return self._run(self._further, ids_R, positions_R, out_RE)

    def logits(self, out_RE: torch.Tensor) -> torch.Tensor:
        """See Eagle3."""
        return self._head.logits(out_RE)

    def _run(
        self, made: NativePass, ids: torch.Tensor, positions: torch.Tensor, given: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty(len(ids), self._head.num_out)
        made.run(ids, positions, [out, given.float().contiguous()])
        return out


def _native(compute: Any, width: int, head: Eagle3, backend: CpuBackend) -> NativePass:
    """Trace one of the head's passes; width: of what it is given beside ids and positions."""

    def run(ids_T: torch.Tensor, positions_T: torch.Tensor) -> list[torch.Tensor]:
        given = torch.zeros(TRACED_TOKENS, width, dtype=head.dtype)
        return [compute(ids_T, positions_T, given, TracedAttention()), given]

    return NativePass(traced(run), backend)


def native_head(head: Eagle3, backend: AttentionBackend) -> Eagle3 | NativeHead:
    """Return the head in its native form where there is one, else itself."""
    if not isinstance(backend, CpuBackend):
        return head
    try:
        return NativeHead(head, backend)
    except Untraceable as reason:
        logger.warning("The EAGLE-3 head runs operation by operation: %s.", reason)
        return head
