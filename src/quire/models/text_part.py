"""The text part of a model that reads images, too, whose checkpoint holds both."""

from typing import ClassVar

from quire.base.model_spec import ModelSpec
from quire.base.text_config import PART_OF
from quire.models.decoder import Decoder
from quire.models.layers import ParamFactory
from quire.models.options import DecoderOptions

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
