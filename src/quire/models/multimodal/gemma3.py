"""Gemma 3 with images (arXiv 2503.19786): Gemma 3 with SigLIP.

Tokens of an image see all tokens of the same image, as far back as a layer's window lets them. So
their `MediaItem` is whole, and the step says where what they see ends (`ops/attention/base.py`).
Only the embeddings of text are scaled.
"""

from quire.models.families.gemma import Gemma2Layer, gemma3_options
from quire.models.parts.layers import ParamFactory
from quire.models.vision.model import VisionDecoder
from quire.models.vision.siglip import Gemma3Tower, Gemma3VisionSpec
from quire.spec.model_spec import ModelSpec


class Gemma3Images(VisionDecoder):
    """Layers, norms and rotations are those of the text model."""

    tower_spec = Gemma3VisionSpec
    tower_kind = Gemma3Tower
    layer_kind = Gemma2Layer

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__(spec, gemma3_options(spec, factory), factory)
