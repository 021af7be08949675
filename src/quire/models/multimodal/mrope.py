"""What decoders with M-RoPE share: positions of three axes, frame, row and column.

Source: Qwen2-VL, arXiv 2409.12191. Each frequency turns by the position on one axis.
"""

from dataclasses import replace

from quire.models.vision.model import VisionDecoder
from quire.spec.model_spec import ModelSpec
from quire.spec.rope_options import RopeOptions, own_fields

NUM_AXES = 3
SECTION, INTERLEAVED = "mrope_section", "mrope_interleaved"


class MropeDecoder(VisionDecoder):
    """A decoder whose positions have three axes."""

    position_axes = NUM_AXES


def mrope_options(
    spec: ModelSpec, sections: tuple[int, int, int], *, is_interleaved: bool
) -> list[RopeOptions]:
    """Return the rotary embedding of each layer. sections: of each axis the number of frequencies,
    where the config does not say it.

    is_interleaved: rows and columns take every third frequency, from the second and third on;
    frames take the others. Otherwise the axes follow each other. Raises ModelError.
    """
    rope, own, half = spec.rope, own_fields(spec.fields), spec.head_dim // 2
    given = own.integers(SECTION) or sections
    if len(given) != NUM_AXES:
        raise own.error(SECTION, "it must be the number of frequencies of each of three axes")
    if own.flag(INTERLEAVED, is_interleaved) != is_interleaved:
        raise own.error(INTERLEAVED, f"models of this type need {str(is_interleaved).lower()}")
    if is_interleaved:
        axes = [i % NUM_AXES if i < NUM_AXES * given[i % NUM_AXES] else 0 for i in range(half)]
    else:
        if sum(given) != half:
            raise own.error(SECTION, f"its sum must be {half}, half of a head")
        axes = [axis for axis, count in enumerate(given) for _ in range(count)]
    return [replace(rope, axes=tuple(axes))] * spec.num_layers
