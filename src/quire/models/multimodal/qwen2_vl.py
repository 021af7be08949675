"""Qwen2-VL (arXiv 2409.12191): Qwen 2 with M-RoPE."""

from typing import Any, ClassVar

from quire.models.multimodal.mrope import MropeDecoder, mrope_options
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.models.vision.qwen2_vl import Qwen2VLTower, Qwen2VLVisionSpec
from quire.spec.model_spec import ModelSpec

SECTIONS = (16, 24, 24)  # frequencies of frames, rows and columns, if the config names none


class Qwen2VL(MropeDecoder):
    """A Qwen 2 decoder with M-RoPE and biases on queries, keys and values."""

    tower_spec: ClassVar[Any] = Qwen2VLVisionSpec
    tower_kind: ClassVar[Any] = Qwen2VLTower

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        ropes = mrope_options(spec, SECTIONS, is_interleaved=False)
        super().__init__(spec, DecoderOptions(qkv_bias=True, ropes=ropes), factory)
