"""Find the layers that a checkpoint holds quantised, and convert their tensors to one weight each.

Input: the headers of the weight files, the config, a model without memory. Output: a
`QuantisedLayer` for each quantised layer, or an error for inconsistent tensors. The config says how
weights are quantised. The files decide which: a module with a plain weight stays plain.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn

from quire.base.errors import ModelError
from quire.models.checkpoint.files import TensorHeader, listed
from quire.models.checkpoint.sources import Source
from quire.models.parts.head_linear import HeadLinear
from quire.models.parts.layers import Linear, LMHead
from quire.models.quantised import awq, float4, float8, gptq, integers, packed
from quire.models.quantised.cutting import step_of, take_inputs, take_outputs
from quire.models.quantised.sizes import check_inputs, quantization_of
from quire.models.quantised.tensors import INPUTS, Shape, TensorLayout
from quire.ops.weights.formats import Quantization
from quire.ops.weights.stored_rows import StoredRows, selected
from quire.spec import quantization_config as forms
from quire.spec.quantization_config import QuantizationConfig, StoredWeight

Quantisable = Linear | LMHead | HeadLinear  # layers that checkpoints may hold quantised
QUANTISABLE = (Linear, LMHead, HeadLinear)
WEIGHT = ".weight"
PLAIN = ("F64", "F32", "F16", "BF16")


class TensorsOf(Protocol):
    """Function that describes the tensors of a module, by the suffixes of their names."""

    def __call__(self, scheme: StoredWeight, shape: Shape) -> dict[str, TensorLayout]: ...


class RowsOf(Protocol):
    """Function that makes the rows of a weight from its tensors, `found`."""

    def __call__(
        self, scheme: StoredWeight, shape: Shape, found: Mapping[str, torch.Tensor]
    ) -> StoredRows: ...


class Form(NamedTuple):
    """A quantised storage format."""

    tensors: TensorsOf
    rows: RowsOf
    is_named_by_module: bool = True  # whether names extend the module's name, not the weight's
    turns: bool = False  # whether outputs come first even if the plain weight is transposed


FORMS: Mapping[str, Form] = {
    forms.GPTQ: Form(gptq.tensors, gptq.rows, turns=True),
    forms.AWQ: Form(awq.tensors, awq.rows, turns=True),
    forms.PACKED: Form(packed.tensors, packed.rows),
    forms.INTEGERS: Form(integers.tensors, integers.rows),
    forms.FLOAT8: Form(float8.tensors, float8.rows),
    forms.FLOAT4: Form(float4.tensors, float4.rows),
    forms.FLOAT4_BLOCKS: Form(
        float4.block_tensors, float4.block_rows, is_named_by_module=False, turns=True
    ),
}


@dataclass(frozen=True, eq=False)
class QuantisedPart:
    """The outputs of a layer that one quantised module of the checkpoint holds."""

    source: Source  # source of the layer that the module fills
    scheme: StoredWeight
    tensors: Mapping[str, str]  # names of the module's tensors, by suffix
    scales: str  # dtype of the scales
    unused: tuple[str, ...]  # names of the module's tensors that no weight depends on
    zeros: tuple[str, ...]  # names of tensors that must be zero

    @property
    def cuts_sorted_groups(self) -> bool:
        """Return whether the rank holds a part of inputs that were sorted before grouping."""
        scheme = self.scheme
        return scheme.sorts_inputs and scheme.group_size > 0 and self.source.columns is not None

    def rows(self, found: Mapping[str, torch.Tensor]) -> StoredRows:
        """Return the rows that the source fills. found: tensors by name. Raises ModelError for
        contradicting values."""
        rows, first = self._taken(found)
        assert first == 0, "a rank has whole groups"
        return rows

    def fill(self, destination: torch.Tensor, found: Mapping[str, torch.Tensor]) -> None:
        """Write the dequantised rows to a destination [N, K], rounded once to its dtype."""
        dtype = torch.float64 if destination.dtype == torch.float64 else torch.float32
        rows, first = self._taken(found)
        destination.copy_(rows.dequantised(dtype).narrow(1, first, destination.shape[1]))

    def check(self, headers: Mapping[str, TensorHeader]) -> None:
        """Raise ConfigError if the rank's inputs are not whole groups."""
        if self.source.columns is not None:
            form, shape = FORMS[self.scheme.form], _whole_shape(self.source)
            expected = form.tensors(self.scheme, shape[-2:])
            stored = {end: headers[name].shape for end, name in self.tensors.items()}
            stored = {end: own[len(shape) - 2 :] for end, own in stored.items()}
            step = step_of(expected, stored, shape[-2:], INPUTS)
            check_inputs(self.source.name.removesuffix(WEIGHT), self.source.columns, step)

    def _taken(self, found: Mapping[str, torch.Tensor]) -> tuple[StoredRows, int]:
        """Return the rows, widened to whole groups, and the index of the first requested input."""
        source, form, first = self.source, FORMS[self.scheme.form], 0
        values: Mapping[str, torch.Tensor]
        values = {end: found[name] for end, name in self.tensors.items()}
        whole, outputs = _whole_shape(source), source.order
        if source.part is not None:
            values = {end: each[source.part.first] for end, each in values.items()}
        shape = whole[-2:]
        expected = form.tensors(self.scheme, shape)
        if source.rows is not None:
            own = torch.arange(source.rows.first, source.rows.first + source.rows.count)
            own = own if outputs is None else own[outputs]
            values, shape, outputs = take_outputs(values, expected, shape, own)
        if source.columns is not None:
            values, shape, first = take_inputs(values, expected, shape, source.columns)
        try:
            rows = form.rows(self.scheme, shape, values)
        except ModelError as error:
            raise ModelError(f"{source.name} contradicts itself: {error}.") from error
        return rows if outputs is None else selected(rows, outputs), first


@dataclass(frozen=True, eq=False)
class QuantisedLayer:
    """A layer with quantised parts. parts: quantised parts by source name. outputs: number of
    outputs of each source in order, including plain sources. stays_quantised: whether the weight
    stays quantised; otherwise it is dequantised."""

    parts: Mapping[str, QuantisedPart]
    outputs: Mapping[str, int]
    stays_quantised: bool

    def stretches(self, *, is_gpu: bool = False) -> tuple[tuple[int, Quantization | None], ...]:
        """Return (number of outputs, packed format) for each range of outputs, in order. It applies
        only if the weight stays quantised."""
        found: list[tuple[int, Quantization | None]] = []
        for name, outputs in self.outputs.items():
            part, format = self.parts.get(name), None
            if part is not None:
                inputs = part.source.destination.shape[-1]
                format = quantization_of(part.scheme, inputs, part.scales, is_gpu=is_gpu)
            if found and found[-1][1] == format:
                outputs += found.pop()[0]
            found.append((outputs, format))
        return tuple(found)

    def pieces(
        self, sources: Iterable[Source], found: Mapping[str, torch.Tensor]
    ) -> list[StoredRows | torch.Tensor]:
        """Return the rows of each source of the layer, in order, quantised or plain [N, K].

        found: tensors by name."""
        return [
            self.parts[source.name].rows(found)
            if source.name in self.parts
            else source.taken(found[source.name])
            for source in sources
            if source.name in self.outputs
        ]


def quantised_layers(
    model: nn.Module,
    config: QuantizationConfig,
    headers: Mapping[str, TensorHeader],
    *,
    stays_quantised: bool,
    is_gpu: bool = False,
) -> dict[nn.Module, QuantisedLayer]:
    """Find the layers whose weights the files hold quantised. headers: headers by source name.

    Raises ModelError for missing tensors and for a wrong shape or dtype. On a GPU, also raises it
    for modules that are multiplied together but stored in different formats.
    """
    found: dict[nn.Module, QuantisedLayer] = {}
    for layer in model.modules():
        if not isinstance(layer, QUANTISABLE):
            continue
        sources = [each for each in layer.sources() if each.destination.dim() == 2]
        biases = {each.name for each in layer.sources() if each.destination.dim() == 1}
        parts = {each.name: _part(each, config, headers, biases) for each in sources}
        quantised = {name: part for name, part in parts.items() if part is not None}
        if not quantised:
            continue
        outputs = {each.name: each.destination.shape[0] for each in sources}
        # A part of sorted inputs has groups of unequal sizes, which kernels cannot multiply.
        cuts_sorted = any(p.cuts_sorted_groups for p in quantised.values())
        stays = stays_quantised and not cuts_sorted and not isinstance(layer, HeadLinear)
        found[layer] = QuantisedLayer(quantised, outputs, stays)
        if found[layer].stays_quantised:
            for part in quantised.values():
                part.check(headers)
        if found[layer].stays_quantised and is_gpu and len(found[layer].stretches(is_gpu=True)) > 1:
            raise ModelError(
                f"{listed(list(parts))} are multiplied together, but stored in different formats,"
                " for which GPUs have no kernel; --quantization none computes them in the dtype."
            )
    return found


def _part(
    source: Source,
    config: QuantizationConfig,
    headers: Mapping[str, TensorHeader],
    biases: Container[str],
) -> QuantisedPart | None:
    """Find the tensors of one module; None if it is plain or absent. biases: names of the layer's
    biases. AutoGPTQ writes a bias of zeros for each layer without one."""
    module = source.name.removesuffix(WEIGHT)
    scheme = config.stored_as(module)
    plain = headers.get(source.name)
    if scheme is None or (plain is not None and plain.dtype in PLAIN):
        return None
    form = FORMS[scheme.form]
    stem = module if form.is_named_by_module else source.name
    shape = _whole_shape(source)
    expected = form.tensors(scheme, shape)
    names = {end: _present(stem, end, each, headers) for end, each in expected.items()}
    present = {end: name for end, name in names.items() if name in headers}
    missing = [
        names[end] for end, each in expected.items() if each.is_needed and end not in present
    ]
    if not any(expected[end].is_needed for end in present):
        return None
    if missing:
        raise ModelError(
            f"{module} is stored as {scheme.form}, but the weight files lack {listed(missing)}: the"
            " download is incomplete, or config.json belongs to another checkpoint."
        )
    if source.transposed and not form.turns:
        raise ModelError(
            f"{module} is stored as {scheme.form}, which is supported for other layers only."
        )
    for end, name in present.items():
        _check(name, headers[name], expected[end])
    used = {end: name for end, name in present.items() if expected[end].is_used}
    unused = tuple(set(present.values()) - set(used.values()))
    bias = f"{module}.bias"
    zeros = (bias,) if bias in headers and bias not in biases else ()
    scales = next(headers[name].dtype for end, name in used.items() if "scale" in end)
    return QuantisedPart(source, scheme, used, scales, unused, zeros)


def _present(
    stem: str, end: str, expected: TensorLayout, headers: Mapping[str, TensorHeader]
) -> str:
    """Return the name under which files hold a tensor; the first name if they lack it."""
    names = [f"{stem}{each}" for each in (end, *expected.other_names)]
    return next((name for name in names if name in headers), names[0])


def _check(name: str, header: TensorHeader, expected: TensorLayout) -> None:
    if expected.shapes and header.shape not in expected.shapes:
        shapes = " or ".join(str(list(shape)) for shape in expected.shapes)
        raise ModelError(
            f"the tensor {name} has the shape {list(header.shape)}, but config.json requires"
            f" {shapes}: the config and the weights belong to different models."
        )
    if expected.dtypes and header.dtype not in expected.dtypes:
        raise ModelError(
            f"the tensor {name} holds {header.dtype}, not {' or '.join(expected.dtypes)} as in"
            " quantization_config: the config and the weights belong to different models."
        )


def _whole_shape(source: Source) -> Shape:
    """Return the shape of the stored module, [N, K], or [experts, N, K] for all experts. Quantised
    weights have this layout even if plain weights are transposed."""
    shape = source.checkpoint_shape
    return (*shape[:-2], shape[-1], shape[-2]) if source.transposed else shape
