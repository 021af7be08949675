"""What a model that guesses offers, whatever it is: a small model, or a head of the target.

Shape legend: T tokens, R rows, D the drafter's model dim, F numbers of the target's hidden states
that it reads of each token, V the target's vocabulary.
"""

from typing import Protocol

import torch

from quire.ops.attention.base import AttentionBackend


class Drafter(Protocol):
    """Its layers have numbers behind the target's, and cache groups of their own.

    num_read: F. With 0 it reads tokens alone. Else it reads what the target has computed of a token
    beside the *next* token's id: the hidden state at position p, and the id at p + 1, give what the
    token at p + 2 may be. Its keys and values of the two stand at p.
    """

    num_read: int

    def first(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        read_TF: torch.Tensor | None,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Compute what is known of the step's tokens, [T, D]. read: None if num_read is 0."""
        ...

    def further(
        self,
        ids_R: torch.Tensor,
        positions_R: torch.Tensor,
        out_RD: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Compute one more token of each row, which was guessed, [R, D]. out: what the pass before
        gave at the rows' last tokens."""
        ...

    def logits(self, out_RD: torch.Tensor) -> torch.Tensor:
        """Compute logits of what comes next, [R, V]; -inf for tokens that it does not know."""
        ...


class Read(Protocol):
    """A target whose hidden states a drafter reads."""

    def last_read(self, num_tokens: int) -> torch.Tensor:
        """Return what the last forward pass has left for the drafter, [T, F], of its tokens in
        their order. Valid until the next forward pass."""
        ...
