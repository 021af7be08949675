"""Qwen2.5-VL (arXiv 2502.13923): the decoder of Qwen2-VL with another tower."""

from quire.models.multimodal.qwen2_vl import Qwen2VL
from quire.models.vision.qwen2_5_vl import Qwen25VLTower, Qwen25VLVisionSpec


class Qwen25VL(Qwen2VL):
    """The text part of Qwen2-VL with the vision tower of Qwen2.5-VL."""

    tower_spec = Qwen25VLVisionSpec
    tower_kind = Qwen25VLTower
