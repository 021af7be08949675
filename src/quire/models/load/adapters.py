"""Adapters of a loaded model: enable them on its linear layers, and load them from their files.

Shape legend: R rank, K inputs, N outputs.

A layer may merge several modules of the checkpoint (queries, keys and values), reorder their rows
or hold one rank's part of them. An adapter's matrices are cut and ordered as the module's own
weight: B by the layer's rows, A by its columns. Ranks that share a layer's inputs sum their
results, which include the adapters'.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from quire.base.errors import ConfigError, ModelError
from quire.base.settings.lora import EXPERTS, LoraConfig
from quire.models.checkpoint.adapter_files import AdaptedModule, AdapterFiles, read_adapter
from quire.models.checkpoint.adapter_sets import members_of
from quire.models.checkpoint.sources import Rows
from quire.models.gguf.adapters import GGUFAdapter
from quire.models.load.expert_adapters import JointExperts, expert_matrices
from quire.models.parts.experts import ExpertLinear
from quire.models.parts.layers import Linear
from quire.models.vision.tower import VisionTower
from quire.ops.adapters import AdapterPart, AdapterSlots, LayerSize, Slots
from quire.spec.gguf.container import GGUFFile
from quire.spec.model_spec import ModelSpec


@dataclass(frozen=True)
class ModulePosition:
    """A module's place in a layer. number: of the layer among the adapted ones. first: the module's
    first output in it."""

    layer: Linear
    number: int
    first: int
    rows: Rows

    @property
    def shape(self) -> tuple[int, int]:
        """Return outputs and inputs of the module in the checkpoint."""
        columns = self.layer.columns
        inputs = self.layer.weight.shape[1] if columns is None else columns.whole
        return sum(cut.whole for cut in self.rows.cuts), inputs


class Change(NamedTuple):
    """The change of a module by one adapter: down A [R, K], up B^T [R, N]."""

    name: str
    down_RK: torch.Tensor
    up_RN: torch.Tensor
    scale: float


Matrices = tuple[AdaptedModule, ModulePosition, torch.Tensor, torch.Tensor]  # A and B
MIXTRAL = ".block_sparse_moe.", ".mlp."  # in checkpoints, and in transformers from 5 on


# Returns the layers' own matrices, from a module's A and B.
Target = Callable[[torch.Tensor, torch.Tensor], Iterable[Matrices]]

MakeSlots = Callable[[Sequence[LayerSize]], Slots]


class ModuleNames:
    """Names of a model's modules. Files may name them with or without the names of parents."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def find(self, given: str) -> str:
        """Return the model's name of a module, or an empty text if there is not exactly one."""
        if given in self._names:
            return given
        checkpoint, other = MIXTRAL
        for name in dict.fromkeys((given, given.replace(other, checkpoint))):
            ends = [name, *_ends(name)]
            found = {each for each in ends if each in self._names}
            found |= self._by_end.get(name, set())
            if len(found) == 1:
                return found.pop()
        return ""

    @cached_property
    def _by_end(self) -> dict[str, set[str]]:
        ends: dict[str, set[str]] = {}
        for name in self._names:
            for end in _ends(name):
                ends.setdefault(end, set()).add(name)
        return ends


class AdaptedModel:
    """A model whose linear layers add the adapters of a step's rows. dtype: of the adapters'
    matrices. make_slots: makes a GPU's slots for these layers, without the experts of a mixture;
    None for the slots of a CPU."""

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        config: LoraConfig,
        dtype: torch.dtype,
        make_slots: MakeSlots | None = None,
    ) -> None:
        self._is_on_gpu, self._dtype = make_slots is not None, dtype
        layers = [each for each in _layers(model) if not self._is_fixed(each)]
        if not layers:
            raise ConfigError(
                "enable_lora: this model has no linear layers that adapters can change; remove it."
            )
        self._spec, self._config, self._joint = spec, config, JointExperts(model)
        names = [name for layer in layers for name, _ in layer.module_rows]
        if not self._is_on_gpu:
            names += [*self._joint.names(), *self._joint.names_elsewhere]
        self._names = ModuleNames(names)
        config.check_targets(names)
        adapted = [each for each in layers if _changed(each, config)]
        self.slots: Any = (
            AdapterSlots(config.max_loras, len(adapted))
            if make_slots is None
            else make_slots([_size_of(each, config) for each in adapted])
        )
        for number, layer in enumerate(adapted):
            layer.adapted = self.slots, number
        self.places = {name: place for layer in layers for name, place in _places(layer)}

    def _is_fixed(self, layer: Linear) -> bool:
        """Return whether no adapter can change a layer."""
        return self._is_on_gpu and isinstance(layer, ExpertLinear)

    def load(self, path: str, max_rank: int) -> Any:
        """Load an adapter or a weighted set of them; return what the slots' `put` takes. max_rank:
        of all adapters of a set together.
        Raises ModelError if its files are invalid or do not fit the model."""
        changes: dict[int, list[tuple[ModulePosition, Change]]] = {}  # by number of the layer
        members = members_of(path)
        all_files = [read_adapter(Path(member.path), max_rank) for member in members]
        if (total := sum(files.max_rank for files in all_files)) > max_rank:
            raise ModelError(
                f"the ranks of these {len(members)} adapters add up to {total}, but max_lora_rank"
                f" is {max_rank}; use fewer adapters, or raise it."
            )
        for member, files in zip(members, all_files, strict=True):
            try:
                for module, place, down_RK, up_NR in self._matrices(files):
                    change = self._change(place, module, member.scale, down_RK, up_NR)
                    changes.setdefault(place.number, []).append((place, change))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{files.weights} cannot be read: {error}.") from error
        found = {
            number: [self._part(first, each) for first, each in by_outputs(own)]
            for number, own in changes.items()
        }
        return self.slots.prepare(found)

    def _matrices(self, files: AdapterFiles) -> Iterator[Matrices]:
        """Yield each module's matrices. All modules are compared with the model before."""
        if files.is_gguf:
            gguf = GGUFAdapter(GGUFFile(files.weights), self._spec)
            modules = gguf.renamed(files.modules)
        else:
            modules = files.modules
        targets = [(module, self._target(module, files.weights)) for module in modules]
        if files.is_gguf:
            for module, target in targets:
                yield from target(*gguf.matrices(module))
            return
        with safe_open(files.weights, framework="pt") as file:
            for module, target in targets:
                yield from target(file.get_tensor(module.down), file.get_tensor(module.up))

    def _target(self, module: AdaptedModule, path: Path) -> Target:
        """Return a function of a module's A and B that lists the layers' own."""
        if self._is_on_gpu and EXPERTS in module.name.split("."):
            raise ModelError(
                f"{path}: {module.name} belongs to the experts of a mixture, which adapters cannot"
                " change on a GPU. Set device to cpu, or train the adapter without it."
            )
        name = self._names.find(module.name)
        self._config.check_module(name or module.name, path)
        if name in self._joint.names() and module.num_experts:
            return self._joint_target(module, name, path)
        if name in self._joint.names_elsewhere:
            return lambda down, up: ()
        place = self._place(module, self.places.get(name), path)
        return lambda down, up: [(module, place, down, up)]

    def _joint_target(self, module: AdaptedModule, name: str, path: Path) -> Target:
        tensor, is_turned = self._joint.find(module, name, path)
        first = tensor.of_all.experts.first

        def found(down: torch.Tensor, up: torch.Tensor) -> Iterator[Matrices]:
            for i, layer in enumerate(tensor.layers):
                assert layer.adapted is not None, "all of the model's layers are adapted"
                place = ModulePosition(layer, layer.adapted[1], 0, tensor.of_all.rows)
                own = expert_matrices(module, down, up, first + i, is_turned=is_turned)
                yield module, place, *own

        return found

    def _place(
        self, module: AdaptedModule, place: ModulePosition | None, path: Path
    ) -> ModulePosition:
        if place is None:
            raise ModelError(
                f"{path}: the model has no linear layer {module.name!r} that adapters can"
                " change. Embeddings and output heads are not supported."
            )
        if place.shape != (module.outputs, module.inputs):
            raise ModelError(
                f"{path}: {module.name} is a layer of {list(place.shape)} in the model, but of"
                f" {[module.outputs, module.inputs]} in the adapter; it was trained on another"
                " model."
            )
        return place

    def _change(
        self,
        place: ModulePosition,
        module: AdaptedModule,
        weight: float,
        down_RK: torch.Tensor,
        up_NR: torch.Tensor,
    ) -> Change:
        """Cut and order a module's matrices as the layer's own weight. weight: of the adapter."""
        columns, (rows, order) = place.layer.columns, place.rows.taken()
        if columns is not None:
            down_RK = down_RK.narrow(1, columns.first, columns.count)
        if rows is not None:
            up_NR = up_NR.narrow(0, rows.first, rows.count)
        if order is not None:
            up_NR = up_NR.index_select(0, order)
        return Change(module.name, down_RK, up_NR.T, weight * module.scale)

    def _part(self, first: int, changes: Sequence[Change]) -> AdapterPart:
        """Stack the changes of one module: their ranks add up. first: the module's first output."""
        [change, *others] = changes
        down_RK, up_RN, scale = change.down_RK, change.up_RN, change.scale
        if others:
            down_RK = torch.cat([each.down_RK.double() for each in changes])
            up_RN = torch.cat([each.up_RN.double() * each.scale for each in changes])
            scale = 1.0
        # Copies: a file is mapped, and may be overwritten later.
        down_RK, up_RN = (each.to(self._dtype, copy=True).contiguous() for each in (down_RK, up_RN))
        if not (down_RK.isfinite().all() and up_RN.isfinite().all()):
            raise ModelError(
                f"the adapter's matrices for {change.name} have numbers that are not finite in"
                f" {str(self._dtype).removeprefix('torch.')}; train the adapter again."
            )
        return AdapterPart(first, down_RK, up_RN, scale)


def by_outputs(
    changes: Sequence[tuple[ModulePosition, Change]],
) -> Iterable[tuple[int, list[Change]]]:
    """Group the changes of one layer by their first output. Groups do not overlap, because threads
    add to them at the same time. So a change of several modules is split if another adapter changes
    one of these alone."""
    spans = sorted({(place.first, place.rows.count) for place, _ in changes})
    overlap = any(first + count > after for (first, count), (after, _) in pairwise(spans))
    found: dict[int, list[Change]] = {}
    for place, change in changes:
        for first, own in _by_module(place, change) if overlap else [(place.first, change)]:
            found.setdefault(first, []).append(own)
    return found.items()


def _by_module(place: ModulePosition, change: Change) -> Iterator[tuple[int, Change]]:
    """Yield a change's part of each module of its layer, with the module's first output."""
    first = 0
    for _, rows in place.layer.module_rows:
        if place.first <= first < place.first + place.rows.count:
            up_RN = change.up_RN.narrow(1, first - place.first, rows.count)
            yield first, change._replace(up_RN=up_RN)
        first += rows.count


def _layers(model: nn.Module) -> Iterator[Linear]:
    """List the linear layers outside of vision towers that compute by `Linear.forward`."""
    towers = [module for module in model.modules() if isinstance(module, VisionTower)]
    outside = {id(each) for tower in towers for each in tower.modules()}
    for layer in model.modules():
        if not isinstance(layer, Linear):
            continue
        if type(layer).forward is Linear.forward and id(layer) not in outside:
            yield layer


def _changed(layer: Linear, config: LoraConfig) -> list[int]:
    """Return the outputs of the layer's modules that adapters may change."""
    return [rows.count for name, rows in layer.module_rows if config.may_change(name)]


def _size_of(layer: Linear, config: LoraConfig) -> LayerSize:
    is_aligned = all(rows.count % 16 == 0 for _, rows in layer.module_rows)
    return LayerSize(layer.weight.shape[1], tuple(_changed(layer, config)), is_aligned)


def _places(layer: Linear) -> Iterator[tuple[str, ModulePosition]]:
    """Yield the layer's modules by name. Layers that adapters may not change have no number."""
    number, first = -1 if layer.adapted is None else layer.adapted[1], 0
    for name, rows in layer.module_rows:
        yield name, ModulePosition(layer, number, first, rows)
        first += rows.count


def _ends(name: str) -> Iterator[str]:
    """List a name without some of its first parts."""
    while "." in name:
        name = name.partition(".")[2]
        yield name
