"""Qwen3-VL and its mixture of experts (arXiv 2511.21631): Qwen 3 with interleaved M-RoPE. Features
of the vision tower are added after the first layers (DeepStack)."""

from torch import nn

from quire.models.multimodal.mrope import MropeDecoder, mrope_options
from quire.models.parts.decoder import DecoderLayer, LayerPlace, feed_forward
from quire.models.parts.experts import ExpertForm, SparseMLP
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.models.vision.qwen3_vl import Qwen3VLTower, Qwen3VLVisionSpec
from quire.spec.model_spec import ModelSpec

SECTIONS = (24, 20, 20)  # frequencies of frames, rows and columns, if the config names none


# The authors' checkpoints store inputs before outputs; transformers 5 writes outputs first.
EXPERTS = ExpertForm(is_either_way=True)


class Qwen3VLLayer(DecoderLayer):
    """A layer of Qwen 3. Checkpoints hold all experts in one tensor, of either orientation."""

    def make_mlp(self, at: LayerPlace) -> nn.Module:
        """See DecoderLayer."""
        experts = at.options.experts
        if experts is not None and experts.is_sparse(at.layer):
            return SparseMLP(f"{at.name}.mlp", at.spec, experts, at.factory, EXPERTS)
        return feed_forward(at)


class Qwen3VL(MropeDecoder):
    """A Qwen 3 decoder with M-RoPE and normalised heads; some model types have experts."""

    tower_spec = Qwen3VLVisionSpec
    tower_kind = Qwen3VLTower
    layer_kind = Qwen3VLLayer

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        bias = spec.layers.attention_bias
        options = DecoderOptions(
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            experts=spec.experts,
            ropes=mrope_options(spec, SECTIONS, is_interleaved=True),
        )
        super().__init__(spec, options, factory)
