"""Choose the packed formats of layers that a GGUF file holds quantised. No torch."""

from collections.abc import Iterable, Mapping

from quire.models.checkpoint.formats import StoredFormat
from quire.models.gguf.names import our_names
from quire.models.gguf.repacked import WIDE, packed_kind
from quire.models.gguf.value_heads import stored_kind
from quire.models.outline import PLAIN, Part
from quire.models.quantised.sizes import check_inputs
from quire.ops.weights.formats import SIZES, Quantization
from quire.spec.gguf.container import GGUFFile, TensorKind
from quire.spec.model_spec import ModelSpec

FORMATS = {"Q8_0": Quantization("int8_f16", 32), "Q4_0": Quantization("int4_f16", 32)} | {
    name: Quantization(name.lower(), SIZES[name.lower()].group)
    for name in ("MXFP4", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
}


def stored_formats_of_parts(
    file: GGUFFile, spec: ModelSpec, parts: Iterable[Part]
) -> dict[int, StoredFormat]:
    """Return the packed formats of an outline's quantised parts, by index."""
    kinds = kinds_by_name(file, spec)
    found: dict[int, StoredFormat] = {}
    for index, part in enumerate(parts):
        format = None
        if part.kind != PLAIN:
            format = stored_format(part.outputs, kinds)
        if format is not None:
            found[index] = format
            for name in part.tensors:
                if part.columns is not None:
                    check_inputs(name, part.columns, kinds[name].block_size)
    return found


def kinds_by_name(file: GGUFFile, spec: ModelSpec) -> dict[str, TensorKind]:
    """Return the stored format of each tensor, by its name in quire's layers."""
    return {
        name: stored_kind(place, spec)
        for place in file.tensors.values()
        for name in our_names(place, spec)
    }


def stored_format(
    outputs: Mapping[str, int], kinds: Mapping[str, TensorKind]
) -> StoredFormat | None:
    """Return the packed format of a layer that these tensors fill; None if one of them is missing
    or not quantised. outputs: number of outputs by tensor name.

    The core multiplies every quantised format of GGUF, also layers that mix formats.
    """
    if not outputs or any(name not in kinds or kinds[name].is_float for name in outputs):
        return None
    stretches: list[tuple[int, Quantization]] = []
    for name, count in outputs.items():
        format = format_of(kinds[name])
        if stretches and stretches[-1][1] == format:
            count += stretches.pop()[0]
        stretches.append((count, format))
    return StoredFormat(tuple(stretches), as_blocks=True)


def format_of(kind: TensorKind) -> Quantization:
    """Return the packed format of a quantised tensor."""
    packed = packed_kind(kind)
    return Quantization(WIDE, packed.block_size) if packed.name == WIDE else FORMATS[packed.name]
