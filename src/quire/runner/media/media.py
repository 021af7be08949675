"""What a runner does about media: follows the rows' items, encodes, and makes model inputs."""

from pathlib import Path
from typing import Any

from quire.base.model_spec import read_config
from quire.base.plan import Plan
from quire.models.model import Model
from quire.runner.media.encoder import Encoder
from quire.runner.media.positions import NUM_AXES, PositionRule, RowOffsets
from quire.runner.media.spans import RowSpans
from quire.runner.media.step_media import StepMedia, reads_of


class Media:
    """The media of a runner's rows, an `Attachment` of its forward pass.

    encoder: None where nothing is encoded: the model has no vision tower, or an earlier stage
    encodes. rule: of a model with three positions for each token; None: they are the indices.
    """

    def __init__(self, encoder: Encoder | None = None, rule: PositionRule | None = None) -> None:
        self._encoder = encoder
        self._offsets = None if rule is None else RowOffsets(rule)
        self._spans = RowSpans()
        self.at_rest = StepMedia(num_axes=1 if rule is None else NUM_AXES)

    def prepare(self, plan: Plan) -> StepMedia:
        """Note which rows a plan starts, forks and releases; return what its step does."""
        offsets = None
        self._spans.follow(plan)
        ends = self._spans.of_step(plan)
        if self._offsets is not None:
            self._offsets.follow(plan)
            offsets = self._offsets.of_step(plan)
        if offsets is None and ends is None and not (plan.encoder_inputs or plan.encoder_reads):
            return self.at_rest
        if self._encoder is None:
            return StepMedia(num_axes=self.at_rest.num_axes, offsets=offsets, ends=ends)
        return StepMedia(
            self._encoder,
            self.at_rest.num_axes,
            plan.encoder_inputs,
            *reads_of(plan),
            offsets=offsets,
            ends=ends,
        )


def make_media(model: Any, directory: Path) -> Media | None:
    """Make the media of a runner; None of a model that reads only text. model: as it was loaded,
    with its encoder memory; one of another package reads only text. directory: the model's. Raises
    ModelError for its config."""
    if not isinstance(model, Model) or (model.vision is None and model.position_axes == 1):
        return None
    rule = None if model.position_axes == 1 else PositionRule.from_config(read_config(directory))
    if model.vision is None or model.encoder_memory is None:
        return Media(rule=rule)
    return Media(Encoder(model.vision, model.encoder_memory), rule)
