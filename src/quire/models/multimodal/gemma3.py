"""Gemma 3 with images (arXiv 2503.19786): Gemma 3 with SigLIP.

A token of an image attends to all tokens of its image, later ones too, but not to tokens before
the layer's window. So its `MediaItem` is whole, and the step gives the end of the tokens that it
attends to (`ops/attention/base.py`). Only the embeddings of text are scaled.
"""

from quire.models.families.gemma import Gemma2Layer, gemma3_options
from quire.models.parts.layers import ParamFactory
from quire.models.vision.model import VisionDecoder
from quire.models.vision.siglip import Gemma3Tower, Gemma3VisionSpec
from quire.spec.model_spec import ModelSpec


class Gemma3Images(VisionDecoder):
    """The text model of Gemma 3 with SigLIP; layers, norms and rotations are unchanged."""

    tower_spec = Gemma3VisionSpec
    tower_kind = Gemma3Tower
    layer_kind = Gemma2Layer

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__(spec, gemma3_options(spec, factory), factory)
