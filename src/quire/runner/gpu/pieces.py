"""Work recorded as one graph, or in pieces between the calls of attention.

Attention does most of the work of a long context and chooses how to cut it by the step's lengths;
left out of the graphs it is launched anew each time, and all else is replayed (T 4.6). The pieces
are found by running the model once: its attention calls end one graph and begin the next. A step
with token masks is cut between logits and sampling, too: there the host waits for them.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from quire.ops.attention.base import AttentionBackend, ForwardingBackend
from quire.ops.attention_inputs import Scores
from quire.runner.device import Device, Graph

Step = Callable[[AttentionBackend, Callable[[], None]], list[torch.Tensor]]


@dataclass
class Pieces:
    """Launches, in their order, and what the work returned: memory that each replay fills anew.
    num_before: how many come before the step's masks."""

    launches: list[Callable[[], object]] = field(default_factory=list)
    outputs: Sequence[torch.Tensor] = ()
    num_before: int = 0

    def begin(self) -> None:
        for launch in self.launches[: self.num_before]:
            launch()

    def end(self) -> None:
        for launch in self.launches[self.num_before :]:
            launch()


class CutAtAttention(ForwardingBackend):
    """A backend whose `run` ends a graph, notes the call, and begins the next graph."""

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

    def cut_for_masks(self) -> None:
        """End a graph, and begin the one that comes after the step's masks."""
        self.end()
        self._pieces.num_before = len(self._pieces.launches)
        self.begin()

    def run(
        self, layer: int, q_TNH: torch.Tensor, scores: Scores, out_TNH: torch.Tensor | None = None
    ) -> torch.Tensor:
        """End a graph, note the call, begin the next. Attention's result has its place in the
        memory of graphs, as its queries have: later layers and other sizes use both again, as
        launches keep their order."""
        if out_TNH is None:
            out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        self.end()
        q, out = self._device.borrow(q_TNH), self._device.borrow(out_TNH)
        self._pieces.launches.append(partial(self.inner.run, layer, q, scores, out))
        self.begin()
        return out_TNH


def record(device: Device, backend: AttentionBackend, step: Step, *, in_pieces: bool) -> Pieces:
    """Record what `step` launches with this backend; nothing of it is done. The step calls its
    second argument where masks come in. Raises what the step raises, and OutOfMemoryError."""
    pieces = Pieces()
    cutting = CutAtAttention(backend, device, pieces)
    collects = gc.isenabled()
    gc.disable()  # what it frees might ask the device something, which would end the recording
    try:
        cutting.begin()
        try:
            pieces.outputs = step(cutting if in_pieces else backend, cutting.cut_for_masks)
        finally:
            cutting.end()
    finally:
        if collects:
            gc.enable()
    return pieces
