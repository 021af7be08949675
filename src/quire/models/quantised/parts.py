"""Predict from the config alone which parts of a model's outline a checkpoint holds quantised."""

from collections.abc import Iterable

from quire.models.checkpoint.formats import StoredFormat
from quire.models.outline import HEAD, LINEAR, Part
from quire.models.quantised.sizes import quantization_of
from quire.spec.model_spec import ModelSpec
from quire.spec.quantization_config import QuantizationConfig, StoredWeight

WEIGHT = ".weight"


def quantised_parts(
    spec: ModelSpec, parts: Iterable[Part], *, is_gpu: bool
) -> dict[int, StoredFormat]:
    """Return the packed formats of an outline's quantised parts, by index."""
    config = spec.quantization
    found: dict[int, StoredFormat] = {}
    for index, part in enumerate(parts):
        if config is None or part.kind not in (LINEAR, HEAD) or part.is_tied:
            continue
        scheme = next((_stored_as(config, name) for name in part.tensors), None)
        cuts_sorted = scheme is not None and scheme.sorts_inputs and scheme.group_size > 0
        if cuts_sorted and part.columns is not None:
            continue  # it is dequantised
        if scheme is not None:
            format = quantization_of(scheme, part.shape[-1], is_gpu=is_gpu)
            found[index] = StoredFormat(((part.shape[0], format),), as_blocks=False)
    return found


def _stored_as(config: QuantizationConfig, tensor: str) -> StoredWeight | None:
    module = tensor.removesuffix(WEIGHT)
    return None if config.excludes(module) else config.stored_as(module)
