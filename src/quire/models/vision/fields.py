"""Read the parts of a model's `config.json` that describe its vision tower.

A field that changes the result is either implemented or rejected by name.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quire.models.parts.layers import ACTIVATIONS, GATES
from quire.models.vision.layers import Activation
from quire.ops.elementwise import quick_gelu
from quire.spec.config_fields import Fields

VISION_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {**ACTIVATIONS, "quick_gelu": quick_gelu}
)
VISION_GATES: Mapping[str, Activation] = MappingProxyType(GATES)
NUM_CHANNELS = 3


def vision_fields(config: Fields, defaults: Mapping[str, Any]) -> Fields:
    """Return the fields of `vision_config`. defaults: transformers' values for absent fields."""
    raw = config.value("vision_config")
    if not isinstance(raw, dict):
        raise config.error("vision_config", "it must be an object with fields of its own")
    fields = Fields(raw, "config.json: vision_config", defaults)
    for name in ("in_channels", "num_channels"):
        if fields.integer(name, default=NUM_CHANNELS) != NUM_CHANNELS:
            raise fields.error(name, f"images have {NUM_CHANNELS} channels")
    return fields


def head_dim_of(fields: Fields, width: int, heads: int, multiple: int = 1) -> int:
    """Return the size of a head. Raises ModelError unless it is a multiple of this number."""
    size = width // heads
    if size * heads != width or size % multiple:
        names = ("num_heads", "num_attention_heads")
        name = next((each for each in names if fields.has(each)), names[0])
        raise fields.error(
            name, f"heads must divide the width {width} into multiples of {multiple} numbers"
        )
    if fields.integer("head_dim", default=size) != size:
        raise fields.error("head_dim", f"it must be {size}, the width over the number of heads")
    return size


def function_of(fields: Fields, name: str, default: str, known: Mapping[str, Activation]) -> str:
    """Return the name of an activation. Raises ModelError if it is not one of the known."""
    found = fields.text(name, default)
    if found not in known:
        raise fields.error(name, f"supported are {', '.join(sorted(known))}")
    return found


def axial_theta(fields: Fields) -> float:
    """Return the base of the two-dimensional rotation. Raises ModelError for other rotations."""
    theta = fields.number("rope_theta", 10_000.0)
    if fields.has("rope_scaling"):
        raise fields.error("rope_scaling", "rotations of a tower cannot be scaled; remove it")
    rope = fields.inner("rope_parameters") or Fields({})
    for name in rope.names():
        if name not in ("rope_type", "rope_theta"):
            raise rope.error(name, "supported are rope_type and rope_theta")
    if rope.text("rope_type", "axial") != "axial":
        raise rope.error("rope_type", "a tower supports axial only")
    return rope.number("rope_theta", theta)


def check_outputs(fields: Fields, name: str, outputs: int, hidden_size: int) -> None:
    """Raise ModelError if the tower's outputs are not as wide as the text model."""
    if outputs != hidden_size:
        raise fields.error(name, f"it must be the hidden size of the text model, {hidden_size}")
