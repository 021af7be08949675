"""Qwen 3.5, with and without experts: like Qwen 3 Next, but checkpoints store the inputs of linear
attention in separate matrices."""

from typing import ClassVar

from quire.models.parts.decoder import Decoder
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.models.qwen.qwen3_next import MORE_TOKENS, Qwen3NextLayer, hybrid_options
from quire.spec.model_spec import PART_OF, ModelSpec

AROUND = "language_model."  # prefix of the text part in checkpoints with a vision tower


class TextPart(Decoder):
    """A decoder that may be the text part of a model that reads images. of_images: prefixes of the
    names of tensors that a text part ignores."""

    of_images: ClassVar[tuple[str, ...]] = ()

    def __init__(self, spec: ModelSpec, options: DecoderOptions, factory: ParamFactory) -> None:
        super().__init__(spec, options, factory)
        self._is_part = spec.raw.get(PART_OF) is not None

    def names_of(self, name: str) -> tuple[str, ...]:
        """See Model."""
        return super().names_of(self._without_whole(name))

    def ignores(self, name: str) -> bool:
        """See Model. A text part also ignores the tensors that read images."""
        of_images = self._is_part and name.removeprefix(self.base_prefix).startswith(self.of_images)
        return of_images or super().ignores(self._without_whole(name))

    def _without_whole(self, name: str) -> str:
        return name.replace(AROUND, "", 1) if self._is_part else name


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
