"""Shared parts of decoders with M-RoPE: positions with three axes (frame, row and column).

Source: Qwen2-VL, arXiv 2409.12191. Each frequency rotates by the position on one axis.
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
    """Return the options of each layer's rotary embedding. sections: default number of frequencies
    of each axis, for a config without `mrope_section`.

    is_interleaved: whether rows and columns use every third frequency, from the second and third
    on, and frames the rest. Otherwise the axes follow each other. Raises ModelError for a config
    that contradicts it, or for sections that do not fit.
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
