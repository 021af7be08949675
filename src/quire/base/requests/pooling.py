"""What a model that pools does with hidden states, in place of generating.

    hidden states -> pooled (the last token's, the first one's, or the mean) -> layers -> numbers

The numbers are those before the last activation (a length of 1 of embeddings, softmax or sigmoid of
classes), which the front end applies, as each request wants it.
"""

import msgspec

EMBED, CLASSIFY = "embed", "classify"
LAST, MEAN, CLS = "last", "mean", "cls"
SECOND_TEXT = 1 << 30  # is added to the ids of a second text's tokens, for models that are told
DENSE_ACTIVATIONS = ("identity", "tanh", "relu", "gelu", "silu")  # of layers behind what was pooled
SOFTMAX, SIGMOID, NONE = "softmax", "sigmoid", "none"


class PoolingSpec(msgspec.Struct, frozen=True):
    """How a model pools.

    task: EMBED or CLASSIFY. kind: LAST, MEAN or CLS. activation: of classes, SOFTMAX, SIGMOID or
    NONE. normalize: embeddings have length 1. labels: names of the classes. label_tokens: the
    tokens whose rows of the generating head are the classes' weights; is_difference: the second's
    less the first's is the only one. dense: directories of sentence-transformers' dense layers,
    each with its activation. dimensions: numbers of an embedding's that requests may ask for; None
    is any, () none but all. tells_texts: the model is told which of two texts a token belongs to.
    longest: tokens of a prompt at most, if no setting says it and the model can have more.
    """

    task: str
    kind: str
    activation: str = NONE
    normalize: bool = False
    labels: tuple[str, ...] = ()
    label_tokens: tuple[int, ...] = ()
    is_difference: bool = False
    dense: tuple[tuple[str, str], ...] = ()
    dimensions: tuple[int, ...] | None = None
    tells_texts: bool = False
    longest: int | None = None

    @property
    def needs_all(self) -> bool:
        """Tell whether hidden states of all tokens count, so that no cached block can stand for
        them."""
        return self.kind != LAST

    @property
    def is_scorer(self) -> bool:
        """Tell whether its one class is a score for a pair of texts."""
        return self.task == CLASSIFY and len(self.labels) == 1


def plain_id(token_id: int) -> int:
    """Return a token's id without what says that it is of a second text."""
    return token_id - SECOND_TEXT if token_id >= SECOND_TEXT else token_id
