"""Puts a model together layer by layer, so that no second copy of it ever exists.

A layer's memory is taken when its first tensor comes. When its last one is there its weight is
packed, quantised if that is asked for, and the unpacked one is given back. Layers that share a
parameter (a head that is tied to the embedding) are made and packed together.
"""

from collections.abc import Callable, Iterator
from types import MappingProxyType

import torch
from torch import nn

from quire.base.model_spec import ModelSpec
from quire.models.formats import WeightFormats
from quire.models.layers import Layer, ParamFactory, Source
from quire.models.model import Model
from quire.models.packing import Stored, pack_modules
from quire.models.registry import class_of
from quire.ops.formats import Quantization
from quire.ops.host_memory import HugeMemory, passing_memory
from quire.ops.packed import BLOCK_BYTES, BLOCK_VALUES

Fill = Callable[[Source], None]  # writes a checkpoint's tensor to where it belongs
LARGE_BYTES = 1 << 20
META = torch.device("meta")


class EmptyParamFactory(ParamFactory):
    """Where parameters have no memory yet."""

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        values = torch.empty(shape, dtype=dtype or self.dtype, device=META)
        return nn.Parameter(values, requires_grad=False)


def empty_model(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Model:
    """The model with parameters that have no memory. Raises ModelError for an unknown type."""
    return class_of(spec)(spec, EmptyParamFactory(dtype, device)).eval()


class Unit:
    """Modules that share parameters; in most cases it is one module.

    sources: names of the tensors that are still to come. parameters: each one's first owner and
    its name there.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.parameters: list[tuple[nn.Module, str]] = []
        self.sources: set[str] = set()
        self.is_made = self.is_packed = False

    def make(self, device: torch.device, stored: Stored) -> None:
        """Give memory to the parameters that have none. Of what is `stored`, to the blocks."""
        made: dict[int, nn.Parameter] = {}
        if self.is_made:
            return
        found = (stored[module] for module in self.modules if module in stored)
        blocks = next((each.quantization for each in found if each.as_blocks), None)
        for module in self.modules:
            for name, old in list(module.named_parameters(recurse=False)):
                if old.device == META:
                    if id(old) not in made:
                        made[id(old)] = _with_memory(old, device, blocks)
                    setattr(module, name, made[id(old)])
        self.is_made = True


def _with_memory(
    empty: nn.Parameter, device: torch.device, blocks: Quantization | None
) -> nn.Parameter:
    shape, dtype = tuple(empty.shape), empty.dtype
    if blocks is not None and len(shape) == 2:
        row_bytes = shape[1] // BLOCK_VALUES * BLOCK_BYTES[blocks.format]
        shape, dtype = (shape[0], row_bytes), torch.uint8
    if device.type == "cpu" and empty.nbytes >= LARGE_BYTES:
        values = passing_memory(shape, dtype)
    else:
        values = torch.empty(shape, dtype=dtype, device=device)
    return nn.Parameter(values, requires_grad=False)


class Assembly:
    """An empty model (of `empty_model`) that is being filled."""

    def __init__(
        self,
        model: Model,
        device: torch.device,
        formats: WeightFormats,
        stored: Stored = MappingProxyType({}),
    ) -> None:
        self.model = model
        self._device, self._formats, self._stored = device, formats, stored
        self._memory = HugeMemory()
        self._units = _units(model)
        self._places: dict[str, list[tuple[Unit, Layer]]] = {}
        for unit in self._units:
            for layer in unit.modules:
                if isinstance(layer, Layer):
                    for source in layer.sources():
                        unit.sources.add(source.name)
                        self._places.setdefault(source.name, []).append((unit, layer))

    @property
    def missing(self) -> list[str]:
        """Names of the tensors that have not come."""
        return sorted(name for unit in self._units for name in unit.sources)

    def fill(self, name: str, fill: Fill) -> bool:
        """Fill what the tensor of this name belongs to, in all layers that take a part of it; False
        if none asks for it. One that comes again is ignored."""
        places = self._places.get(name, [])
        for unit, layer in places:
            if name in unit.sources:
                unit.make(self._device, self._stored)
                fill(layer.source(name))
                unit.sources.remove(name)
                if not unit.sources:
                    self._pack(unit)
        return bool(places)

    def fill_all(self, fill: Callable[[nn.Module, str, nn.Parameter], None]) -> None:
        """Fill each parameter once, in the order of the model's modules."""
        for unit in self._units:
            unit.make(self._device, self._stored)
            for module, name in unit.parameters:
                fill(module, name, module.get_parameter(name))
            unit.sources.clear()
            self._pack(unit)

    def finish(self) -> Model:
        """The model, once nothing is missing; with memory for what no tensor fills."""
        assert not self.missing
        for unit in self._units:
            if not unit.is_packed:
                unit.make(self._device, self._stored)
                self._pack(unit)
        return self.model

    def _pack(self, unit: Unit) -> None:
        pack_modules(unit.modules, self._formats, self._memory, self._stored)
        unit.is_packed = True


def _units(model: nn.Module) -> list[Unit]:
    """In the order of the model's modules."""
    units: dict[Unit, None] = {}
    unit_of: dict[int, Unit] = {}
    for module in model.modules():
        owned = list(module.named_parameters(recurse=False))
        unit = next((unit_of[id(p)] for _, p in owned if id(p) in unit_of), Unit())
        for name, parameter in owned:
            if id(parameter) not in unit_of:
                unit.parameters.append((module, name))
            unit_of[id(parameter)] = unit
        if owned:
            unit.modules.append(module)
            units[unit] = None
    return list(units)


def all_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(name in the model, owner, name there) of each parameter and each packed weight, also where
    two share one."""
    for prefix, module in model.named_modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if "weight" not in names and "weight" in vars(module):
            names.append("weight")
        for name in names:
            yield f"{prefix}.{name}".removeprefix("."), module, name
