"""Qwen2.5-VL (arXiv 2502.13923): the decoder of Qwen2-VL with another tower."""

from quire.base.config_fields import Fields
from quire.models.layers import ParamFactory
from quire.models.multimodal.qwen2_vl import Qwen2VL
from quire.models.vision.qwen2_5_vl import Qwen25VLTower, Qwen25VLVisionSpec
from quire.models.vision.tower import VisionTower


class Qwen25VL(Qwen2VL):
    """The text part is that of Qwen2-VL."""

    def make_tower(self, config: Fields, hidden_size: int, factory: ParamFactory) -> VisionTower:
        """See VisionDecoder."""
        return Qwen25VLTower(Qwen25VLVisionSpec.from_config(config, hidden_size), factory)
