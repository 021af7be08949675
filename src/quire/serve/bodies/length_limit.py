"""A request's own limit of its length, such as num_ctx of Ollama."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LengthLimit:
    """Limit of a prompt and its answer together, below the engine's. field: of the body."""

    num_tokens: int
    field: str
