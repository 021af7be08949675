"""The base class of draft heads: drafters that read hidden states of their target model.

Shape legend: T tokens, R rows, F values of the target read per token, E outputs of a pass, D the
target's model dim, V the target's vocabulary.
"""

import torch

from quire.base.errors import ModelError
from quire.models.model import Model
from quire.models.parts.layers import Embedding
from quire.ops.attention.base import AttentionBackend


class DraftHead(Model):
    """A head for runner/drafting/drafting.py. Call `attach` before the first pass.

    target_layers: layers of the target whose inputs the head reads (see LayerInputs). num_read: F.
    num_out: E. embedding: the head's own; without one it shares the target's.
    """

    title: str  # its kind, as messages name it
    target_layers: tuple[int, ...]
    num_read: int
    num_out: int

    def __init__(self) -> None:
        super().__init__()
        self.embedding: Embedding | None = None
        self.head = None
        self._shared: list[Embedding] = []  # a list, so that torch registers no submodule

    def attach(self, target: Model) -> None:
        """Share layers of the target. Raises ModelError if they do not fit."""
        raise NotImplementedError

    def first(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        read_TF: torch.Tensor | None,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Return the outputs of known tokens, [T, E]. ids: the tokens at p + 1 for the target's
        states at p."""
        raise NotImplementedError

    def further(
        self,
        ids_R: torch.Tensor,
        positions_R: torch.Tensor,
        out_RE: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Return the outputs of draft tokens, [R, E]. out: outputs of the previous tokens,
        [R, E]."""
        raise NotImplementedError

    def share_embedding(self, target: Model, size: int) -> None:
        """Use the target's embedding. size: its width. Raises ModelError for another width."""
        found = next((each for each in target.modules() if isinstance(each, Embedding)), None)
        if found is None or found.weight.shape[1] != size:
            raise ModelError(
                f"the {self.title} has no embed_tokens, and this model's is not {size} wide. Use"
                " the head that was trained for this model, or one with its own embedding."
            )
        self._shared = [found]

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Return the embedded tokens, [T, D]."""
        embedded_TD: torch.Tensor = (self.embedding or self._shared[0])(ids_T)
        return embedded_TD
