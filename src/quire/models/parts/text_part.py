"""A decoder that may be the text part of a model that reads images, of which quire runs no more."""

from typing import ClassVar

from quire.models.parts.decoder import Decoder
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
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
