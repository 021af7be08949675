"""Pooling: a model's conversion of hidden states into a result, instead of generation.

    hidden states -> pooled (last token's, first token's, or the mean) -> dense layers -> result

The engine returns the result before the last activation: unit length for embeddings, softmax or
sigmoid for classes. The front end applies the activation, since each request may choose it.
"""

import msgspec

EMBED, CLASSIFY = "embed", "classify"
LAST, MEAN, CLS = "last", "mean", "cls"
SECOND_TEXT = 1 << 30  # added to token ids of a pair's second text, for models with segments
DENSE_ACTIVATIONS = ("identity", "tanh", "relu", "gelu", "silu")  # of dense layers after pooling
SOFTMAX, SIGMOID, NONE = "softmax", "sigmoid", "none"


class PoolingSpec(msgspec.Struct, frozen=True):
    """A model's pooling."""

    task: str  # EMBED or CLASSIFY
    kind: str  # LAST, MEAN or CLS
    activation: str = NONE  # activation of classes: SOFTMAX, SIGMOID or NONE
    normalize: bool = False  # whether embeddings are scaled to length 1
    labels: tuple[str, ...] = ()  # names of the classes
    label_tokens: tuple[int, ...] = ()  # tokens whose rows of the LM head are the classes' weights
    is_difference: bool = False  # whether the only class is the second token's row minus the first
    dense: tuple[tuple[str, str], ...] = ()  # directory and activation of each dense layer
    dimensions: tuple[int, ...] | None = None  # allowed sizes; None any, () the full size only
    has_text_pairs: bool = False  # whether the model distinguishes the two texts of a pair
    longest: int | None = None  # default limit of tokens per prompt, below the model's own

    @property
    def needs_all(self) -> bool:
        """Return whether hidden states of all tokens matter, so that prefix hits are useless."""
        return self.kind != LAST

    @property
    def is_scorer(self) -> bool:
        """Return whether the only class is a score for a pair of texts."""
        return self.task == CLASSIFY and len(self.labels) == 1


def plain_id(token_id: int) -> int:
    """Return a token's id without the mark of a second text."""
    return token_id - SECOND_TEXT if token_id >= SECOND_TEXT else token_id
