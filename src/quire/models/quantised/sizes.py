"""What weights that stay quantised are packed as, foretold from how they are stored. No torch."""

from quire.base.quantization_config import StoredWeight
from quire.ops.formats import Quantization


def quantization_of(how: StoredWeight, num_inputs: int) -> Quantization:
    """Say what the weight of a layer with so many inputs is packed as."""
    group = how.group_size if 0 < how.group_size < num_inputs else 0
    return Quantization(f"int{how.bits}", group)
