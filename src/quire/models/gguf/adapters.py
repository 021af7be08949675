"""The matrices of an adapter (LoRA) in a GGUF file, as they are for quire's layers.

llama.cpp's converter treats B like the rows of the module's weight, and A like its columns. So both
have the file's order, as the weights of a model (weights.py). Quantised matrices are dequantised.

Shape legend: R rank, K inputs, N outputs.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from quire.base.errors import ModelError
from quire.models.checkpoint.adapter_files import AdaptedModule
from quire.models.gguf.dequantise import dequantise
from quire.models.gguf.names import our_name
from quire.models.gguf.value_heads import column_order
from quire.models.gguf.weights import rows_in_file
from quire.spec.gguf.adapter import DOWN_GGUF
from quire.spec.gguf.container import GGUFFile
from quire.spec.gguf.families import FAMILIES
from quire.spec.model_spec import ModelSpec

OTHER_TYPES = {
    "llama": ("llama", "mistral", "mixtral"),
    "deepseek2": ("deepseek_v2", "deepseek_v3"),
    "gpt2": ("gpt2",),
    "minicpm3": ("minicpm3",),
}


class GGUFAdapter:
    """An adapter's file, for a model. Raises ModelError if it is for other models."""

    def __init__(self, file: GGUFFile, spec: ModelSpec) -> None:
        self._file, self._spec = file, spec
        self._architecture = file.text("general.architecture")
        family = FAMILIES.get(self._architecture)
        own = () if family is None else (family.model_type,)
        if spec.model_type not in OTHER_TYPES.get(self._architecture, own):
            raise ModelError(
                f"{file.path} is an adapter for the architecture {self._architecture!r}, and the"
                f" model's type is {spec.model_type}; give an adapter for this model. Types that"
                " have no GGUF files need an adapter in PEFT's format."
            )

    def renamed(self, modules: Sequence[AdaptedModule]) -> tuple[AdaptedModule, ...]:
        """Return the modules with the names of checkpoints."""
        found = []
        for module in modules:
            name = our_name(module.name, self._spec).removesuffix(".weight")
            found.append(replace(module, name=name))
        return tuple(found)

    def matrices(self, module: AdaptedModule) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [R, K] and B [N, R] of a module in float32, in the order of checkpoints."""
        down_RK, up_NR = (self._values(name) for name in (module.down, module.up))
        name = module.down.removesuffix(DOWN_GGUF)
        rows = rows_in_file(name, self._architecture, self._spec, len(up_NR))
        columns = column_order(name, self._spec)
        if rows is not None:
            up_NR = up_NR[rows]
        if columns is not None and len(columns) == down_RK.shape[1]:
            down_RK = down_RK[:, columns]
        return torch.from_numpy(down_RK), torch.from_numpy(up_NR)

    def _values(self, name: str) -> npt.NDArray[np.float32]:
        place = self._file.tensors[name]
        stored = np.frombuffer(self._file.data(place), np.uint8).reshape(place.shape[0], -1)
        return dequantise(place.kind, stored)
