"""How much memory a vision tower takes besides its weights, in numbers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EncoderSize:
    """The size of a slot of the encoder cache, and what encoding holds at once for each token of an
    item, at most. most_tokens: of an item; None: as many as there is room for."""

    slot: int
    per_token: int
    most_tokens: int | None = None
