"""Qwen 3.5, with and without experts: Qwen 3 Next whose linear attention has a matrix for each of
its inputs."""

from typing import ClassVar

from quire.models.parts.decoder import Decoder
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.models.qwen.qwen3_next import MORE_TOKENS, Qwen3NextLayer, hybrid_options
from quire.spec.model_spec import PART_OF, ModelSpec

AROUND = "language_model."  # what such a checkpoint puts around the text part


class TextPart(Decoder):
    """A decoder that may be such a part. of_images: beginnings of names of tensors that are of no
    use here, where it is one."""

    of_images: ClassVar[tuple[str, ...]] = ()

    def __init__(self, spec: ModelSpec, options: DecoderOptions, factory: ParamFactory) -> None:
        super().__init__(spec, options, factory)
        self._is_part = spec.raw.get(PART_OF) is not None

    def names_of(self, name: str) -> tuple[str, ...]:
        """See Model."""
        return super().names_of(self._without_whole(name))

    def ignores(self, name: str) -> bool:
        """See Model; and what reads images, where this is only the text part."""
        of_images = self._is_part and name.removeprefix(self.base_prefix).startswith(self.of_images)
        return of_images or super().ignores(self._without_whole(name))

    def _without_whole(self, name: str) -> str:
        return name.replace(AROUND, "", 1) if self._is_part else name


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
