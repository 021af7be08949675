"""Qwen 3.5, with and without experts: Qwen 3 Next whose linear attention has a matrix for each of
its inputs."""

from quire.base.model_spec import ModelSpec
from quire.models.layers import ParamFactory
from quire.models.qwen3_next import MORE_TOKENS, Qwen3NextLayer, hybrid_options
from quire.models.text_part import TextPart


class Qwen3_5Layer(Qwen3NextLayer):  # noqa: N801 (as it is called)
    """Without experts its feed-forward layer is dense."""

    by_key_head = False


class Qwen3_5(TextPart):  # noqa: N801
    """The text model (`qwen3_5_text`, `qwen3_5_moe_text`), also as a part of one that reads images
    (`qwen3_5`, `qwen3_5_moe`), whose three positions are one for text."""

    layer_kind = Qwen3_5Layer
    of_images = ("visual.",)

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__(spec, hybrid_options(spec), factory)

    def ignores(self, name: str) -> bool:
        """See TextPart; and the part that guesses more tokens."""
        return name.startswith(MORE_TOKENS) or super().ignores(name)
