"""The engine's forward pass for a trainer: the same packed weights, program and log-probabilities.

Shape legend: T tokens, R rows with logits, V vocabulary, D model dim, L layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quire.models.checkpoint.formats import IN_THE_DTYPE
from quire.models.load.assembly import Assembly, empty_model
from quire.models.model import Model
from quire.ops.attention.base import KVLayout
from quire.ops.attention.cpu import CpuBackend
from quire.ops.embedding import select_rows
from quire.ops.host.threads import torch_threads
from quire.ops.sampling.logprobs import token_logprobs
from quire.runner.native_model import NativeModel
from quire.spec.model_spec import ModelSpec
from quire.training.packing import BLOCK_SIZE, PackedStep

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class PassValues:
    """The engine's values of a step. inputs: float32 [T, D] of each layer and, last, of the
    final norm. hidden_TD: float32, after the final norm."""

    inputs: tuple[torch.Tensor, ...]
    hidden_TD: torch.Tensor


class EnginePass:
    """A model that the C++ core runs in one call, as the engine does. Its weights are replaced as
    a whole. dtype: of weights, keys and values."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._spec, self._dtype = spec, dtype
        self._num_blocks = 0
        self._backend: CpuBackend | None = None
        self._model: Model | None = None
        self._native: NativeModel | None = None

    def __reduce__(self) -> tuple[type["EnginePass"], tuple[ModelSpec, torch.dtype]]:
        """Copy and pickle the pass without weights, which each forward pass loads."""
        return EnginePass, (self._spec, self._dtype)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Pack weights, given by their names in the checkpoint and in any float dtype."""
        self._model = self._native = None  # frees the memory of the old weights
        assembly = Assembly(empty_model(self._spec, self._dtype, CPU), CPU, IN_THE_DTYPE)
        for name, tensor in tensors.items():
            assembly.put(name, tensor)
        self._model = assembly.finish()
        self._model.record_layer_inputs(range(self._spec.num_layers + 1))

    def run(self, step: PackedStep) -> PassValues:
        """Compute all tokens of a step."""
        native = self._native_for(step.num_blocks)
        native.backend.prepare(step.attention(len(self._spec.cache_groups)))
        with torch_threads(1):
            hidden_TD = native(step.ids_T, step.positions_T, native.backend)
        inputs = native.recorded_inputs(len(step.ids_T)).split(self._spec.hidden_size, dim=1)
        return PassValues(inputs, hidden_TD)

    def logprobs(
        self, hidden_TD: torch.Tensor, rows_R: torch.Tensor, ids_R: torch.Tensor
    ) -> torch.Tensor:
        """Return the log-probabilities of tokens after some rows, float32 [R]."""
        assert self._native is not None, "run comes first"
        with torch_threads(1):
            logits_RV = self._native.logits(select_rows(hidden_TD, rows_R))
            return token_logprobs(logits_RV, ids_R, 0).logprobs[:, 0]

    def _native_for(self, num_blocks: int) -> NativeModel:
        """Return the model over at least so many blocks of KV memory."""
        assert self._model is not None, "load comes first"
        if self._backend is None or num_blocks > self._num_blocks:
            groups, self._num_blocks = self._spec.cache_groups, num_blocks
            sizes = (num_blocks,) * len(groups)
            layout = KVLayout(groups, sizes, BLOCK_SIZE, self._dtype, CPU)
            self._backend, self._native = CpuBackend(layout), None
        if self._native is None:
            self._native = NativeModel(self._model, self._backend)
        return self._native
