"""Predict the packed format of weights that stay quantised, from their stored format."""

from quire.base.errors import ConfigError
from quire.ops.weights.formats import Quantization
from quire.ops.weights.pack import stored_group
from quire.ops.weights.stored_rows import FLOAT4_BLOCK
from quire.spec.cuts import Cut
from quire.spec.quantization_config import FLOAT4, FLOAT4_BLOCKS, FLOAT8, StoredWeight

KINDS = {"F16": "_f16", "F32": "_f32"}  # suffixes for the dtype of scales in the core's formats


def quantization_of(
    scheme: StoredWeight, num_inputs: int, scales: str = "F16", *, is_gpu: bool = False
) -> Quantization:
    """Return the packed format of a layer with num_inputs inputs, or a format of the same size.

    scales: dtype of the scales, named as in safetensors. Raises ConfigError for groups that the
    kernels cannot multiply.
    """
    group = scheme.group_size if 0 < scheme.group_size < num_inputs else 0
    if scheme.form == FLOAT8:
        return Quantization("fp8", group)
    if scheme.form in (FLOAT4, FLOAT4_BLOCKS):
        return Quantization("mxfp4", FLOAT4_BLOCK)
    if is_gpu:
        return Quantization(f"int{scheme.bits}", group, is_stored=True)
    name = f"int{scheme.bits}{KINDS.get(scales, '')}{'_zeros' if scheme.has_zeros else ''}"
    return Quantization(name, stored_group(group or num_inputs, num_inputs), is_stored=True)


def check_inputs(module: str, columns: Cut, step: int) -> None:
    """Raise ConfigError if a rank's inputs are not whole groups. step: inputs per group."""
    if columns.first % step or (columns.count % step and columns.count < columns.whole):
        raise ConfigError(
            f"{module} is stored in groups of {step} inputs. Each of"
            f" {columns.whole // columns.count} ranks has {columns.count} of its {columns.whole}"
            " inputs, which is not a whole number of groups. Use another tensor_parallel_size,"
            " or --quantization none, which computes the weights in the dtype."
        )
