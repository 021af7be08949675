"""Save a start with torch, so that later starts can do without torch."""

import logging
from bisect import bisect_right
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch

from quire.base.settings.config import EngineConfig
from quire.models.checkpoint.source import ModelSource
from quire.models.load.cache_files import Bytes
from quire.models.load.weight_cache import indexed
from quire.models.model import Model
from quire.models.registry import OWN
from quire.ops.attention.cpu import CpuBackend
from quire.ops.host.pages import aligned
from quire.ops.trace.program import Untraceable
from quire.runner.native_model import NativeModel
from quire.runner.native_program import layer_indices
from quire.runner.warm.blocks import LayerPosition
from quire.runner.warm.conditions import can_save_start, path_for
from quire.runner.warm.start_file import IN_START, IN_WEIGHTS, Start, write_start
from quire.spec.model_spec import ModelSpec

logger = logging.getLogger("quire")


def save_start(
    config: EngineConfig,
    source: ModelSource,
    spec: ModelSpec,
    native: object,
    weights_bytes: int,
    copy_bytes_per_s: float,
) -> None:
    """Save the start of a model if possible, replacing an unusable earlier one. config: as given.
    native: the runner's model."""
    if not isinstance(native, NativeModel) or not isinstance(native.model, Model):
        return
    if not can_save_start(spec) or spec.model_type not in OWN:
        return
    path = path_for(config, source)
    if path is not None:
        try:
            _save(path, native, native.model, weights_bytes, copy_bytes_per_s)
        except Untraceable as reason:
            logger.debug("the warm start file cannot be saved: %s", reason)


def _save(
    path: Path, native: NativeModel, model: Model, weights_bytes: int, copy_bytes_per_s: float
) -> None:
    backend, draft = native.backend, native.compiled.draft
    heads = [(group, heads) for group, heads in native.compiled.heads.items() if heads is not None]
    tensor_index = _TensorIndex(model)
    start = Start(
        model.weights_key,
        weights_bytes,
        copy_bytes_per_s,
        backend.variant,
        native.hidden_size,
        tuple(heads),
        tuple(_layer_positions(backend, [group for group, _ in heads])),
        draft.parts(layer_indices(backend), tensor_index),
        native.head.parts({}, tensor_index),
        (np.empty(0, np.uint8), np.empty(0, np.uint8)),
    )
    write_start(path, start, tensor_index.own)


def _layer_positions(backend: CpuBackend, groups: list[int]) -> list[LayerPosition]:
    tensor_index = [backend.location(layer) for layer in backend.layers]
    return [
        LayerPosition(groups.index(group) if group in groups else 0, group, index)
        for group, index in tensor_index
    ]


class _TensorIndex:
    """Index of tensors by address: in the file of weights, or else in `own`, which this fills with
    pairs of an offset and bytes."""

    def __init__(self, model: Model) -> None:
        self._model = model  # keeps the memory at these addresses alive
        self._weights = list[tuple[int, int, int]]()  # address, end, offset; in order
        if model.weights_key is not None:
            for entry, piece in zip(*indexed(model), strict=True):
                begin = piece.ctypes.data
                self._weights.append((begin, begin + len(piece), entry["offset"]))
        self._weights.sort()
        self._offsets = dict[tuple[int, int], int]()
        self._tensors = list[torch.Tensor]()
        self.own = list[tuple[int, Bytes]]()

    def __call__(self, tensor: torch.Tensor) -> tuple[int, int]:
        address, size = tensor.data_ptr(), tensor.nbytes
        at = bisect_right(self._weights, address, key=itemgetter(0)) - 1
        if at >= 0:
            begin, end, offset = self._weights[at]
            if address + size <= end:
                return IN_WEIGHTS, offset + address - begin
        if (address, size) not in self._offsets:
            end = self.own[-1][0] + len(self.own[-1][1]) if self.own else 0
            self._offsets[address, size] = aligned(end)
            self._tensors.append(tensor)
            self.own.append((aligned(end), tensor.contiguous().view(-1).view(torch.uint8).numpy()))
        return IN_START, self._offsets[address, size]
