"""A decoder with a vision tower, both from one checkpoint.

The runner computes the tower's rows (`tower.py`) and writes them to the encoder memory. The decoder
reads them in place of embeddings (`ops/embedding.py`). Prompts without images do not run the tower.
"""

from dataclasses import replace
from typing import Any, ClassVar

from quire.models.checkpoint.rank_place import WHOLE
from quire.models.parts.decoder import Decoder
from quire.models.parts.layers import Linear, ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.models.vision.tower import VisionTower
from quire.spec.media_families import whole_fields
from quire.spec.model_spec import ModelSpec

AROUND = "language_model."  # prefix of the text part in checkpoints


class VisionDecoder(Decoder):
    """A decoder that has a tower if its config describes one. Every rank and stage holds the whole
    tower.

    tower_spec: class of the tower's sizes. Its `from_config` gets `config.json` without the text
    part, and the width of the text model; it may raise ModelError. tower_kind: class of the tower,
    which gets the sizes and the factory.

    `--quantization` does not apply to the tower. A tower that a checkpoint quantises stays so.
    """

    tower_spec: ClassVar[Any]
    tower_kind: ClassVar[Any]

    def __init__(self, spec: ModelSpec, options: DecoderOptions, factory: ParamFactory) -> None:
        super().__init__(spec, options, factory)
        whole = whole_fields(spec.raw)
        if whole is None:
            return
        sizes = self.tower_spec.from_config(whole, spec.hidden_size)
        tower: VisionTower = self.tower_kind(sizes, replace(factory, place=WHOLE))
        self.vision, self.num_features = tower, tower.width // spec.hidden_size - 1
        for module in tower.modules():
            if isinstance(module, Linear):
                module.keeps_dtype = True

    def names_of(self, name: str) -> tuple[str, ...]:
        """See Model."""
        if self.vision is None:
            return super().names_of(name)
        if self.vision.owns(name):
            return self.vision.names_of(name)
        return super().names_of(name.replace(AROUND, "", 1))

    def ignores(self, name: str) -> bool:
        """See Model."""
        if self.vision is not None and self.vision.owns(name):
            return self.vision.ignores(name)
        return super().ignores(name)
