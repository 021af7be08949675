"""Work recorded as one graph, or in pieces between the calls of attention.

Attention does most of the work of a long context and chooses how to cut it by the step's lengths.
In pieces, attention is launched again in each step, and all other work is replayed (T 4.6). Running
the model once finds the pieces: each attention call ends one graph and begins the next. A step with
token masks is also cut between logits and sampling, where the host waits for the masks.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from quire.ops.attention.base import AttentionBackend, ForwardingBackend
from quire.ops.attention_inputs import Scores
from quire.runner.device import Device, Graph

Step = Callable[[AttentionBackend, Callable[[], None]], list[torch.Tensor]]


@dataclass
class Pieces:
    """Launches in their order, and the outputs of the work, whose memory each replay overwrites.
    num_before: launches before the step's masks. graphs: the graphs among the launches."""

    launches: list[Callable[[], object]] = field(default_factory=list)
    outputs: Sequence[torch.Tensor] = ()
    num_before: int = 0
    graphs: list[Graph] = field(default_factory=list)

    @property
    def whole(self) -> Graph | None:
        """Return the graph that is the only launch and has no outputs, if there is one."""
        is_whole = len(self.launches) == 1 and not self.outputs
        return self.graphs[0] if is_whole and self.graphs else None

    def begin(self) -> None:
        for launch in self.launches[: self.num_before]:
            launch()

    def end(self) -> None:
        for launch in self.launches[self.num_before :]:
            launch()


class CutAtAttention(ForwardingBackend):
    """Backend whose `run` ends a graph, notes the call, and begins the next graph."""

    name = "cut"
    can_be_recorded = True

    def __init__(self, inner: AttentionBackend, device: Device, pieces: Pieces) -> None:
        super().__init__(inner)
        self._device, self._pieces = device, pieces
        self._graph: Graph | None = None

    def begin(self) -> None:
        self._graph = self._device.begin_capture()

    def end(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            self._device.end_capture(graph)
            self._pieces.launches.append(graph.replay)
            self._pieces.graphs.append(graph)

    def cut_for_masks(self) -> None:
        """End the current graph and begin the graph that follows the step's masks."""
        self.end()
        self._pieces.num_before = len(self._pieces.launches)
        self.begin()

    def run(
        self, layer: int, q_TNH: torch.Tensor, scores: Scores, out_TNH: torch.Tensor | None = None
    ) -> torch.Tensor:
        """End a graph, note the call, begin the next. Queries and result, [T, N, H], lie in the
        memory of graphs. Later layers and other sizes reuse it safely, as launches keep their
        order."""
        if out_TNH is None:
            out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        self.end()
        q, out = self._device.borrow(q_TNH), self._device.borrow(out_TNH)
        self._pieces.launches.append(partial(self.inner.run, layer, q, scores, out))
        self.begin()
        return out_TNH

    def rotary_run(self, *given: Any) -> torch.Tensor:
        """See AttentionBackend: the graph rotates the heads, then `run` ends it."""
        return AttentionBackend.rotary_run(self, *given)

    def run_latent(
        self, layer: int, q_TNL: torch.Tensor, scores: Scores, num_values: int
    ) -> torch.Tensor:
        """Cut as `run` does. Queries [T, N, L] and results [T, N, num_values] lie in the memory of
        graphs."""
        out_TNV = q_TNL.new_empty(*q_TNL.shape[:2], num_values)
        self.end()
        q, out = self._device.borrow(q_TNL), self._device.borrow(out_TNV)

        def launch() -> None:
            out.copy_(self.inner.run_latent(layer, q, scores, num_values))

        self._pieces.launches.append(launch)
        self.begin()
        return out_TNV

    def prefers_expanded(self, min_tokens: int) -> bool:
        """Return False: a graph has one form for steps of all lengths."""
        return False


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage: freed objects might query the device, which would end a recording."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def record(device: Device, backend: AttentionBackend, step: Step, *, in_pieces: bool) -> Pieces:
    """Record the launches of `step` with this backend, without executing them. The step calls its
    second argument where masks are applied. Raises the step's errors, and OutOfMemoryError."""
    pieces = Pieces()
    cutting = CutAtAttention(backend, device, pieces)
    with no_collection():
        cutting.begin()
        try:
            pieces.outputs = step(cutting if in_pieces else backend, cutting.cut_for_masks)
        finally:
            cutting.end()
    return pieces
