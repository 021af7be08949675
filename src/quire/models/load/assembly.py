"""Fill and pack a model layer by layer, so that the model never exists twice in memory.

The first tensor of a layer allocates its memory. The last one packs its weight, quantised if
requested, and frees the unpacked weight. Tensors of quantised weights stay mapped until all tensors
of their layer have arrived. Layers that share a parameter (a head tied to the embedding) are
allocated and packed together.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from types import MappingProxyType

import torch
from torch import nn

from quire.base.errors import ConfigError, ModelError
from quire.models.checkpoint.files import listed
from quire.models.checkpoint.formats import WeightFormats
from quire.models.checkpoint.rank_place import WHOLE, RankPlace
from quire.models.checkpoint.sources import Source
from quire.models.load.packing import Stored, format_of, pack_modules
from quire.models.model import Model
from quire.models.parts.experts import SparseMLP
from quire.models.parts.layers import (
    Embedding,
    Layer,
    Linear,
    LMHead,
    ParamFactory,
    set_weight,
)
from quire.models.parts.pooling_layers import CLASSIFIER_TENSORS
from quire.models.quantised.layers import QUANTISABLE, Quantisable, QuantisedLayer
from quire.models.registry import can_share, class_of
from quire.ops.host.host_memory import HugeMemory, forget_pages, passing_memory
from quire.ops.weights.device_weights import pack_merged
from quire.ops.weights.formats import Quantization
from quire.ops.weights.mapped_tensors import MappedTensors
from quire.ops.weights.pack import block_row_bytes, can_pack_natively, pack_parts
from quire.spec.model_spec import ModelSpec

Fill = Callable[[Source], None]  # copies a checkpoint's tensor to the destination of its source
LARGE_BYTES = 1 << 20
META = torch.device("meta")


class EmptyParamFactory(ParamFactory):
    """Factory of parameters without memory, on the meta device."""

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        values = torch.empty(shape, dtype=dtype or self.dtype, device=META)
        return nn.Parameter(values, requires_grad=False)


def empty_model(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, place: RankPlace = WHOLE
) -> Model:
    """Build a model, or a rank's part of it, with parameters that have no memory.

    spec: spec of the whole model. Raises ModelError for an unknown type, and ConfigError if the
    ranks or stages cannot divide the model.
    """
    assert spec.num_ranks == 1, "layers take their part of the whole model themselves"
    spec.of_ranks(place.tensor.size, has_whole_experts=place.has_whole_experts)
    if place.tensor.size > 1 and not can_share(spec):
        raise ConfigError(
            f"models of type {spec.model_type!r} come from another package, whose class does not"
            " declare that ranks can share its layers (shares_layers); remove"
            f" tensor_parallel_size={place.tensor.size}."
        )
    model = class_of(spec)(spec, EmptyParamFactory(dtype, device, place)).eval()
    if spec.pooling is not None:
        model.leave_head(CLASSIFIER_TENSORS)
    if place.num_stages > 1 and not model.has_stages:
        raise ConfigError(
            f"pipeline_parallel_size={place.num_stages} needs a model with one of quire's classes;"
            f" {spec.model_type} runs by {model.runs_by}, which cannot be divided into stages."
            " Remove it."
        )
    return model


class Unit:
    """Modules that share parameters; in most cases one module.

    sources: names of tensors that have not arrived. arrived: mapped tensors that wait for the
    others. parameters: first owner of each parameter, and its name in that module.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.parameters: list[tuple[nn.Module, str]] = []
        self.sources: set[str] = set()
        self.arrived: dict[str, torch.Tensor] = {}
        self.is_made = self.is_packed = False

    def make(
        self, device: torch.device, stored: Stored, without: Container[nn.Module] = ()
    ) -> None:
        """Allocate memory for the parameters that have none; weights stored as blocks get memory
        for the blocks. without: modules whose weights are packed straight from the mapped file."""
        made: dict[int, nn.Parameter] = {}
        if self.is_made:
            return
        found = [stored[module] for module in self.modules if module in stored]
        in_blocks = (e for e in found if not isinstance(e, QuantisedLayer) and e.as_blocks)
        blocks = next((each.formats for each in in_blocks), ())
        for module in self.modules:
            for name, old in list(module.named_parameters(recurse=False)):
                is_filled = name != "weight" or module not in without
                if old.device == META and is_filled:
                    if id(old) not in made:
                        made[id(old)] = _with_memory(old, device, blocks)
                    setattr(module, name, made[id(old)])
        self.is_made = True


def _with_memory(
    empty: nn.Parameter, device: torch.device, blocks: Sequence[Quantization]
) -> nn.Parameter:
    shape, dtype = tuple(empty.shape), empty.dtype
    if blocks and len(shape) == 2:
        row_bytes = max(block_row_bytes(each, shape[1]) for each in blocks)
        shape, dtype = (shape[0], row_bytes), torch.uint8
    if device.type == "cpu" and empty.nbytes >= LARGE_BYTES:
        values = passing_memory(shape, dtype)
    else:
        values = torch.empty(shape, dtype=dtype, device=device)
    return nn.Parameter(values, requires_grad=False)


class Assembly:
    """A model from `empty_model` while tensors fill it.

    mapped: tensors that files map (`put`); the core packs its weights straight from there.
    """

    def __init__(
        self,
        model: Model,
        device: torch.device,
        formats: WeightFormats,
        stored: Stored = MappingProxyType({}),
        mapped: MappedTensors | None = None,
    ) -> None:
        self.model = model
        self._device, self._formats, self.stored = device, formats, stored
        self._memory, self._mapped = HugeMemory(), mapped
        self._units = _units(model)
        self._layers_by_tensor: dict[str, list[tuple[Unit, Layer]]] = {}
        self._waiting: dict[str, list[Unit]] = {}  # units that wait for a tensor of this name
        self._zeros: set[str] = set()
        self.waiting_bytes = 0
        # Sources of the layers that are packed straight from the mapped file.
        self._parts: dict[nn.Module, list[Source]] = {}
        self._without: set[nn.Module] = set()
        for unit in self._units:
            if mapped is not None and device.type == "cpu":
                self._find_parts(unit)
            for layer in unit.modules:
                if isinstance(layer, Layer):
                    self._record_tensors(unit, layer)

    def _find_parts(self, unit: Unit) -> None:
        """Record the unquantised weights of a unit that the core packs."""
        for layer in unit.modules:
            if not isinstance(layer, Linear | LMHead) or layer in self.stored:
                continue
            if can_pack_natively(layer.weight.dtype, self._device):
                tables = _tables_of(layer, unit)
                owners: list[Layer] = [*tables] or [layer]
                self._parts[layer] = [
                    source
                    for owner in owners
                    for source in owner.sources()
                    if source.destination.dim() == 2
                ]
                self._without |= {layer, *tables}

    def _record_tensors(self, unit: Unit, layer: Layer) -> None:
        """Record which tensors fill a layer of a unit."""
        found = self.stored.get(layer)
        parts = found.parts if isinstance(found, QuantisedLayer) else {}
        if isinstance(found, QuantisedLayer) and found.stays_quantised:
            self._without.add(layer)
        for source in layer.sources():
            part = parts.get(source.name)
            names = [source.name] if part is None else part.tensors.values()
            unit.sources.update(names)
            if part is None and (layer not in self._without or source.destination.dim() != 2):
                self._layers_by_tensor.setdefault(source.name, []).append((unit, layer))
                continue
            for name in names:
                self._waiting.setdefault(name, []).append(unit)
            if part is not None:
                self._waiting |= {name: [] for name in (*part.unused, *part.zeros)}
                self._zeros |= set(part.zeros)

    @property
    def missing(self) -> list[str]:
        """Return the names of the tensors that have not arrived."""
        return sorted(name for unit in self._units for name in unit.sources)

    def fill(self, name: str, fill: Fill) -> bool:
        """Call `fill` with every source that reads the tensor of this name. Return whether a layer
        needs the tensor. A tensor that arrives twice is ignored."""
        fillers = self._layers_by_tensor.get(name, [])
        for unit, layer in fillers:
            if name in unit.sources:
                self._make(unit)
                fill(layer.source(name))
                unit.sources.remove(name)
                if not unit.sources:
                    self._pack(unit)
        return bool(fillers)

    def put(self, name: str, tensor: torch.Tensor) -> bool:
        """Fill from a mapped tensor of any shape, such as [N, K], or store it until its unit is
        complete. Return whether a layer needs it. Raises ModelError for a bias that must be 0."""
        if name not in self._waiting:
            return self.fill(name, lambda source: source.fill(tensor))
        if name in self._zeros and tensor.any():
            raise ModelError(f"the tensor {name} is not 0, but the model has no such bias.")
        units = dict.fromkeys(unit for unit in self._waiting[name] if name in unit.sources)
        for unit in units:
            unit.arrived[name] = tensor
            unit.sources.remove(name)
            self.waiting_bytes += tensor.nbytes // len(self._waiting[name])
        for unit in units:
            if not unit.sources:
                self._make(unit)
                self._pack(unit)
        return True

    def fill_all(self, fill: Callable[[nn.Module, str, nn.Parameter], None]) -> None:
        """Call `fill` once for each parameter, in the order of the model's modules."""
        for unit in self._units:
            self._make(unit)
            for module, name in unit.parameters:
                fill(module, name, module.get_parameter(name))
            unit.sources.clear()
            self._pack(unit)

    def finish(self) -> Model:
        """Return the complete model. Allocate the parameters that no tensor fills."""
        assert not self.missing
        for unit in self._units:
            if not unit.is_packed:
                self._make(unit)
                self._pack(unit)
        for module in self.model.modules():
            if isinstance(module, SparseMLP):
                module.finish(self._device)
        return self.model

    def _make(self, unit: Unit) -> None:
        unit.make(self._device, self.stored, self._without)

    def _pack(self, unit: Unit) -> None:
        for layer in unit.modules:
            found = self.stored.get(layer)
            if isinstance(found, QuantisedLayer) and isinstance(layer, QUANTISABLE):
                self._fill_quantised(layer, found, unit.arrived)
            elif layer in self._parts and isinstance(layer, Linear | LMHead):
                self._pack_parts(layer, unit)
        for name, tensor in unit.arrived.items():
            forget_pages(tensor)
            self.waiting_bytes -= tensor.nbytes // len(self._waiting[name])
        unit.arrived = {}
        others = [module for module in unit.modules if module not in self._without]
        pack_modules(others, self._formats, self._memory, self.stored)
        unit.is_packed = True

    def _pack_parts(self, layer: Linear | LMHead, unit: Unit) -> None:
        """Pack a plain weight straight from its mapped tensors. A tied table shares the packed
        weight if that supports look-ups; otherwise it is filled."""
        parts = [source.taken(unit.arrived[source.name]) for source in self._parts[layer]]
        format = format_of(layer, self._formats)
        tables = _tables_of(layer, unit)
        weight = pack_parts(parts, layer.weight.dtype, format, self._memory, self._mapped)
        set_weight(layer, weight)
        for table in tables:
            table.share(weight)
            if isinstance(table.weight, nn.Parameter):
                table.weight = _with_memory(table.weight, self._device, ())
                for source in table.sources():
                    source.fill(unit.arrived[source.name])

    def _fill_quantised(
        self, layer: Quantisable, found: QuantisedLayer, arrived: dict[str, torch.Tensor]
    ) -> None:
        if found.stays_quantised:
            pieces, dtype = found.pieces(layer.sources(), arrived), layer.weight.dtype
            try:
                weight = pack_merged(pieces, dtype, self._device, self._memory)
            except ConfigError as error:
                raise ConfigError(f"{listed(list(found.outputs))}: {error}") from error
            set_weight(layer, weight)
            return
        for name, part in found.parts.items():
            part.fill(layer.source(name).destination, arrived)


def _tables_of(layer: nn.Module, unit: Unit) -> list[Embedding]:
    """Return the embeddings whose table a head shares."""
    if not isinstance(layer, LMHead):
        return []
    tables = [module for module in unit.modules if isinstance(module, Embedding)]
    return [table for table in tables if table.weight is layer.weight]


def _units(model: nn.Module) -> list[Unit]:
    """Return the units in the order of the model's modules."""
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
    """Yield (name in the model, owner, name in the owner) of each parameter and packed weight. A
    shared weight appears once for each owner."""
    for prefix, module in model.named_modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if "weight" not in names and "weight" in vars(module):
            names.append("weight")
        for name in names:
            yield f"{prefix}.{name}".removeprefix("."), module, name
