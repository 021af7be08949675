"""Qwen 3.5, with and without experts: like Qwen 3 Next, but checkpoints store the inputs of linear
attention in separate matrices."""

from quire.models.parts.layers import ParamFactory
from quire.models.parts.text_part import TextPart
from quire.models.qwen.qwen3_next import MORE_TOKENS, Qwen3NextLayer, hybrid_options
from quire.spec.model_spec import ModelSpec


class Qwen3_5Layer(Qwen3NextLayer):  # noqa: N801 (as it is called)
    """A layer of Qwen 3.5, with a dense feed-forward layer if the config has no experts."""

    by_key_head = False


class Qwen3_5(TextPart):  # noqa: N801
    """The text model (`qwen3_5_text`, `qwen3_5_moe_text`), also as the text part of `qwen3_5` and
    `qwen3_5_moe`. These read images and have three positions per token, which are equal in text."""

    layer_kind = Qwen3_5Layer
    of_images = ("visual.",)

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__(spec, hybrid_options(spec), factory)

    def ignores(self, name: str) -> bool:
        """See TextPart. Also ignore the layers for multi-token prediction."""
        return name.startswith(MORE_TOKENS) or super().ignores(name)
