"""Choose the ranks that run the vision tower: every rank whose layers read its outputs."""

from typing import Any

from quire.models.checkpoint.rank_place import RankPlace
from quire.models.model import Model
from quire.spec.media_families import EncoderSize
from quire.spec.model_spec import ModelSpec


def encoder_size(model: Any, spec: ModelSpec, place: RankPlace) -> EncoderSize | None:
    """Return the memory that a rank's vision tower needs; None if no layer here reads its outputs.

    The first stage reads them in place of embeddings. Layers that add features (DeepStack) may
    belong to later stages as well, which then run the tower again. model: any module; only a Model
    can have a tower. spec: spec of the whole model.
    """
    tower = model.vision if isinstance(model, Model) else None
    if tower is None:
        return None
    num_features = tower.width // spec.hidden_size - 1
    first = place.layers(spec.num_layers).start
    return tower.size if first < max(1, num_features) else None
