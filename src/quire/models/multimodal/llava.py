"""LLaVA 1.5 (arXiv 2310.03744) and LLaVA-NeXT: Llama, Mistral or Qwen 2 with CLIP."""

from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.models.vision.clip import LlavaNextTower, LlavaTower, LlavaVisionSpec
from quire.models.vision.model import VisionDecoder
from quire.spec.model_spec import ModelSpec


class Llava(VisionDecoder):
    """A LLaVA model. The type of its text part determines which layers have biases."""

    tower_spec = LlavaVisionSpec
    tower_kind = LlavaTower

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        bias, mlp_bias = spec.layers.attention_bias, spec.layers.mlp_bias
        options = DecoderOptions(qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
        if spec.model_type == "qwen2":
            options = DecoderOptions(qkv_bias=True)
        elif spec.model_type == "mistral":
            options = DecoderOptions()
        super().__init__(spec, options, factory)


class LlavaNext(Llava):
    """A LLaVA-NeXT model, which reads each image whole and as tiles."""

    tower_kind = LlavaNextTower
