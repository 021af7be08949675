"""Collect the outputs of a model's parts for one sequence, for quire's and transformers' models.

Shape legend: T tokens of a pass, L tokens of the sequence, D any dimension.

A point is a place in the model whose numbers both sides have. Points are the input of the first
layer, each attention's output, the residual stream after each layer, the head's input, and the
logits.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

EMBEDDING, HIDDEN, LOGITS = "embedding", "hidden", "logits"
Trace = dict[str, torch.Tensor]  # [L, D] by point, in the order of computation


def layer_point(layer: int) -> str:
    return f"layers.{layer}"


def attention_point(layer: int) -> str:
    return f"layers.{layer}.attention"


class Watcher:
    """Records a model's passes while `watching`, for the pass's tokens in `rows`.

    head: the model's head, whose input is a point. Points that a model lacks are omitted.
    """

    def __init__(self, model: nn.Module, num_layers: int, head: nn.Module) -> None:
        self._model, self._head = model, head
        self._layers = _layers(model, num_layers)
        self._pieces: dict[str, list[torch.Tensor]] = {}
        self.rows = slice(None)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the outputs of the model's parts within this context."""
        handles = [self._before(self._head, HIDDEN)]
        for number, layer in enumerate(self._layers):
            if number == 0:
                handles.append(self._before(layer, EMBEDDING))
            attention = _attention(layer)
            if attention is not None:
                handles.append(self._after(attention, attention_point(number)))
            handles.append(self._after(layer, layer_point(number)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def trace(self, logits_LV: torch.Tensor) -> Trace:
        """Return the records [L, D] by point, in the model's order, and clear them."""
        order = [EMBEDDING]
        for number in range(len(self._layers)):
            order += [attention_point(number), layer_point(number)]
        pieces, self._pieces = self._pieces, {}
        found = {name: torch.cat(pieces[name]) for name in (*order, HIDDEN) if name in pieces}
        return found | {LOGITS: logits_LV}

    def _before(self, module: nn.Module, point: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            self._note(point, args[0] if args else kwargs.get("hidden_states"))

        return module.register_forward_pre_hook(note, with_kwargs=True)

    def _after(self, module: nn.Module, point: str) -> Any:
        def note(module: nn.Module, args: object, output: Any) -> None:
            self._note(point, _stream(output))

        return module.register_forward_hook(note)

    def _note(self, point: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            rows_TD = value.detach().reshape(-1, value.shape[-1])[self.rows]
            self._pieces.setdefault(point, []).append(rows_TD.cpu().clone())


def _stream(output: Any) -> Any:
    """Return the residual stream, the sum of two parts in quire's layers; or attention's output."""
    if not isinstance(output, tuple):
        return output
    first, *others = output
    second = others[0] if others else None
    if isinstance(second, torch.Tensor) and second.shape == first.shape:
        return first + second
    return first


def _layers(model: nn.Module, num_layers: int) -> list[nn.Module]:
    """Return the model's layers: the first module list of length `num_layers`."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    return []


def _attention(layer: nn.Module) -> nn.Module | None:
    """Return the child of a layer whose class name contains Attention."""
    return next((m for m in layer.children() if "Attention" in type(m).__name__), None)
