"""Train a model whose log-probabilities equal the engine's bit for bit.

from quire.training import Samples, TrainingModel
"""

from quire.training.model import TrainingModel as TrainingModel
from quire.training.samples import Samples as Samples

__all__ = ["Samples", "TrainingModel"]
